"""Run the cells of a table on an existing Ray cluster."""

import hashlib
import io
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from posy.commands.archive import clear
from posy.commands.launch import APP
from posy.commands.table import Cell, Start, prepared, stop
from posy.forked import CORES
from posy.settings import LaunchError, Scalar

RETRIES = 10
"""Maximum number of times that Posy retries a cell whose worker is lost."""
CONNECT_SECONDS = 10.0
"""Timeout in seconds for connecting to the head node of a cluster."""
STOP_SECONDS = 10.0
"""Seconds to wait for a cancelled run to end."""
RUN = "run"


@contextmanager
def cluster(address: str, gpus: float) -> Iterator[Start]:
    """Connect to a cluster, and yield a function that starts a cell on it with one core and ``gpus`` GPUs.

    The workers need the same version of Posy as this machine, and the data at the same path.
    Raises :class:`LaunchError` if no cluster answers at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray's own timeout is several minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"--ray {address}: no Ray cluster answers at this address ({reason})") from error
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(run_on_worker)
    digest = digest_of_code()

    def begin(cell: Cell) -> RemoteRun:
        clear(cell.path)
        cell.path.parent.mkdir(parents=True, exist_ok=True)
        return RemoteRun(cell, task.remote(dict(cell.config), digest))

    try:
        yield begin
    finally:
        ray.shutdown()


def digest_of_code() -> str:
    """Return a digest of Posy's source files, which differs between versions."""
    digest = hashlib.blake2b(digest_size=16)
    folders = os.walk(APP / "posy", followlinks=True)
    for file in sorted(Path(folder) / name for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def run_on_worker(config: Mapping[str, Scalar], digest: str) -> tuple[int, str, bytes]:
    """Execute a run on a worker; return its exit status, its output, and an archive of its files."""
    if digest != digest_of_code():
        raise RuntimeError("the Ray worker has a different version of Posy; install the same version on all machines")
    with TemporaryDirectory(prefix="posy-") as folder:
        # Disable checkpoints, which would be lost: the folder is deleted when the process exits.
        overrides: dict[str, Scalar] = {"output-dir": folder, "run-name": RUN, "checkpoint-every": 0}
        cell = Cell("", "", 0, {**config, **overrides})
        process = start_run(cell)
        try:
            status = process.wait()
        finally:  # for example when the user interrupts `posy table`
            stop([process])
        return status, cell.log.read_text(encoding="utf-8", errors="replace"), pack_files(cell.path)


def start_run(cell: Cell) -> "subprocess.Popen[bytes]":
    """Start the run of a cell on one core, in a process that is separate from Ray's worker."""
    file = prepared(cell)
    python_path = filter(None, (str(APP), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", CORES: "1", "PYTHONPATH": os.pathsep.join(python_path)}
    with cell.log.open("w", encoding="utf-8") as log:
        # -P: keep files in the working directory from shadowing Posy's packages.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "posy", "run", str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def pack_files(folder: Path) -> bytes:
    """Return the files of a run, except its models, as a compressed tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for item in sorted(folder.iterdir()) if folder.is_dir() else ():
            if item.name != "models":
                archive.add(item, item.name)
    return content.getvalue()


class RemoteRun:
    """A cell that runs on the cluster, with the interface of a process."""

    returncode: int | None = None

    def __init__(self, cell: Cell, result: Any) -> None:
        self._cell, self._result = cell, result

    def poll(self) -> int | None:
        """Return the exit status, or None if the run is in progress; store a finished run's files in its folder."""
        if self.returncode is None and ray.wait([self._result], timeout=0)[0]:
            try:
                self.returncode, output, files = ray.get(self._result)
            except ray.exceptions.RayError as error:
                self.returncode, output, files = 1, f"{error}\n", b""
            self._cell.log.write_text(output, encoding="utf-8")
            if files:
                with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                    archive.extractall(self._cell.path, filter="data")
        return self.returncode

    def terminate(self) -> None:
        """Cancel the cell."""
        ray.cancel(self._result)

    def wait(self) -> int:
        """Wait at most ``STOP_SECONDS`` for the run to end; return its exit status, or 0 if it is still in progress."""
        ray.wait([self._result], timeout=STOP_SECONDS)
        return self.poll() or 0
