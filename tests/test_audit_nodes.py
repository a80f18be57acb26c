"""The audit logs of two sites, a warm and a stock node, and other users of their machine, with real processes."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from benchmarks.local_federation import Deployment, child
from posy.client_app.audit import AuditLog, Checked
from posy.deploy.secret import new_secret

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("audit")]

NAMES = ("warm", "stock")
ROUNDS = 2
LOSS = """from torch.nn.functional import cross_entropy


def mine(logits, labels):
    return cross_entropy(logits, labels, reduction="none")
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a SuperLink and two sites with tables of patients."""
    folder = tmp_path_factory.mktemp("audit")
    rng = np.random.default_rng(3)
    for name in NAMES:
        rows = [f"{rng.normal(50, 9):.3f},{rng.normal(120, 9):.3f},{('sick', 'well')[i % 2]}" for i in range(80)]
        (folder / f"{name}-patients.csv").write_text("\n".join(["age,pressure,label", *rows]) + "\n")
    deployment = Deployment.__new__(Deployment)
    deployment.processes = {}
    try:
        deployment.__init__(folder, list(NAMES))  # type: ignore[misc]
        for name, option, code in (("warm", "--refuse-foreign-code", "installed"), ("stock", "--stock", "any")):
            (folder / f"{name}.yaml").write_text(f"code: {code}\nmax-local-epochs: 100000\n")
            paths = f"data={folder}/{name}-patients.csv", f"policy={folder}/{name}.yaml", "state-dir=state/{name}"
            deployment.node(name, option, *paths, "name={name}")
        deployment.until(lambda: deployment.ready("warm"), "warm")
        deployment.until(lambda: "SuperNode ID" in deployment.log("stock"), "stock")
        yield deployment
    finally:
        deployment.stop()


def words(**more: object) -> list[str]:
    settings = {"method": "fedavg", "num_server_rounds": ROUNDS, "local_epochs": 1, "device": "cpu"}
    settings |= {"join_timeout": 900, "round_timeout": 600, **more}
    settings |= {"dataset": "sites", "num_clients": 2}
    return [f"{key.replace('_', '-')}={value}" for key, value in settings.items()]


def log_at(sites: Deployment, name: str) -> AuditLog:
    return AuditLog(sites.folder / "state" / name / "audit.jsonl")


def count_events(sites: Deployment) -> int:
    """Return the number of events in the log of the warm node, which creates the log with its first message."""
    audit_log = log_at(sites, "warm")
    return audit_log.check().head.count if audit_log.path.exists() else 0


def runtime_api(deployment: Deployment, name: str) -> str:
    """Return the address of a node's Runtime API, which any process of the machine can connect to."""
    addresses = re.findall(r"Uvicorn running on http://(127\.0\.0\.1:[0-9]+)", deployment.log(name))
    return str(addresses[-1])


def acquire_task(
    address: str, secret: bytes = b"", kind: str = TaskType.CLIENT_APP, certificate: bytes | None = None
) -> str:
    """Acquire a task as ``flower-superexec`` does, and return its token."""
    method = "/flwr.proto.Runtime/AcquireTask"
    signing = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={method})] if secret else []
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperExec"), *signing]
    client = RuntimeHttpClient.from_server_address(address, certificate is None, certificate, interceptors)
    with contextlib.closing(client):
        return str(client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token)


def apps_of(sites: Deployment, run: "subprocess.Popen[bytes]") -> set[str]:
    """Wait for the end of a run, and return the names of its apps, which get their tokens through files."""
    apps: set[str] = set()
    while run.poll() is None:
        time.sleep(0.02)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes().decode().split("\0")
                name = next((Path(word).name for word in command if Path(word).name.startswith("flwr-")), "")
                environment = path.with_name("environ").read_bytes().decode(errors="replace")
                if name in ("flwr-serverapp", "flwr-clientapp") and str(sites.folder) in environment:
                    apps.add(name)
                    assert "--token" not in command
                    assert command[command.index("--token-file") + 1].startswith("/dev/fd/")
    assert run.returncode == 0, sites.log("run-first")[-3000:]
    return apps


def test_a_process_without_the_secret_cannot_take_a_task(sites: Deployment) -> None:
    address = runtime_api(sites, "stock")
    for secret in (b"", new_secret()):
        with pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
            acquire_task(address, secret)


def test_a_warm_node_listens_on_no_port(sites: Deployment) -> None:
    for process in (sites.forked("node")["warm"], sites.worker("warm"), sites.processes["warm"].pid):
        sockets = {str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()}
        numbers = {name[len("socket:[") : -1] for name in sockets if name.startswith("socket:[")}
        tables = [Path(f"/proc/{process}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table.splitlines()]
        listening = {columns[9] for columns in lines if columns[3] == "0A"}
        assert not numbers & listening


def test_logs_contain_every_reply_of_a_run(sites: Deployment) -> None:
    """Also check that no app has its token on its command line."""
    assert apps_of(sites, sites.submit("first", *words())) == {"flwr-serverapp", "flwr-clientapp"}
    summary = sites.summary("first")
    assert (summary["status"], summary["dropped"]) == ("completed", {})
    for name in NAMES:
        checked = log_at(sites, name).check()
        assert (checked.line, checked.problem, checked.unfinished) == (0, "", False)
        begin, *events = checked.events
        assert (begin["event"], begin["run"].isdecimal(), begin["node"]) == ("run-begin", True, name)
        assert {event["decision"] for event in events} == {"accepted"}
        kinds = Counter(event["type"] for event in events)
        assert kinds["train"] == ROUNDS
        assert kinds["query:join"] >= 1
        assert kinds["query:describe"] >= 1
        trained = [event for event in events if event["type"] == "train"]
        assert [event["round"] for event in trained] == list(range(1, ROUNDS + 1))
        [digest] = {event["settings"] for event in trained}
        assert len(digest) == 64
        assert all(event["sent"]["arrays"]["bytes"] > 100 for event in trained)
        assert all("train-loss" in event["sent"]["metrics"]["names"] for event in trained)
        text = log_at(sites, name).path.read_text()
        for secret in ("sick", "well", "patients", "pressure", str(sites.folder), ".csv"):
            assert secret not in text
        done = sites.posy("audit", f"state/{name}", "--run", begin["run"])
        assert f"the chain of {checked.head.count} events is unbroken; its anchor is {checked.head}" in done.stdout
    warm, stock = (log_at(sites, name).check().events[0] for name in NAMES)
    assert warm["code"] != ""
    assert (warm["run"], warm["settings"] != "") == (stock["run"], True)
    assert warm["submitter"] != ""
    assert stock["submitter"] == ""  # Flower does not pass it to the ClientApp


def test_refused_code_is_logged(sites: Deployment) -> None:
    before = count_events(sites)
    (sites.folder / "losses.py").write_text(LOSS)
    sites.submit("second", *words(loss="losses:mine", join_timeout=15))
    assert sites.ended("run-second") != 0
    checked = log_at(sites, "warm").check()
    begin, *events = checked.events[before:]
    assert begin["event"] == "run-begin"
    assert events
    for event in events:
        assert (event["event"], event["decision"]) == ("refusal", "code")
        assert (event["error"], "sent" in event) == ("ForeignCodeError", False)
    assert (checked.line, checked.problem) == (0, "")


def test_a_killed_worker_is_logged(sites: Deployment) -> None:
    """The worker is killed during a training of several minutes."""
    before, begun = count_events(sites), count_trainings(sites)
    sites.submit("third", *words(local_epochs=20_000))
    sites.until(lambda: count_trainings(sites) > begun, "run-third")
    os.kill(sites.worker("warm"), signal.SIGKILL)
    sites.until(
        lambda: any(event.get("error") == "WorkerLostError" for event in check_since(sites, before).events), "warm"
    )
    sites.processes["run-third"].send_signal(signal.SIGINT)
    sites.ended("run-third")
    [lost] = [event for event in check_since(sites, before).events if event.get("error") == "WorkerLostError"]
    assert (lost["event"], lost["type"], lost["decision"]) == ("error", "train", "failed")


def test_taking_a_pending_server_app_requires_the_secret(sites: Deployment) -> None:
    """The process that takes the SuperLink's tasks is suspended, so that a run waits for another process."""
    file = sites.folder / "superlink/flower/private/superexec-secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    certificate = sites.ca.read_bytes()
    executor = child(sites.processes["superlink"].pid, "posy.deploy.superexec")
    os.kill(executor, signal.SIGSTOP)
    try:
        process = sites.submit("waiting", "method=fedavg", "num-clients=2", "num-server-rounds=1")
        sites.until(lambda: " waiting " in sites.posy("status", *sites.where).stdout, "run-waiting")
        for wrong_secret in (b"", new_secret()):
            with pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
                acquire_task(sites.control, wrong_secret, TaskType.SERVER_APP, certificate)
        assert acquire_task(sites.control, file.read_bytes(), TaskType.SERVER_APP, certificate)
        # The task is already taken.
        assert not acquire_task(sites.control, file.read_bytes(), TaskType.SERVER_APP, certificate)
    finally:
        os.kill(executor, signal.SIGCONT)
        process.kill()
        process.wait()


def check_since(sites: Deployment, count: int) -> Checked:
    """Check the warm node's log, and return only the events after the first ``count``."""
    checked = log_at(sites, "warm").check()
    return Checked(checked.events[count:], checked.head, checked.line, checked.problem)


def count_trainings(sites: Deployment) -> int:
    """Return the number of train messages that the warm node has begun to work on."""
    return sites.log("warm").count("processing the train message")
