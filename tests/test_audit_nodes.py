"""The audit logs of two sites, a warm and a stock node, with real processes."""

import os
import signal
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.local_federation import Deployment
from posy.client_app.audit import AuditLog, Checked

pytestmark = [pytest.mark.federation, pytest.mark.core, pytest.mark.xdist_group("audit")]

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
            places = f"data={folder}/{name}-patients.csv", f"policy={folder}/{name}.yaml", "state-dir=state/{name}"
            deployment.node(name, option, *places, "name={name}")
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


def test_each_answer_of_a_run_is_in_the_logs(sites: Deployment) -> None:
    summary = sites.run("first", *words())
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
        assert f"{checked.head.count} events, unbroken; anchor {checked.head}" in done.stdout
    warm, stock = (log_at(sites, name).check().events[0] for name in NAMES)
    assert warm["code"] != ""
    assert (warm["run"], warm["settings"] != "") == (stock["run"], True)
    assert warm["submitter"] != ""
    assert stock["submitter"] == ""  # Flower does not hand it to the ClientApp


def test_refused_code_is_in_the_log_of_the_node_that_refuses_it(sites: Deployment) -> None:
    before = log_at(sites, "warm").check().head.count
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


def test_the_death_of_a_worker_is_in_the_log(sites: Deployment) -> None:
    """The worker dies while it trains, for which it needs minutes."""
    audit_log = log_at(sites, "warm")
    before, begun = audit_log.check().head.count if audit_log.path.exists() else 0, trained(sites)
    sites.submit("third", *words(local_epochs=20_000))
    sites.until(lambda: trained(sites) > begun, "run-third")
    os.kill(sites.worker("warm"), signal.SIGKILL)
    sites.until(lambda: any(event.get("error") == "WorkerLostError" for event in since(sites, before).events), "warm")
    sites.processes["run-third"].send_signal(signal.SIGINT)
    sites.ended("run-third")
    [lost] = [event for event in since(sites, before).events if event.get("error") == "WorkerLostError"]
    assert (lost["event"], lost["type"], lost["decision"]) == ("error", "train", "failed")


def since(sites: Deployment, count: int) -> Checked:
    """Return the events after the first ``count``."""
    checked = log_at(sites, "warm").check()
    return Checked(checked.events[count:], checked.head, checked.line, checked.problem)


def trained(sites: Deployment) -> int:
    """Return the number of train messages that the warm node has begun to work on."""
    return sites.log("warm").count("working on a train message")
