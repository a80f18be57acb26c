"""The `posy` command: settings from the command line, exit statuses, and real runs."""

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest

import posy
from posy.commands import cli, launch
from posy.commands.deploy.certificates import make_certificates
from posy.commands.launch import APP, Flower, LaunchError, mark_stopped, resources, toml
from posy.settings import SettingsError
from posy.strategies.registry import defaults


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1e-3", float, 0.001),
        ("2", float, 2.0),
        ("3", int, 3),
        ("3.5", int, "3.5"),
        ("true", bool, True),
        ("off", bool, "off"),
        ("010", int, 10),
        ("1_000", int, "1_000"),
        ("1_0.5", float, "1_0.5"),
        ("on", str, "on"),
        ("2024", str, "2024"),
        ("/data/a #1", str, "/data/a #1"),
        ('"in-process"', str, "in-process"),
        ("30,50,40,40", str, "30,50,40,40"),
        ("", str, ""),
        ("yes!", bool, "yes!"),
        ("[1]", bool, "[1]"),
    ],
)
def test_values_take_the_type_of_their_setting(text: str, kind: type, value: object) -> None:
    result = cli.typed(text, kind)
    assert result == value
    assert type(result) is type(value)


def test_a_value_may_hold_an_equals_sign() -> None:
    assert cli.assignments(["run-name=a=b", "lr=1e-2"]) == {"run-name": "a=b", "lr": 0.01}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "lr=-1"], ["lr", "> 0", "the command line"]),
        (["run", "lr=fast"], ["lr", "'fast'", "a number"]),
        (["run", "num-clients=2.5"], ["num-clients", "a whole number"]),
        (["run", "method=fedfu"], ["fedfu", "fedfew"]),
        (["run", "nm-clients=3"], ["nm-clients", "num-clients"]),
        (["run", "fedfew-mu=0"], ["fedfew-mu", "> 0"]),
        (["run", "lr=1", "lr=2"], ["lr", "twice"]),
        (["run", "method=fedavg", "fedfew-models=5"], ["fedfew-models", "setting of fedfew", "method is fedavg"]),
        (["run", "method=fedavg", "fedfew-models=3"], ["fedfew-models", "setting of fedfew", "method is fedavg"]),
        (["run", "fedavg-ft-lr=0.1"], ["fedavg-ft-lr", "setting of fedavg-ft", "method is fedfew"]),
        (["run", "ppfe-cifar10-s2", "fedfew-mu=1"], ["fedfew-mu", "setting of fedfew", "method is ppfe"]),
        (["run", "ppfe-cifar10-s2", "experiment=x"], ["experiment", "twice"]),
        (["run", "lr=1", "fedavg"], ["fedavg", "key=value", "did you mean method=fedavg?"]),
        (["run", "fedavg"], ["'fedavg'", "did you mean method=fedavg?"]),
        (["run", "fedavgg"], ["'fedavgg'", "did you mean method=fedavg?"]),
        (["run", "digits"], ["'digits'", "did you mean dataset=digits?"]),
        (["run", "no-such-experiment"], ["no-such-experiment", "ppfe-cifar10-s2"]),
        (["run", "--method", "fedavg"], ["--method", "settings are given as key=value: method=fedavg"]),
        (["run", "--method=fedavg"], ["--method=fedavg", "settings are given as key=value: method=fedavg"]),
        (["run", "lr=1", "--rounds", "3", "-v"], ["--rounds", "key=value: num-server-rounds=3"]),
        (["run", "--superlnk", "x"], ["--superlnk", "no option of `posy run`; did you mean --superlink?"]),
        (["run", "--nonsense", "3"], ["--nonsense", "--help"]),
        (["run", "--superlink"], ["--superlink", "expected one argument", "`posy run --help`"]),
        (["rnu", "lr=1"], ["'rnu'", "did you mean `posy run`?"]),
        (["fedavg"], ["did you mean `posy run method=fedavg`?"]),
        (["method=fedavg"], ["did you mean `posy run method=fedavg`?"]),
        (["xyzzy"], ["'xyzzy'", "run, table, settings"]),
        (["table"], ["required", "file", "`posy table --help`"]),
        (["table", "x.yaml", "-j", "0"], ["--jobs", "'0'", ">= 1"]),
        (["run", "engine=in-process", "dataset=no-such-data"], ["no-such-data", "digits"]),
        (["run", "dataset=sites"], ["dataset = 'sites'", "SuperNode at each site"]),
        (["run", "resume=gone"], ["resume = 'gone'", "there is no run in", "runs/gone"]),
        (["run", "resume=../gone"], ["resume = '../gone'", "the name of a folder"]),
        (["settings", "fedavgg"], ["fedavgg", "fedavg"]),
        (["table", "no-such-table.yaml"], ["no-such-table.yaml"]),
    ],
)
def test_wrong_use_is_one_clear_line(
    words: list[str],
    named: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("posy: ")
    assert error.count("\n") == 1
    for name in named:
        assert name in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["table", "t.yaml", "lr=1", "-j", "3", "seed=2"],
        ["table", "-j", "3", "t.yaml", "lr=1", "seed=2"],
        ["table", "t.yaml", "-j", "3", "lr=1", "seed=2"],
    ],
)
def test_settings_stand_before_and_after_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, list[str]]] = []
    monkeypatch.setattr(cli, "table", lambda options: seen.append((options.file, options.jobs, options.settings)) or 0)
    assert cli.main(words) == 0
    assert seen == [("t.yaml", 3, ["lr=1", "seed=2"])]


CONNECTION = ["--superlink", "127.0.0.1:1", "--root-certificates", "ca.pem"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["status", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1", "refused", "`posy superlink`"]),
        (["log", "one", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["stop", "one", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["run", "lr=1", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["register", "a.pub", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["register", "a.key", *CONNECTION], ["a.key is a private key", "public half"]),
        (["register", "ca.pem", *CONNECTION], ["ca.pem is not a public key"]),
        (["status", "--superlink", "127.0.0.1:1", "--root-certificates", "ca.key"], ["ca.key", "as a certificate"]),
        (["status", "--superlink", "127.0.0.1", "--insecure"], ["--superlink 127.0.0.1", "HOST:PORT"]),
        (["status", "--superlink", "a:99999", "--insecure"], ["--superlink a:99999", "HOST:PORT"]),
        (["status", "--superlink", "127.0.0.1:1", "--insecure"], ["no SuperLink answers", "without --insecure"]),
        (["status", "--superlink", "10.0.0.1:1", "--insecure"], ["without TLS it must be 127.0.0.1"]),
        (["supernode", "--superlink", "site", "--insecure"], ["--superlink site", "HOST:PORT"]),
        (["supernode", "--root-certificates", "ca.pem", "--key", "a.pub"], ["--key", "a.pub", "not a private key"]),
        (["supernode", "--root-certificates", "ca.key", "--key", "a.key"], ["ca.key", "as a certificate"]),
        (["superlink", "--certificates", "mixed"], ["server.pem", "server.key", "cannot be used", "mismatch"]),
        (["superlink", "--certificates", "."], ["--control 127.0.0.1:", "cannot listen there", "in use"]),
        (["supernode", "--insecure", "--wait", "0"], ["--wait 0", "more than 0"]),
        (["superlink", "--insecure", "--state", "ca.pem"], ["--state ca.pem", "directory"]),
        (["certificates", ".", "--days", "99999999"], ["--days 99999999", "36500"]),
        (["run", ""], ["''", "key=value"]),
        (["run", "=3"], ["'=3'", "key=value"]),
        (["run", "x" * 300], ["xxx", "there is no such file"]),
        (["run", "folder"], ["'folder'", "it is a directory", "did you mean dataset=folder?"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_is_wrong_about_a_federation_is_one_line(
    words: list[str],
    named: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_certificates(tmp_path, [], ["a"], 1)
    make_certificates(tmp_path / "mixed", [], [], 1)
    (tmp_path / "mixed/server.pem").write_bytes((tmp_path / "server.pem").read_bytes())
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if words[0] == "superlink" and "--insecure" not in words:
            words = [*words, "--control", f"127.0.0.1:{taken.getsockname()[1]}", "--fleet", "127.0.0.1:9"]
        assert cli.main(words) == 2
    output, error = capsys.readouterr()
    assert output == ""
    [line] = error.splitlines()
    assert line.startswith("posy: ")
    for name in named:
        assert name in line


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "server.example.org"])
def test_orders_are_taken_from_the_network_only_on_demand(
    host: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["superlink", "--control", f"{host}:8000"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    danger = "which is no secret, can run code on every node"
    for part in (f"--control {host}:8000", danger, "ssh -L 8000:127.0.0.1:8000 SERVER", "--control-open-to-network"):
        assert part in line
    assert cli.main(["superlink", "--control", f"{host}:8000", "--control-open-to-network"]) == 2
    warning, missing = capsys.readouterr().err.splitlines()  # the certificates are not there: nothing is started
    assert warning.startswith(f"posy: WARNING: --control {host}:8000: ")
    assert danger in warning
    assert "ca.pem" in missing
    for local in ("127.0.0.1", "localhost", "[::1]", "127.0.0.2"):
        assert cli.main(["superlink", "--control", f"{local}:8000"]) == 2
        assert danger not in capsys.readouterr().err


def test_version_and_examples_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        (
            ["--version"],
            [f"posy {tomllib.loads((APP / 'pyproject.toml').read_text())['project']['version']} (flwr 1.39"],
        ),
        (["--help"], ["\nexamples:\n  posy run engine=in-process   "]),
        (["run", "--help"], ["\nexamples:\n  posy run engine=in-process num-server-rounds=5\n"]),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 0
        output = capsys.readouterr().out
        for name in named:
            assert name in output
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2
    assert "examples:" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-P", "-m", "posy", "--version"], env=_environment(), check=True)
    assert done.returncode == 0


def test_examples_of_the_help_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text("lr: 0.1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    parser = cli._parser()
    lines = parser.epilog.splitlines() + parser._subparsers._group_actions[0].choices["run"].epilog.splitlines()  # type: ignore
    examples = [line.split("  ")[1].split() for line in lines if line.startswith("  posy run ")]
    assert len(examples) >= 8
    for example in examples:
        words = parser.parse_args(example[1:]).settings
        if words and "=" not in words[0]:
            words[0] = f"experiment={words[0]}"
        given = cli.merged(cli.assignments(words))
        cli.check(given, "the help")
        cli.check_own(given, "the help")


def test_help_and_wrong_values_come_without_pytorch() -> None:
    code = (
        "import sys; from posy import cli\n"
        "assert cli.main(['run', 'lr=-1']) == 2\n"
        "assert cli.main(['methods']) == 0\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'flwr' not in sys.modules, 'slow to import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "key=value" in done.stdout


def test_users_keys_stand_over_the_experiment_even_at_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 0.5\nnum-clients: 7\n", encoding="utf-8")
    at_default = defaults()["lr"]
    assert cli.merged({"experiment": str(file), "lr": at_default}) == {"lr": at_default, "num-clients": 7}


def test_an_experiment_is_run_with_another_method_and_without_the_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("method: fedfew\nfedfew-models: 5\nlr: 0.5\n", encoding="utf-8")
    assert cli.merged({"experiment": str(file)}) == {"method": "fedfew", "fedfew-models": 5, "lr": 0.5}
    assert cli.merged({"experiment": str(file), "method": "fedavg"}) == {"method": "fedavg", "lr": 0.5}


def test_experiment_files_hold_what_the_command_line_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1e-3\nweight-decay: 5E-4\nsystem-accuracy: on\nsave-models: True\n", encoding="utf-8")
    assert cli.merged({"experiment": str(file)}) == {
        "lr": 0.001, "weight-decay": 0.0005, "system-accuracy": "on", "save-models": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("lr: -1", "lr"),
        ("lrr: 1", "did you mean lr"),
        ("experiment: other", "cannot name another"),
        ("system-accuracy: maybe", "system-accuracy = 'maybe'"),
        ("lr: 0.1\nlr: 0.2", "lr given twice"),
        ("- lr", "key: value"),
    ],
)
def test_experiment_files_are_checked(content: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=named) as error:
        cli.merged({"experiment": str(file)})
    assert str(file) in str(error.value)


def test_paths_are_made_absolute_where_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.npz").touch()
    Path("store").mkdir()
    Path("store/there.csv").touch()
    result = cli.with_absolute_paths({"dataset": "here.npz", "data-dir": "store", "partition-file": "p.json"})
    assert result == {
        "dataset": str(tmp_path / "here.npz"),
        "data-dir": str(tmp_path / "store"),
        "partition-file": str(tmp_path / "p.json"),
        "output-dir": str(tmp_path / "runs"),
    }
    assert cli.with_absolute_paths({"dataset": "there.csv", "data-dir": "store"})["dataset"].endswith("store/there.csv")
    assert cli.with_absolute_paths({"dataset": "mnist"})["dataset"] == "mnist"


def test_toml_block_is_that_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings", "--toml"]) == 0
    printed = capsys.readouterr().out
    assert printed in (APP / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(printed)["tool"]["flwr"]["app"]["config"] == defaults()
    assert cli.main(["settings", "--check"]) == 0


def test_check_names_each_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = cli.toml_block({**defaults(), "lr": 1, "bogus": 0})
    (tmp_path / "pyproject.toml").write_text(block.replace("seed = 42\n", ""), encoding="utf-8")
    monkeypatch.setattr(cli, "APP", tmp_path)
    assert cli.main(["settings", "--check"]) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["seed", "lr", "bogus"]


@pytest.mark.parametrize("value", ["plain", 'a "quoted" \\ ä\n\x7f', "", True, 3, 0.1, 1e-7, 1000.0])
def test_toml_values_come_back(value: object) -> None:
    back = tomllib.loads(f"key = {toml(value)}")["key"]  # type: ignore[arg-type]
    assert back == value
    assert type(back) is type(value)


def test_lists_in_a_pipe_have_one_line_for_each_row() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posy", "settings"],
        env=_environment(COLUMNS="80"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for key in defaults():
        [line] = [line for line in lines if line.startswith(f"  {key} ")]
        assert toml(defaults()[key]) in line
    assert len(lines) < len(defaults()) + 60


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == cli.main(["datasets"]) == cli.main(["settings", "fedacs"]) == 0
    printed = capsys.readouterr().out
    for word in ("FedAMP", "digits", "num-clients", "fedacs-p", "emnist-letters"):
        assert word in printed
    assert "fedfew-mu" not in printed


def test_a_setting_that_the_app_does_not_admit_is_named_before_flower_starts() -> None:
    nowhere = launch.Connection("127.0.0.1:1")
    for start in (lambda c: launch.run_simulation(c, 3, "cpu"), lambda c: launch.run_on_superlink(c, nowhere)):
        with pytest.raises(
            LaunchError, match=r"fedper-personal is not in \[tool.flwr.app.config\].*`posy settings --toml`"
        ):
            start({"lr": 0.1, "fedper-personal": 2})


def test_simulation_gives_each_client_a_node_and_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = "client-resources-num-gpus"
    assert resources(7, "cpu") == {"num-supernodes": 7, "client-resources-num-cpus": 1, gpus: 0.0}
    assert resources(7, "cuda")[gpus] == resources(7, "cuda:1")[gpus] == 0.25
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert resources(7, "auto")[gpus] == 0.0


def test_python_runs_refuse_another_methods_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="fedfew-models in the run config is a setting of fedfew"):
        posy.run(method="fedavg", fedfew_models=5, output_dir=str(tmp_path))


def test_mark_stopped_leaves_a_finished_run_alone(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    for before, after in (("running", "stopped"), ("completed", "completed")):
        summary.write_text(json.dumps({"status": before, "rounds": 3}))
        mark_stopped(tmp_path)
        assert json.loads(summary.read_text()) == {"status": after, "rounds": 3}


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(APP), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}


def test_a_long_run_outlives_outages_of_the_superlink(tmp_path: Path) -> None:
    """What counts is how long the SuperLink has been away, not how long the run has taken, nor the outages before."""

    class Away(Flower):
        answers: ClassVar[list[str]] = ["", "running", "", "running", "", "finished:completed"]

        def start(self, *words: str) -> "subprocess.Popen[str]":
            return subprocess.Popen(["sleep", "0.3"], text=True, stdout=subprocess.PIPE)

        def ask(self, *words: str) -> dict[str, Any]:
            if not (status := self.answers.pop(0)):
                raise LaunchError("out of reach")
            return {"runs": [{"status": status}]}

    assert launch._follow(Away(tmp_path, {}), "1", verbose=False, patience=0.9)[0] == 0
    assert not Away.answers
    with pytest.raises(LaunchError, match="out of reach"):
        Away.answers[:] = [""] * 2
        launch._follow(Away(tmp_path, {}), "1", verbose=False, patience=0.9)
