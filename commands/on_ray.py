"""The cells of a table on a Ray cluster that is there already."""

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
"""Times that a cell is done again whose worker was lost."""
CONNECT_SECONDS = 10.0
"""Seconds in which the head of a cluster answers."""
STOP_SECONDS = 10.0
"""Seconds that a run has to end by itself."""
RUN = "run"


@contextmanager
def cluster(address: str, gpus: float) -> Iterator[Start]:
    """Connect to a cluster; what this returns starts a cell on it, with one core and so many GPUs.

    The workers need this very version of Posy in their Python environment, and the data in the same place as here.
    Raises :class:`LaunchError` if there is no cluster at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(f"--ray {address}: there is no Ray cluster ({str(error).splitlines()[0]})") from error
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(carried_out)
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
    """Return what tells this version of Posy from all others."""
    digest = hashlib.blake2b(digest_size=16)
    folders = os.walk(APP / "posy", followlinks=True)
    for file in sorted(Path(folder) / name for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def carried_out(config: Mapping[str, Scalar], digest: str) -> tuple[int, str, bytes]:
    """Carry out a run on a worker; return its exit status, what it has printed, and its files."""
    if digest != digest_of_code():
        raise RuntimeError("another version of Posy is installed on the Ray worker")
    with TemporaryDirectory(prefix="posy-") as folder:
        # Without checkpoints: the folder is gone with the process.
        own: dict[str, Scalar] = {"output-dir": folder, "run-name": RUN, "checkpoint-every": 0}
        cell = Cell("", "", 0, {**config, **own})
        process = started(cell)
        try:
            status = process.wait()
        finally:  # as where the table is interrupted
            stop([process])
        return status, cell.log.read_text(encoding="utf-8", errors="replace"), packed(cell.path)


def started(cell: Cell) -> "subprocess.Popen[bytes]":
    """Start the run of a cell on the one core that Ray gives it, in a process that shares nothing with Ray's."""
    file = prepared(cell)
    places = filter(None, (str(APP), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", CORES: "1", "PYTHONPATH": os.pathsep.join(places)}
    with cell.log.open("w", encoding="utf-8") as log:
        # -P: what lies in the working directory must not stand in for Posy's packages.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "posy", "run", str(file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def packed(folder: Path) -> bytes:
    """Return the files of a run, but for its models, as one archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for item in sorted(folder.iterdir()) if folder.is_dir() else ():
            if item.name != "models":
                archive.add(item, item.name)
    return content.getvalue()


class RemoteRun:
    """A cell that is carried out on the cluster, to be looked after like a process."""

    returncode: int | None = None

    def __init__(self, cell: Cell, result: Any) -> None:
        self._cell, self._result = cell, result

    def poll(self) -> int | None:
        """Return the exit status, after the files have been put where the cell's are; None if it goes on."""
        if self.returncode is None and ray.wait([self._result], timeout=0)[0]:
            try:
                self.returncode, printed, files = ray.get(self._result)
            except ray.exceptions.RayError as error:
                self.returncode, printed, files = 1, f"{error}\n", b""
            self._cell.log.write_text(printed, encoding="utf-8")
            if files:
                with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                    archive.extractall(self._cell.path, filter="data")
        return self.returncode

    def terminate(self) -> None:
        """Give the cell up."""
        ray.cancel(self._result)

    def wait(self) -> int:
        """Wait until it is over."""
        ray.wait([self._result], timeout=STOP_SECONDS)
        return self.returncode or 0
