"""Other users of the machine take no tasks of a SuperLink or a node, with real processes on loopback."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment, child
from posy.deploy.secret import new_secret, pipe_of, write_secret
from posy.deploy.superexec import MOST_REFUSALS, HidingPopen, signed_again

NAMES = ("warm", "stock")


# -- the secret and the tokens ----------------------------------------------------------------------------


def test_a_secret_file_is_for_its_owner_alone_and_new_at_every_start(tmp_path: Path) -> None:
    path = tmp_path / "private" / "secret"
    first = write_secret(path).read_bytes()
    assert len(first) == 32
    path.chmod(0o644)  # whatever was there before
    assert write_secret(path).read_bytes() != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_secret_in_a_pipe_is_read_once_as_flower_reads_it() -> None:
    from flwr.supercore.auth import load_superexec_auth_secret

    secret = new_secret()
    path, descriptor = pipe_of(secret)
    try:
        assert load_superexec_auth_secret(path) == secret
        with pytest.raises(ValueError, match="must not be empty"):
            load_superexec_auth_secret(path)
    finally:
        os.close(descriptor)


def test_a_token_is_on_no_command_line() -> None:
    program = "import sys; print(open(sys.argv[sys.argv.index('--token-file') + 1]).read(), *sys.argv[1:])"
    command = [sys.executable, "-c", program, "--first", "1", "--token", "s3cret", "--insecure"]
    with HidingPopen(command, stdout=subprocess.PIPE, text=True) as process:
        output = process.communicate()[0].split()
    assert output[0] == "s3cret"
    assert output[1:4] == ["--first", "1", "--token-file"]
    assert output[5:] == ["--insecure"]
    assert "s3cret" not in process.args
    with HidingPopen([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "7\n"


def test_a_refused_signature_is_made_again_a_few_times() -> None:
    statuses = [401] * (MOST_REFUSALS + 1) + [200, 401]

    def send(client: httpx.Client, request: httpx.Request, **options: object) -> httpx.Response:
        return httpx.Response(statuses.pop(0), request=request)

    checked, request = signed_again(send), httpx.Request("POST", "http://here")
    with httpx.Client() as client:
        for _ in range(MOST_REFUSALS):
            with pytest.raises(httpx.ReadError, match="the signature of the request is refused"):
                checked(client, request)
        assert [checked(client, request).status_code for _ in range(2)] == [401, 200]
        with pytest.raises(httpx.ReadError):
            checked(client, request)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_no_secret() -> None:
    def readable(path: Path) -> bool:
        """Return whether the user `nobody` can read a file."""
        process = os.fork()
        if not process:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os._exit(0 if os.access(path, os.R_OK) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secret = write_secret(Path(folder, "private", "secret"))
        public = Path(folder, "public")
        public.write_text("for all")
        public.chmod(0o644)
        secret.parent.chmod(0o755)  # the mode of the file is enough
        assert readable(public)
        assert not readable(secret)


# -- real processes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a SuperLink, a warm node and a node of unmodified Flower."""
    folder = tmp_path_factory.mktemp("local-users")
    x, y = load_digits(return_X_y=True)
    np.savez(folder / "data.npz", x_train=x[:200].astype(np.float32), y_train=y[:200])
    deployment = Deployment.__new__(Deployment)
    deployment.processes = {}
    try:
        deployment.__init__(folder, list(NAMES))  # type: ignore[misc]
        deployment.node("warm", "partition-id=0", "num-partitions=2")
        deployment.node("stock", "--stock", "partition-id=1", "num-partitions=2")
        deployment.until(lambda: deployment.ready("warm"), "warm")
        deployment.until(lambda: "SuperNode ID" in deployment.log("stock"), "stock")
        yield deployment
    finally:
        deployment.stop()


def runtime_api(deployment: Deployment, name: str) -> str:
    """Return the address of a node's Runtime API, which any process of the machine can connect to."""
    addresses = re.findall(r"Uvicorn running on http://(127\.0\.0\.1:[0-9]+)", deployment.log(name))
    return str(addresses[-1])


def take(address: str, secret: bytes = b"", kind: str = TaskType.CLIENT_APP, certificate: bytes | None = None) -> str:
    """Ask for a task as ``flower-superexec`` does, and return the token of the task."""
    method = "/flwr.proto.Runtime/AcquireTask"
    signing = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={method})] if secret else []
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperExec"), *signing]
    client = RuntimeHttpClient.from_server_address(address, certificate is None, certificate, interceptors)
    with contextlib.closing(client):
        return str(client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token)


@pytest.mark.federation
@pytest.mark.core
@pytest.mark.xdist_group("local-users")
def test_without_the_secret_no_process_takes_a_task(federation: Deployment) -> None:
    address = runtime_api(federation, "stock")
    for secret in (b"", new_secret()):
        with pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
            take(address, secret)


@pytest.mark.federation
@pytest.mark.xdist_group("local-users")
def test_a_warm_node_listens_on_no_port(federation: Deployment) -> None:
    for process in (federation.forked("node")["warm"], federation.worker("warm"), federation.processes["warm"].pid):
        sockets = {str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()}
        numbers = {name[len("socket:[") : -1] for name in sockets if name.startswith("socket:[")}
        tables = [Path(f"/proc/{process}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table.splitlines()]
        listening = {words[9] for words in lines if words[3] == "0A"}
        assert not numbers & listening


@pytest.mark.federation
@pytest.mark.core
@pytest.mark.xdist_group("local-users")
def test_both_nodes_serve_a_run_and_no_token_is_on_a_command_line(federation: Deployment) -> None:
    settings = {
        "dataset": federation.folder / "data.npz", "model": "mlp", "device": "cpu", "num-clients": 2,
        "method": "fedavg", "num-server-rounds": 2, "local-epochs": 1,
    }  # fmt: skip
    run = federation.submit("both", *(f"{key}={value}" for key, value in settings.items()))
    apps: set[str] = set()
    while run.poll() is None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode().split("\0")
                name = next((Path(word).name for word in words if Path(word).name.startswith("flwr-")), "")
                if name in ("flwr-serverapp", "flwr-clientapp") and str(federation.folder) in "".join(
                    environment(path)
                ):
                    apps.add(name)
                    assert "--token" not in words
                    assert words[words.index("--token-file") + 1].startswith("/dev/fd/")
    assert run.returncode == 0, federation.log("run-both")[-3000:]
    assert apps == {"flwr-serverapp", "flwr-clientapp"}
    summary = federation.summary("both")
    assert (summary["status"], summary["rounds"], summary["dropped"]) == ("completed", 2, {})


def environment(cmdline: Path) -> list[str]:
    """Return the environment of the process that a file of /proc belongs to."""
    return cmdline.with_name("environ").read_bytes().decode(errors="replace").split("\0")


@pytest.mark.federation
@pytest.mark.core
@pytest.mark.xdist_group("local-users")
def test_a_waiting_app_is_for_the_holder_of_the_secret(federation: Deployment) -> None:
    """The process that takes the SuperLink's tasks is suspended, so that a run waits for another process."""
    file = federation.folder / "superlink/flower/private/superexec-secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    certificate = federation.ca.read_bytes()
    executor = child(federation.processes["superlink"].pid, "posy.deploy.superexec")
    os.kill(executor, signal.SIGSTOP)
    try:
        process = federation.submit("waiting", "method=fedavg", "num-clients=2", "num-server-rounds=1")
        federation.until(lambda: " waiting " in federation.posy("status", *federation.where).stdout, "run-waiting")
        for wrong in (b"", new_secret()):
            with pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
                take(federation.control, wrong, TaskType.SERVER_APP, certificate)
        assert take(federation.control, file.read_bytes(), TaskType.SERVER_APP, certificate)
        assert not take(federation.control, file.read_bytes(), TaskType.SERVER_APP, certificate)  # it was taken
    finally:
        os.kill(executor, signal.SIGCONT)
        process.kill()
        process.wait()
