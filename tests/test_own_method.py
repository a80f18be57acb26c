"""Custom methods as users write them, with few lines and few imported names, run end to end."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from pandas import read_csv

from posy.commands.cli import main
from posy.strategies.arrays import ALLOWED, Refused, model, numbers, reply
from posy.strategies.methods import settings_class
from posy.strategies.server_state import state_of
from posy.strategies.settings import MethodSettings
from posy.yaml12 import dump, read_yaml

Config = dict[str, Any]

FEDPER = '''
    """FedPer (Arivazhagan et al., 2019): the base layers are shared, the last layers are personal."""

    from posy.method import MethodSettings, setting


    class MyFedPerSettings(MethodSettings):
        """Settings of FedPer."""

        layers: int = setting(1, "number of personal layers, counted from the output", minimum=1)

        def personal(self, network):
            """Keep the last layers."""
            return network.layer_names[-self.layers :]
'''

DITTO = '''
    """Ditto (Li et al., 2021): a global model, and a personal one pulled towards it."""

    from posy.method import MethodSettings, PersonalClient, Train, Update, model, setting


    class MyDittoSettings(MethodSettings):
        """Settings of Ditto."""

        returned = {"model": model(noise=True, sums=True)}
        strength: float = setting(0.1, "lambda: strength of the pull of the personal model", minimum=0)


    class MyDittoClient(PersonalClient):
        """Minimise F_i(v) + lambda/2 ||v - w||^2 over the personal v (Algorithm 1)."""

        def local_round(self, received, config):
            """Train the global model, then the personal one towards the received model."""
            shared = yield Train(received["model"])
            start = self.stored.get("model", self.initial())
            personal = yield Train(start, pull=(received["model"], self.method.strength), stream=1)
            self.stored["model"] = personal.parameters
            return Update({"model": shared.parameters}, personal.loss), personal.parameters
'''

IFCA = '''
    """IFCA (Ghosh et al., 2020): K cluster models; each client trains the one that fits it best."""

    import numpy as np

    from posy.method import BadReplyError, MethodSettings, PersonalClient, PersonalisedStrategy, Train
    from posy.method import Update, mean_of, model, numbers, setting

    SINGLE = "the server needs the cluster of each client"


    class MyIfcaSettings(MethodSettings):
        """Settings of IFCA."""

        returned = {
            "model": model(change_of="models", shape=("parameters",), noise=True, sums=SINGLE),
            "cluster": numbers(noise="the number of a cluster does not tolerate noise", sums=SINGLE),
        }
        clusters: int = setting(2, "number K of cluster models", minimum=1)

        def reference(self, network, sent, reply):
            """Return the model of the client's cluster."""
            return {**super().reference(network, sent, reply), "model": sent["models"][int(reply["cluster"])]}


    class MyIfca(PersonalisedStrategy):
        """Send K models; average each over the clients that chose it (Algorithm 1)."""

        state = ("models",)

        def initialise(self):
            """Start from K independent initialisations."""
            self.models = np.stack([self.initial(k) for k in range(self.method.clusters)])

        def check(self, client, arrays):
            """Refuse a cluster that does not exist."""
            if int(arrays["cluster"]) not in range(len(self.models)):
                raise BadReplyError(f"cluster {arrays['cluster']} of {len(self.models)}")

        def aggregate(self, server_round, updates):
            """Average every cluster's model over its clients."""
            self.models = self.models.copy()
            for k in {int(update.arrays["cluster"]) for update in updates}:
                self.models[k] = mean_of([update for update in updates if update.arrays["cluster"] == k])
            return {}


    class MyIfcaClient(PersonalClient):
        """Estimate the cluster, then train its model (Algorithm 1)."""

        def served_model(self, received, config):
            """Choose among the K models by training loss."""
            return self.best_of(received["models"])

        def local_round(self, received, config):
            """Train the chosen model and name its cluster."""
            best = yield from self.best_of(received["models"])
            trained = yield Train(best.members[0].parameters)
            return Update({"model": trained.parameters, "cluster": int(best.chosen)}, trained.loss), trained.parameters
'''

SOURCES = {"MyFedPer": (FEDPER, 15), "MyDitto": (DITTO, 25), "MyIfca": (IFCA, 45)}
"""The source of each method, and the maximum of its lines of code."""


def parsed(source: str) -> ast.Module:
    return ast.parse(dedent(source))


def lines_of_code(source: str) -> int:
    """Return the number of lines, without empty lines and docstrings but with imports."""
    lines = {number for number, line in enumerate(dedent(source).splitlines(), start=1) if line.strip()}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def imported(source: str) -> set[str]:
    """Return the names that a source imports from Posy."""
    imports = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if str(node.module).startswith("posy") for alias in node.names}


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write each method to a file. Return a function that gives the setting ``method`` for its name."""
    monkeypatch.chdir(tmp_path)
    for name, (source, _) in SOURCES.items():
        (tmp_path / f"{name.lower()}.py").write_text(dedent(source), encoding="utf-8")
    return lambda name: f"{name.lower()}:{name}"


@pytest.mark.parametrize("name", SOURCES)
def test_custom_methods_are_short(name: str) -> None:
    source, most = SOURCES[name]
    assert lines_of_code(source) <= most
    assert len(imported(source)) <= 10


QUIET = {"dp": "local", "dp_clip": 1.0, "dp_epsilon": 1e6, "dp_scores": "exact"}


def test_custom_fedper_keeps_its_last_layers_personal(
    custom: Callable[[str], str], make_config: Callable[..., Config], federate: Callable[..., Any]
) -> None:
    config = make_config(custom("MyFedPer"), model="mlp", myfedper_layers=2, **QUIET)
    finished = federate(config)
    layout = finished.strategy.architecture.layout
    assert finished.strategy.model.size == layout.without(layout.layers[-2:]).size < layout.size
    assert [record.dropped for record in finished.records] == [[]] * 3
    for client in range(4):
        assert {name: a.shape for name, a in finished.kept(client).items()} == {
            "personal": (layout.part(layout.layers[-2:]).size,)
        }
    served, local = finished.column("served_loss")[-1], finished.column("local_loss")[-1]
    assert served.keys() == local.keys() == {0, 1, 2} and served != local


@pytest.mark.parametrize(
    ("name", "built_in", "has_state"),
    [("MyFedPer", "fedper", True), ("MyDitto", "ditto", True), ("MyIfca", "ifca", False)],
    ids=["fedper", "ditto", "ifca"],
)
def test_custom_methods_equal_the_built_in_ones(
    name: str,
    built_in: str,
    has_state: bool,
    custom: Callable[[str], str],
    make_config: Callable[..., Config],
    federate: Callable[..., Any],
) -> None:
    settings = {"model": "mlp", "fraction_train": 0.6, "max_update_norm": 1e6}
    custom_run, built_in_run = (federate(make_config(method, **settings)) for method in (custom(name), built_in))
    states = [state_of(finished.strategy) for finished in (custom_run, built_in_run)]
    assert states[0].keys() == states[1].keys()
    for array, content in states[0].items():
        np.testing.assert_array_equal(content, states[1][array])
    for column in ("served_accuracy", "local_loss", "train_loss"):
        assert custom_run.column(column) == built_in_run.column(column)
    for client in range(4 if has_state else 0):
        np.testing.assert_equal(custom_run.kept(client), built_in_run.kept(client))


def test_custom_methods_support_resume_report_and_table(
    custom: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings are checked and stored like the settings of built-in methods, also if they come from a file."""
    small = ["max-samples=200", "num-clients=3", "local-epochs=1", "output-dir=runs"]
    words = ["my.yaml", "myditto-strength=0.3", "num-server-rounds=1", "run-name=a", *small]
    Path("my.yaml").write_text(f"method: {custom('MyDitto')}\nlr: 0.02\n", encoding="utf-8")
    assert main(["run", *words]) == 0
    assert "myditto on digits" in capsys.readouterr().out
    stored = read_yaml(Path("runs/a/config.yaml"))["settings"]
    assert stored["myditto-strength"] == 0.3 and stored["lr"] == 0.02
    assert stored["method"] == f"{tmp_path / 'myditto.py'}:MyDitto"
    assert main(["run", "resume=a", "num-server-rounds=2", "output-dir=runs"]) == 0
    summary = json.loads(Path("runs/a/summary.json").read_text())
    assert (summary["rounds"], summary["method"]) == (2, "myditto")
    assert main(["run", "runs/a/config.yaml", "method=ditto", "num-server-rounds=1", "run-name=b"]) == 0
    Path("myditto.py").rename("elsewhere.py")  # a report does not need the code of its runs
    assert main(["report", "runs/a", "runs/b", "-o", "page.html"]) == 0
    assert "myditto" in Path("page.html").read_text(encoding="utf-8")
    Path("elsewhere.py").rename("myditto.py")
    rows = [{"name": "custom", "settings": {"method": custom("MyDitto"), "myditto-strength": 0.2}}]
    rows += [{"name": "built-in", "settings": {"method": "ditto", "ditto-strength": 0.2}}]
    shared = {"max-samples": 200, "num-clients": 3, "local-epochs": 1, "num-server-rounds": 1}
    table = {"runs": rows, "seeds": [0], "settings": shared, "output": "table"}
    Path("table.yaml").write_text(dump(table), encoding="utf-8")
    assert main(["table", "table.yaml", "-j", "1"]) == 0
    custom_row, built_in_row = read_csv("table/table.csv").drop(columns=["method", "seconds"]).to_dict("records")
    np.testing.assert_equal(custom_row, built_in_row)


def test_the_settings_of_a_custom_method_are_listed(
    custom: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", custom("MyIfca")]) == 0
    assert "myifca-clusters" in capsys.readouterr().out


NOTHING = "from posy.method import MethodSettings, model\n"
WRONG = {
    "no file": (
        "",
        "nowhere:FedMine",
        "file nowhere.py",
    ),
    "no class": ("x = 1\n", "wrong:FedMine", "must declare FedMineSettings"),
    "no subclass": ("class FedMineSettings: ...\n", "wrong:FedMine", "FedMineSettings must be a subclass"),
    "no noise": (
        NOTHING + "class FedMineSettings(MethodSettings):\n    returned = {'model': model(sums=True)}\n",
        "wrong:FedMine",
        "'noise'",
    ),
    "an error": ("1 / 0\n", "wrong:FedMine", "ZeroDivisionError: division by zero (wrong.py, line 1)"),
    "a taken name": (
        NOTHING + "class FedPerSettings(MethodSettings): ...\n",
        "wrong:FedPer",
        "a method named fedper",
    ),
    "a taken key": (
        NOTHING + "from posy.settings import setting\n"
        "class DPSettings(MethodSettings):\n    clip: float = setting(0.0, 'nothing')\n",
        "wrong:DP",
        "setting dp-clip already exists",
    ),
    "no strategy": (
        NOTHING + "class FedMineSettings(MethodSettings): ...\nclass FedMine: ...\n",
        "wrong:FedMine",
        "FedMine must be a subclass of PersonalisedStrategy",
    ),
    "no client": (
        NOTHING + "class FedMineSettings(MethodSettings): ...\nclass FedMineClient: ...\n",
        "wrong:FedMine",
        "FedMineClient must be a subclass of PersonalClient",
    ),
}


@pytest.mark.parametrize(("source", "method", "message"), WRONG.values(), ids=WRONG)
def test_invalid_methods_are_refused_before_the_run(
    source: str,
    method: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text(source, encoding="utf-8")
    assert main(["run", f"method={method}", "max-samples=200", "num-server-rounds=1"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("runs").exists()


def test_an_array_must_declare_whether_it_supports_noise() -> None:
    with pytest.raises(TypeError, match="'noise'"):

        class Undecided(MethodSettings):
            returned = reply(model=model(sums=True))

    class Decided(MethodSettings):
        returned = reply(model=model(noise=True, sums=True), count=numbers(noise="it counts", sums=True))

    assert Decided.noise == Refused("it counts") and Decided.sums is ALLOWED
    assert settings_class("fedavg").noise is ALLOWED


def test_a_hook_may_be_a_plain_function_or_a_generator(make_client: Callable[..., Any]) -> None:
    client = make_client("fedavg")
    flat = client.initial().numpy()
    _, _, plain = client.evaluate([flat], {"server-round": 1})

    def asking(received: list[torch.Tensor], config: Any) -> Any:
        yield from client.losses(received["model"][None])
        return client.plain(received["model"])

    client.served_model = asking
    assert client.evaluate([flat], {"server-round": 1})[2] == plain
