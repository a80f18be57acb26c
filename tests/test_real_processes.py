"""A federation of real processes over gRPC, with TLS and node authentication, for all tests here in this order.

Starting a node takes far longer than a run, so the tests share a SuperLink and its nodes. Many failures happen in one
long run. None of them may end the run or cause a wrong number.
"""

import contextlib
import csv
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import LENIENT, pfllib, table
from sklearn.datasets import load_digits

import posy
from benchmarks.local_federation import MOST_SECONDS, Deployment
from posy.commands import cli
from posy.commands.deploy.certificates import make_certificates
from posy.storage import load_arrays

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("processes")]

PUPPET = Path(__file__).resolve().parent / "puppet"
CLIENTS = 3
"""Clients of the runs without failures. Their nodes are connected from the beginning."""
NODES = 4
"""Clients of the long run with failures. The last node joins it later."""
METHODS = ("fedfew", "feddrm", "ppfe", "scaffold", "fedfomo")
"""Several models, routing, stages, control variates, and other clients' models."""

CUSTOM_METHOD = """
import torch
from rates import faster

from posy.client_app.base import PersonalClient
from posy.client_app.training.work import Train, cross_entropy
from posy.settings import setting
from posy.strategies.settings import MethodSettings


class FedMineSettings(MethodSettings):
    smoothing: float = setting(0.1, "part of a label that goes to all classes alike", minimum=0, maximum=1)


def smoothed(net, batch, context):
    logits = net(batch.x)
    uniform = -logits.log_softmax(-1).mean()
    return (1 - context["smoothing"]) * cross_entropy(logits, batch) + context["smoothing"] * uniform


class FedMineClient(PersonalClient):
    def work(self, start):
        return Train(start, smoothed, {"smoothing": torch.tensor(self.method.smoothing)}, lr=faster(self.lr))
"""
CUSTOM_FILES = {
    "mine.py": CUSTOM_METHOD,
    "rates.py": "def faster(rate):\n    return 2 * rate\n",
    "nets.py": "from torch import nn\n\n\ndef small(task):\n    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), "
    "nn.Linear(24, task.num_classes))\n",
    "losses.py": "import torch\nfrom torch.nn.functional import cross_entropy\n\n\ndef focal(logits, labels):\n"
    "    loss = cross_entropy(logits, labels, reduction='none')\n    return (1 - torch.exp(-loss)) ** 2 * loss\n",
    "samples.py": "from sklearn.datasets import load_digits\n\n\ndef some():\n    x, y = load_digits(return_X_y=True)\n"
    "    return x[:300], y[:300]\n",
}
"""A custom method, network, loss and data set, and a module that the method imports."""
CUSTOM = {
    "method": "mine:FedMine",
    "model": "nets:small",
    "loss": "losses:focal",
    "dataset": "samples:some",
    "fedmine_smoothing": 0.2,
}


class Federation(Deployment):
    """The SuperLink and its nodes. Files make a node misbehave."""

    def __init__(self, folder: Path) -> None:
        x, self.y = load_digits(return_X_y=True)
        self.x = x.astype(np.float32)
        np.savez(folder / "data.npz", x_train=self.x[:600], y_train=self.y[:600])
        self.common = {"dataset": folder / "data.npz", "model": "mlp", "device": "cpu", "stack": "loop"}
        super().__init__(folder, [*(f"node-{i}" for i in range(NODES)), *(f"site-{i}" for i in range(3)), "other"])

    def start_node(self, number: int, *config: str) -> None:
        """Start one of the nodes. Files can make the second and the last node misbehave."""
        words = [f"partition-id={number}", f"num-partitions={NODES}", f"state-dir=state-{number}", *config]
        self.node(f"node-{number}", *words, python_path=PUPPET if number in (1, 3) else None)

    def wait(self, condition: Callable[[], Any], name: str) -> None:
        """Wait until a condition holds. The process ``name``, which makes it true, may not end before."""

        def holds() -> bool:
            process = self.processes.get(name)
            ended = process is not None and process.poll() is not None
            is_true = bool(condition())
            assert is_true or not ended, self.log(name)[-5000:]
            return is_true

        self.until(holds, name, MOST_SECONDS)

    def wait_for_rounds(self, run: str, count: int) -> None:
        """Wait until a run has finished ``count`` rounds."""
        self.wait(lambda: len(self.rounds(run)) >= count, f"run-{run}")

    def wait_for_text(self, run: str, text: str, times: int = 1) -> None:
        """Wait until `posy run` has printed a text, which happens moments after a round is recorded."""
        self.wait(lambda: self.log(f"run-{run}").count(text) >= times, f"run-{run}")

    def server(self) -> int:
        """Return the process of the active run, once it has started and the processes of earlier runs have ended."""
        servers: list[int] = []

        def has_one_server() -> bool:
            with contextlib.suppress(LookupError):
                servers.append(super(Federation, self).server())
            return bool(servers)

        self.wait(has_one_server, "superlink")
        return servers[0]

    def dropped(self, run: str, client: int) -> list[tuple[int, str]]:
        """Return the rounds in which Posy dropped a client's replies, each with the reason."""
        drops = [(row["round"], drop) for row in self.rounds(run) for drop in row["dropped"]]
        return [(number, drop["reason"]) for number, drop in drops if drop["client"] == client]

    def complete_since(self, run: str, count: int) -> bool:
        """Return whether all clients took part in a round after the first ``count`` rounds."""
        return any(row["cohort"] == NODES and not row["dropped"] for row in self.rounds(run)[count:])

    def restart(self, name: str, start: Callable[[], None]) -> None:
        """Start a node until the SuperLink accepts its key, for which it must notice that the node had ended."""

        def is_ready() -> bool:
            if self.processes[name].poll() is not None:
                start()
            return self.ready(name)

        self.until(is_ready, name, MOST_SECONDS)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    deployment = Federation(tmp_path_factory.mktemp("processes"))
    folder, x, y = deployment.folder, deployment.x, deployment.y
    try:
        np.savez(folder / "b.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:200], y_test=y[150:200])
        pfllib(folder / "a", x[400:500], y[400:500], 20)
        broken = x[500:520].copy()
        broken[3, 5] = np.nan
        np.savez(folder / "c.npz", x_train=broken, y_train=y[500:520])
        for i in range(CLIENTS):
            deployment.start_node(i)
        deployment.node("stranger", "partition-id=0", f"num-partitions={NODES}")
        make_certificates(folder / "elsewhere", [], ["other"], 1)
        words = ["--superlink", deployment.fleet, "--root-certificates", str(folder / "elsewhere/ca.pem")]
        deployment.start("distrust", "supernode", *words, "--key", "certificates/node-0.key")
        for i in range(CLIENTS):
            deployment.wait(lambda name=f"node-{i}": deployment.ready(name), f"node-{i}")
        yield deployment
    finally:
        deployment.stop()


# -- runs without failures -------------------------------------------------------------------------------


def settings_of(federation: Federation, method: str, **more: Any) -> dict[str, Any]:
    base = {
        "method": method,
        "num-clients": CLIENTS,
        "num-server-rounds": 2,
        "lr": 0.05,
        "local-epochs": 1,
        "seed": 7,
    }
    if method == "ppfe":
        base |= {"ppfe-stages": 2, "ppfe-stage-rounds": "1,1"}
    return {**federation.common, **base, **{key.replace("_", "-"): value for key, value in more.items()}}


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def assert_same_models(federation: Federation, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Compare the results of a run with the same run inside this process, bit for bit."""
    keywords = {
        key.replace("-", "_"): str(value) if isinstance(value, Path) else value for key, value in settings.items()
    }
    reference = posy.run(**keywords, output_dir=str(tmp_path))
    summary = federation.summary(name)
    assert (summary["status"], summary["dropped"]) == ("completed", {})
    assert (summary["rounds"], summary["served"]) == (reference.summary["rounds"], reference.summary["served"])
    expected_files = {path.name: path for path in reference.models.iterdir()}
    files = {path.name: path for path in (federation.results(name) / "models").iterdir()}
    assert list(files) == ["server.safetensors"]  # personal models stay on their nodes
    node_files = {path.name: path for path in federation.folder.glob(f"state-*/{name}-*/models/*")}
    assert {f"client-{i}.safetensors" for i in range(CLIENTS)} <= node_files.keys()
    files |= node_files
    assert files.keys() == expected_files.keys()
    for file, path in files.items():
        actual, expected = load_arrays(path), load_arrays(expected_files[file])
        assert actual.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(actual[key], array, err_msg=f"{file}: {key}")


@pytest.fixture(scope="module")
def submitted(federation: Federation) -> Federation:
    """Submit a run of each method and a run that fails, all at once. The nodes serve them in turn."""
    for method in METHODS:
        federation.submit(method, *words(settings_of(federation, method)))
    for name, source in CUSTOM_FILES.items():
        (federation.folder / name).write_text(source, encoding="utf-8")
    federation.submit("own", *words(settings_of(federation, **CUSTOM)))
    wrong = settings_of(federation, "fedavg", partition="classes", classes_per_client=11)
    federation.submit("wrong", *words(wrong))
    return federation


@pytest.mark.parametrize("method", METHODS)
def test_grpc_runs_equal_in_process_runs(method: str, submitted: Federation, tmp_path: Path) -> None:
    assert submitted.ended(f"run-{method}") == 0, submitted.log(f"run-{method}")
    assert_same_models(submitted, method, settings_of(submitted, method), tmp_path)


def test_custom_code_is_sent_with_the_run(
    submitted: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submitted.ended("run-own") == 0, submitted.log("run-own")
    names, folder = sorted(CUSTOM_FILES), re.escape(str(submitted.folder))
    sent = re.findall(rf"posy: {folder}/(\S+) .* as own/(\S+) \(SHA", submitted.log("run-own"))
    assert sent == [(name, name) for name in names]
    foreign = ", ".join(f"own/{name}" for name in names)
    for number in range(CLIENTS):
        assert f"installed Posy: {foreign}" in submitted.log(f"node-{number}")
    monkeypatch.chdir(submitted.folder)
    assert_same_models(submitted, "own", settings_of(submitted, **CUSTOM), tmp_path)


def test_a_failed_run_reports_its_error(submitted: Federation) -> None:
    assert submitted.ended("run-wrong") == 1
    log = submitted.log("run-wrong")
    assert "ended with status failed" in log
    assert "classes-per-client = 11" in log


def test_nodes_keep_one_worker_for_all_runs(federation: Federation) -> None:
    for i in range(CLIENTS):
        assert federation.log(f"node-{i}").count("is ready") == 1


def test_unregistered_and_distrusting_nodes_cannot_join(federation: Federation) -> None:
    for name in ("stranger", "distrust"):  # an unregistered key, and another authority
        assert federation.ended(name) != 0
        assert "SuperNode ID" not in federation.log(name)


def test_keys_are_registered_once_and_names_are_unique(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [str(federation.folder / f"certificates/node-{i}.pub") for i in (0, 1)]
    make_certificates(tmp_path, [], ["node-0"], 1)
    (tmp_path / "copy.pub").write_bytes(Path(keys[0]).read_bytes())
    assert cli.main(["register", *keys, str(tmp_path / "copy.pub"), *federation.where]) == 0
    output, error = capsys.readouterr()
    assert output.splitlines() == [
        "node-0 is already registered",
        "node-1 is already registered",
        "copy is already registered as node-0",
    ]
    assert "$" not in error  # no command without a SuperLink is printed
    assert cli.main(["register", str(tmp_path / "node-0.pub"), *federation.where]) == 1
    assert "posy: node-0 is not registered" in capsys.readouterr().err


def test_a_site_with_invalid_data_is_excluded(federation: Federation) -> None:
    """Three nodes with data, one of them the unmodified node of Flower, and a node whose data contains a NaN."""
    y = federation.y
    few = np.flatnonzero(y[200:400] < 7) + 200
    table(federation.folder / "d.csv", federation.x[few], y[few])
    policy = f"policy={LENIENT}"
    nodes = [
        federation.node(f"site-{i}", f"data={federation.folder / data}", policy, f"state-dir=state-site-{i}")
        for i, data in enumerate(("a", "b.npz", "c.npz"))
    ]
    stock = federation.node("other", "--stock", f"data={federation.folder / 'd.csv'}", policy, "state-dir=state-other")
    federation.wait(lambda: "SuperNode ID" in federation.log("other"), "other")
    settings = settings_of(
        federation, "fedavg", dataset="sites", num_clients=4, min_clients=3, join_timeout=300,
        num_server_rounds=1, local_epochs=20,
    )  # fmt: skip
    summary = federation.run("sites", *words(settings))
    for node in (*nodes, stock):
        node.terminate()
    assert (summary["status"], summary["dropped"], summary["system-accuracy"]) == ("completed", {}, None)
    assert summary["sites"] == ["other", "site-0", "site-1", None]
    excluded = next(row for row in summary["left-out"] if row["site"] == "site-2")
    other_reasons = [row["reason"] for row in summary["left-out"] if row is not excluded]
    assert excluded["times"] == 1 and all("this node has no data" in reason for reason in other_reasons)
    assert "(not-a-number)" in excluded["reason"]
    assert federation.log("run-sites").count("site-2 is excluded") == 1
    file_c = federation.folder / "c.npz"
    assert str(file_c) not in federation.log("run-sites") and f"{file_c}: nan at index (3, 5)" in federation.log(
        "site-2"
    )
    assert summary["served"]["last"]["mean"] > 0.6
    with (federation.results("sites") / "clients.csv").open() as file:
        counts = {int(row["partition"]): (int(row["n_train"]), int(row["n_test"])) for row in csv.DictReader(file)}
    tested = round(len(few) / 4)
    assert {c: n for c, n in counts.items() if c != 3} == {0: (len(few) - tested, tested), 1: (80, 20), 2: (150, 50)}
    for node in (*nodes, stock):
        node.wait(MOST_SECONDS)


# -- one long run with many failures ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(federation: Federation) -> Iterator[Federation]:
    """Start a run without the last node. The second is slow, and sends malformed replies in seven rounds."""
    for word in ("slow", "lie"):
        (federation.folder / word).touch()
    settings = settings_of(
        federation, "fedrep", lr=0.1, local_epochs=3, num_clients=NODES, min_clients=NODES - 1, join_timeout=20,
        num_server_rounds=10_000, round_timeout=12,
    )  # fmt: skip
    federation.submit("long", *words(settings))
    yield federation
    (federation.folder / "slow").unlink(missing_ok=True)


def test_malformed_replies_are_dropped(long_run: Federation) -> None:
    long_run.wait_for_rounds("long", 8)
    reasons = ["NaN or Inf", "NaN or Inf", "model has the shape (", "malformed reply: KeyError('train-loss')"]
    reasons += ["num-examples = 0", "num-examples = -1", "num-examples = 1000000000000"]
    dropped = long_run.dropped("long", 1)
    (long_run.folder / "lie").unlink()  # later runs have rounds of these numbers too
    assert [number for number, _ in dropped] == [1, 2, 3, 4, 5, 6, 7]
    for (_, recorded), reason in zip(dropped, reasons, strict=True):
        assert reason in recorded
    long_run.wait_for_text("long", "node-1 (client 1) is dropped: ", len(reasons))
    assert long_run.log("run-long").count("node-1 (client 1) is dropped: ") == len(reasons)
    with (long_run.results("long") / "clients.csv").open() as file:
        assert all(np.isfinite(float(row["served_loss"])) for row in csv.DictReader(file) if row["served_loss"])


def test_a_run_starts_with_min_clients_and_admits_a_late_node(long_run: Federation) -> None:
    long_run.wait_for_rounds("long", 2)
    assert [row["cohort"] for row in long_run.rounds("long")[:2]] == [NODES - 1] * 2
    count = len(long_run.rounds("long"))
    long_run.start_node(NODES - 1)
    long_run.wait(lambda: long_run.complete_since("long", count), "run-long")
    long_run.wait_for_text("long", "node-3 (client 3) is new; 4 of 4 clients")


def test_a_worker_that_dies_loses_one_reply(long_run: Federation) -> None:
    before = len(long_run.dropped("long", 1))
    worker = long_run.worker("node-1")
    (long_run.folder / "die").touch()
    long_run.wait(lambda: len(long_run.dropped("long", 1)) > before, "run-long")
    number, reason = long_run.dropped("long", 1)[before]
    assert "worker process died" in reason and "(signal 9)" in reason
    long_run.wait(lambda: long_run.complete_since("long", number), "run-long")
    assert long_run.worker("node-1") != worker


def test_a_hanging_worker_times_out_and_is_replaced(long_run: Federation) -> None:
    before = len(long_run.dropped("long", 1))
    (long_run.folder / "hang").touch()
    long_run.wait(lambda: len(long_run.dropped("long", 1)) > before, "run-long")
    number, reason = long_run.dropped("long", 1)[before]
    # The node's answer may be just in time.
    assert reason == "no reply within round-timeout = 12 s" or "killed, because a reply after 12 s" in reason
    long_run.wait_for_text("long", f"node-1 (client 1) is dropped: {reason}")
    long_run.wait(lambda: long_run.complete_since("long", number), "run-long")
    assert "worker process was killed" in long_run.log("node-1")


def test_a_killed_node_returns_with_its_personal_state(long_run: Federation) -> None:
    before = len(long_run.rounds("long"))
    long_run.wait_for_rounds("long", before + 5)
    before = len(long_run.dropped("long", 3))
    long_run.kill("node-3")
    long_run.wait(lambda: len(long_run.dropped("long", 3)) > before, "run-long")
    long_run.wait_for_text("long", "node-3 (client 3) is dropped: ")
    count = len(long_run.rounds("long"))
    long_run.restart("node-3", lambda: long_run.start_node(3))
    long_run.wait(lambda: long_run.complete_since("long", count), "run-long")
    long_run.wait_for_text("long", "node-3 (client 3) is back; 4 of 4 clients")
    with (long_run.results("long") / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["partition"] == "3" and row["served_accuracy"]]
    first = next(row for row in rows if int(row["round"]) > count)
    # The shared body with a new head would have the accuracy of guessing among ten classes.
    assert float(first["served_accuracy"]) > 0.5


def test_a_run_survives_a_crash_of_its_superlink(long_run: Federation) -> None:
    count = len(long_run.rounds("long"))
    os.kill(long_run.superlink(), signal.SIGKILL)
    long_run.wait(lambda: long_run.complete_since("long", count + 1), "run-long")
    assert [row["round"] for row in long_run.rounds("long")] == list(range(1, len(long_run.rounds("long")) + 1))
    assert "flower-superlink died (exit status -9)" in long_run.log("superlink")


def test_status_log_and_stop(long_run: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    def posy(*words: str, status: int = 0) -> str:
        """Run a command. Return its output, or its error output for status 2."""
        assert cli.main([*words, *long_run.where]) == status
        output, error = capsys.readouterr()
        return error if status == 2 else output + error

    rows = [line.split() for line in posy("status").splitlines()]
    [(number, *columns)] = [words[:4] for words in rows if words[1:2] == ["long"]]
    assert columns == ["long", "fedrep", "running"]
    assert len([words for words in rows if words[1:2] == ["online"]]) == NODES
    output = posy("stop", "long")
    assert "is stopped" in output
    assert "resume=long output-dir=runs" in output
    assert long_run.ended("run-long") == 1
    assert "ended with status stopped" in long_run.log("run-long")
    assert [line.split()[3] for line in posy("status").splitlines() if line.split()[:1] == [number]] == ["stopped"]
    assert "has already ended" in posy("stop", number, status=2)
    assert "'nosuch': no run at 127.0.0.1" in posy("stop", "nosuch", status=2)
    output = posy("log", "long", status=1)
    assert "ended with status stopped" in output
    assert "Results of this run: " in output
    assert "round     1/10000" in output
    assert "INFO" not in output


# -- ended processes -------------------------------------------------------------------------------------


def test_a_run_resumes_after_its_server_process_is_killed(federation: Federation, tmp_path: Path) -> None:
    settings = settings_of(federation, "fedrep", num_server_rounds=8, checkpoint_every=2)
    (federation.folder / "slow").touch()
    process = federation.submit("cut", *words(settings))
    federation.wait_for_rounds("cut", 3)
    os.kill(federation.server(), signal.SIGKILL)
    (federation.folder / "slow").unlink()
    process.send_signal(signal.SIGINT)
    assert federation.ended("run-cut") == 130
    assert federation.summary("cut")["status"] == "running"
    assert len(federation.rounds("cut")) < 8
    # Unfinished work of the stopped run does not delay the next run.
    federation.submit("again", "resume=cut")
    assert federation.ended("run-again") == 0, federation.log("run-again")
    assert_same_models(federation, "cut", settings, tmp_path)


def test_a_killed_worker_is_replaced_and_ends_with_its_node(federation: Federation) -> None:
    process = federation.processes["node-0"]
    ready = federation.log("node-0").count("is ready")
    os.kill(federation.worker("node-0"), signal.SIGKILL)
    federation.wait(lambda: federation.log("node-0").count("is ready") == ready + 1, "node-0")
    assert "the node starts a new one" in federation.log("node-0")
    assert process.poll() is None
    worker = federation.worker("node-0")
    federation.kill("node-0")
    federation.wait(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")


def test_a_terminated_superlink_stops_its_run(federation: Federation) -> None:
    """After this test the SuperLink is gone. One node has a limit on how long it waits for the SuperLink."""
    federation.node("other", "--wait", "4", "partition-id=0", f"num-partitions={NODES}")
    federation.wait(lambda: federation.ready("other"), "other")
    settings = settings_of(federation, "fedavg", num_clients=1, num_server_rounds=3000)
    process = federation.submit("ended", *words(settings))
    federation.wait_for_rounds("ended", 2)
    server, superlink = federation.server(), federation.processes["superlink"]
    superlink.terminate()
    assert superlink.wait(MOST_SECONDS) == 130
    assert not Path(f"/proc/{server}").exists()
    assert federation.summary("ended")["status"] == "stopped"
    assert federation.summary("ended")["rounds"] == len(federation.rounds("ended"))
    process.kill()
    process.wait()


def test_a_node_exits_if_its_superlink_is_unreachable_for_too_long(federation: Federation) -> None:
    worker = federation.worker("other")
    assert federation.ended("other") == 1
    assert "unreachable for 4 s" in federation.log("other")
    federation.wait(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")
    assert federation.processes["node-1"].poll() is None  # it has no --wait


def test_printed_commands_work_in_a_shell(federation: Federation) -> None:
    """The SuperLink and a node have ended. The test starts them with the printed commands."""
    printed = [line[2:] for line in federation.log("superlink").splitlines() if line.startswith("$ ")]
    printed += [line[2:] for line in federation.log("other").splitlines() if line.startswith("$ ")][-1:]
    superlink, superexec, list_runs, node = printed

    def run_in_shell(name: str, line: str) -> "subprocess.Popen[bytes]":
        with (federation.folder / f"{name}.log").open("wb") as log:
            federation.processes[name] = subprocess.Popen(
                ["sh", "-c", f"exec env {line}"],
                cwd=federation.folder,
                env=federation.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return federation.processes[name]

    run_in_shell("typed-superlink", superlink)
    federation.wait(lambda: "Starting Fleet API" in federation.log("typed-superlink"), "typed-superlink")
    run_in_shell("typed-superexec", superexec)
    assert run_in_shell("typed-list", list_runs).wait(MOST_SECONDS) == 0
    assert "Listing all runs" in federation.log("typed-list")
    run_in_shell("typed-node", node)
    federation.restart("typed-node", lambda: run_in_shell("typed-node", node) and None)
