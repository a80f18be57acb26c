"""The `posy` command: settings from the command line, exit statuses, and real runs."""

import io
import os
import re
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from flwr.proto.control_pb2 import ListRunsResponse, StreamLogsRequest, StreamLogsResponse

import posy
from posy.commands import cli
from posy.commands.deploy import control
from posy.commands.deploy.certificates import make_certificates
from posy.commands.help import GROUPS
from posy.commands.launch import APP, Connection, toml
from posy.commands.table import Plan
from posy.settings import LaunchError, SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import defaults, parse_words, read_settings, with_experiment

WHERE = "the test"
DESCRIPTION = r"\A[a-z-]+ on \S+: [^\n]* clients, [^\n]* rounds, [^\n]*seed 42; [^\n]+\n\Z"
"""Pattern of the line that describes a run before Posy reads the data or connects to a SuperLink."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr=1e-3", 0.001),
        ("lr=2", 2.0),
        ("seed=3", 3),
        ("seed=3.5", "3.5"),
        ("download=true", True),
        ("download=off", "off"),
        ("seed=010", 10),
        ("seed=1_000", "1_000"),
        ("lr=1_0.5", "1_0.5"),
        ("run-name=on", "on"),
        ("run-name=2024", "2024"),
        ("data-dir=/data/a #1", "/data/a #1"),
        ('run-name="in-process"', "in-process"),
        ("run-name=30,50,40,40", "30,50,40,40"),
        ("run-name=", ""),
        ("download=yes!", "yes!"),
        ("download=[1]", "[1]"),
        ("run-name=a=b", "a=b"),
    ],
)
def test_values_take_the_type_of_their_setting(text: str, value: object) -> None:
    [parsed] = parse_words([text], WHERE).values()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["run", "lr=-1"], ["lr", "above 0", "the command line"]),
        (["run", "lr=fast"], ["lr", "'fast'", "a number"]),
        (["run", "num-clients=2.5"], ["num-clients", "a whole number"]),
        (["run", "method=fedfe"], ["fedfe", "fedfew"]),
        (["run", "nm-clients=3"], ["nm-clients", "num-clients"]),
        (["run", "fedfew-mu=0"], ["fedfew-mu", "above 0"]),
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
        (["run", "--method", "fedavg"], ["--method", "type method=fedavg"]),
        (["run", "--method=fedavg"], ["--method=fedavg", "type method=fedavg"]),
        (
            ["run", "lr=1", "--rounds", "3", "-v"],
            ["--rounds", "type num-server-rounds=3"],
        ),
        (["run", "--superlnk", "x"], ["--superlnk", "did you mean --superlink?"]),
        (["run", "--nonsense", "3"], ["--nonsense", "--help"]),
        (["run", "--superlink"], ["--superlink", "requires an argument", "`posy run --help`"]),
        (["rnu", "lr=1"], ["'rnu'", "did you mean `posy run`?"]),
        (["fedavg"], ["did you mean `posy run method=fedavg`?"]),
        (["method=fedavg"], ["did you mean `posy run method=fedavg`?"]),
        (
            ["xyzzy"],
            ["'xyzzy'", "run, table, tune, paper, predict, models, export, route, serve, report, watch, settings"],
        ),
        (["table"], ["missing", "FILE", "`posy table --help`"]),
        (["table", "x.yaml", "-j", "0"], ["--jobs", "0, but it must be at least 1; see"]),
        (["run", "dataset=no-such-data"], ["no-such-data", "digits"]),
        (["run", "dataset=sites"], ["dataset = 'sites'", "SuperNode at each site"]),
        (["run", "resume=gone"], ["resume = 'gone'", "does not contain a run", "runs/gone"]),
        (["run", "resume=../gone"], ["resume = '../gone'", "the name of a folder"]),
        (["settings", "fedavgg"], ["fedavgg", "fedavg"]),
        (["table", "no-such-table.yaml"], ["no-such-table.yaml"]),
    ],
)
def test_usage_errors_take_one_line(
    words: list[str],
    fragments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    output, error = capsys.readouterr()
    assert not re.sub(DESCRIPTION, "", output)
    assert error.startswith("posy: ")
    assert error.count("\n") == 1
    for fragment in fragments:
        assert fragment in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["table", "t.yaml", "lr=1", "-j", "3", "seed=2"],
        ["table", "-j", "3", "t.yaml", "lr=1", "seed=2"],
        ["table", "t.yaml", "-j", "3", "lr=1", "seed=2"],
    ],
)
def test_settings_may_precede_or_follow_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    plan = Plan("", Path(), ())
    monkeypatch.setattr("posy.commands.table.read_plan", lambda *arguments: calls.append(arguments) or plan)
    monkeypatch.setattr("posy.commands.table.run_table", lambda plan, **options: calls.append(options) or 0)
    assert cli.main(words) == 0
    assert calls == [(Path("t.yaml"), {"lr": 1.0, "seed": 2}, None), {"jobs": 3, "only_print": False}]


CONNECTION = ["--superlink", "127.0.0.1:1", "--root-certificates", "ca.pem"]


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["status", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1", "refused", "`posy superlink`"]),
        (["log", "one", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["stop", "one", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["run", "lr=1", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["register", "a.pub", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["register", "a.key", *CONNECTION], ["a.key is a private key", "public key"]),
        (["register", "ca.pem", *CONNECTION], ["ca.pem is not a public key"]),
        (["status", "--superlink", "127.0.0.1:1", "--root-certificates", "ca.key"], ["ca.key", "as a certificate"]),
        (["status", "--superlink", "127.0.0.1", "--insecure"], ["--superlink 127.0.0.1", "HOST:PORT"]),
        (["status", "--superlink", "a:99999", "--insecure"], ["--superlink a:99999", "HOST:PORT"]),
        (["status", "--superlink", "127.0.0.1:1", "--insecure"], ["no SuperLink answers", "without TLS (--insecure)"]),
        (["status", *CONNECTION, "--insecure"], ["--root-certificates cannot be combined with --insecure"]),
        (["status", "--superlink", "10.0.0.1:1", "--insecure"], ["without TLS the address must be 127.0.0.1"]),
        (["supernode", "--superlink", "site", "--insecure"], ["--superlink site", "HOST:PORT"]),
        (["supernode", "--root-certificates", "ca.pem", "--key", "a.pub"], ["--key", "a.pub", "not a private key"]),
        (["supernode", "--root-certificates", "ca.key", "--key", "a.key"], ["ca.key", "as a certificate"]),
        (
            ["supernode", "--key", "a.key", "--key", "a.key", "--root-certificates", "ca.pem"],
            ["the same name", "a.key"],
        ),
        (["superlink", "--certificates", "mixed"], ["server.pem", "server.key", "cannot be used", "mismatch"]),
        (["superlink", "--certificates", "."], ["--control 127.0.0.1:", "cannot listen on this address", "in use"]),
        (["supernode", "--insecure", "--wait", "0"], ["--wait", "0.0, but it must be at least 0.1;"]),
        (["superlink", "--insecure", "--state", "ca.pem"], ["--state ca.pem", "directory"]),
        (["certificates", ".", "--days", "99999999"], ["--days", "99999999", "36500"]),
        (
            ["certificates", ".", "--renew", "--renew-authority"],
            ["--renew-authority cannot be combined with", "new ca.pem"],
        ),
        (["certificates", ".", "b", "--renew"], ["b.key does not exist", "drop --renew"]),
        (["unregister", "a", *CONNECTION], ["no SuperLink answers at 127.0.0.1:1"]),
        (["backup", "file", "--state", "folder"], ["--state folder", "no state.db", "--volatile"]),
        (["restore", "ca.pem", "--state", "folder"], ["ca.pem cannot be restored", "not a database"]),
        (["doctor", "data=/srv/a"], ["data=/srv/a", "--key"]),
        (["doctor", "--key", "a.key", "--insecure"], ["--key cannot be combined with --insecure"]),
        (["doctor", "--key", "a.key", "data"], ["'data'", "key=value"]),
        (["doctor", "--fleet", "server"], ["--fleet server", "HOST:PORT"]),
        (["run", ""], ["''", "key=value"]),
        (["run", "=3"], ["'=3'", "key=value"]),
        (["run", "x" * 300], ["xxx", "this file does not exist"]),
        (["run", "folder"], ["'folder'", "it is a directory", "did you mean dataset=folder?"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_federation_errors_take_one_line(
    words: list[str],
    fragments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_certificates(tmp_path, [], ["a"], 1)
    make_certificates(tmp_path / "mixed", [], [], 1)
    (tmp_path / "mixed/server.pem").write_bytes((tmp_path / "server.pem").read_bytes())
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if words[0] == "superlink" and "--insecure" not in words:
            words = [*words, "--control", f"127.0.0.1:{listener.getsockname()[1]}", "--fleet", "127.0.0.1:9"]
        assert cli.main(words) == 2
    output, error = capsys.readouterr()
    assert not re.sub(DESCRIPTION, "", output)
    [line] = error.splitlines()
    assert line.startswith("posy: ")
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "server.example.org"])
def test_the_control_api_is_local_unless_opened(
    host: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["superlink", "--control", f"{host}:8000"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    danger = "can run code on every node"
    for part in (f"--control {host}:8000", danger, "ssh -L 8000:127.0.0.1:8000 SERVER", "--control-open-to-network"):
        assert part in line
    assert cli.main(["superlink", "--control", f"{host}:8000", "--control-open-to-network"]) == 2
    warning, missing = capsys.readouterr().err.splitlines()  # without certificates, nothing starts
    assert warning.startswith(f"posy: WARNING: --control {host}:8000: ")
    assert danger in warning
    assert "ca.pem" in missing
    for local in ("127.0.0.1", "localhost", "[::1]", "127.0.0.2"):
        assert cli.main(["superlink", "--control", f"{local}:8000"]) == 2
        assert danger not in capsys.readouterr().err


def test_superlink_refuses_an_invalid_posy_cores(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSY_CORES", "two")
    assert cli.main(["superlink", "--insecure"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("posy: ") and "POSY_CORES = 'two'" in line
    assert not list(tmp_path.iterdir())


def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((APP / "pyproject.toml").read_text())["project"]["version"]
    for words, status, text in (
        (["--version"], 0, f"posy {version} (flwr 1.39"),
        (["--help"], 0, "examples:\n    posy run         "),
        (["run", "--help"], 0, "examples:\n    posy run num-server-rounds=5 "),
        ([], 2, "examples:"),
    ):
        assert cli.main(words) == status
        assert text in capsys.readouterr().out


def test_help_examples_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text("lr: 0.1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runs: list[dict[str, Any]] = []
    monkeypatch.setattr(cli, "run_in_process", lambda settings, where: runs.append(settings) or 0)
    monkeypatch.setattr(control, "run_on_superlink", lambda settings, *_, **options: runs.append(settings) or 0)
    assert cli.main(["--help"]) == cli.main(["run", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.strip().split("  ")[0].split() for line in lines if line.startswith("    posy run")]
    assert len(examples) >= 8
    for example in examples:
        local = ["--insecure"] if "--superlink" in example else []
        assert cli.main([*example[1:], *local]) == 0, example
        if "resume" not in runs[-1]:
            read_settings(runs[-1], "the help")


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """Return the sections of a command's help, each with the text of its entries by name."""
    assert cli.main([*words, "--help"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80, words
    assert "<=x" not in output and "x>=" not in output, words
    sections: dict[str, dict[str, str]] = {}
    for block in output.split("\n\n"):
        title, *lines = block.splitlines()
        if title.endswith(":") and title[0].isupper():
            entries = re.findall(r"^  (\S.*?)(?:  +|\n {20,})(\S.*)$", "\n".join(lines), re.MULTILINE)
            sections[title[:-1]] = dict(entries)
            assert len(entries) == sum(line[2] != " " for line in lines), (words, title)
    return sections


def test_help_explains_every_command_argument_and_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(cli.app)
    sections = help_of([], capsys)
    assert list(sections) == ["Options", *GROUPS]
    listed = [name for title in GROUPS for name in sections[title]]
    assert sorted(listed) == sorted(group.commands)
    assert not [text for title in GROUPS for text in sections[title].values() if text.endswith("...")]
    policies = group.commands["policy"].commands
    for words, command in [
        *([[name], group.commands[name]] for name in listed if name != "policy"),
        *([["policy", name], command] for name, command in policies.items()),
    ]:
        entries = help_of(words, capsys)
        assert len(entries["Options"]) == 1 + sum(item.param_type_name == "option" for item in command.params)
        arguments = [item.metavar for item in command.params if item.param_type_name == "argument"]
        assert list(entries.get("Arguments", {})) == arguments, words


def test_help_and_lists_do_not_import_pytorch() -> None:
    code = (
        "import sys; from posy.commands import cli\n"
        "assert cli.main(['methods']) == cli.main(['run', '--help']) == cli.main(['--version']) == 0\n"
        "assert cli.main(['run', 'lr=fast', '--superlink', 'localhost:1']) == 2\n"
        "assert not {'torch', 'flwr', 'pandas'} & sys.modules.keys(), 'slow to import'\n"
        "assert cli.main(['status', '--superlink', 'localhost:1', '--insecure']) == 2\n"
        "assert 'torch' not in sys.modules, 'slow to import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "key=value" in done.stdout


def test_user_settings_override_the_experiment_even_at_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 0.5\nnum-clients: 7\n", encoding="utf-8")
    at_default = defaults()["lr"]
    assert with_experiment({"experiment": str(file), "lr": at_default}, WHERE) == {"lr": at_default, "num-clients": 7}


def test_experiment_values_are_parsed_as_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 1e-3\nweight-decay: 5E-4\nsystem-accuracy: on\nsave-models: True\n", encoding="utf-8")
    assert with_experiment({"experiment": str(file)}, WHERE) == {
        "lr": 0.001, "weight-decay": 0.0005, "system-accuracy": "on", "save-models": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("experiment: other", "cannot name another"),
        ("system-accuracy: maybe", "system-accuracy = 'maybe'"),
        ("lr: 0.1\nlr: 0.2", "lr given twice"),
    ],
)
def test_experiment_files_are_checked(content: str, fragment: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=fragment) as error:
        with_experiment({"experiment": str(file)}, WHERE)
    assert str(file) in str(error.value)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.npz").touch()
    Path("store").mkdir()
    Path("store/there.csv").touch()
    settings = read_settings(
        {"dataset": "here.npz", "data-dir": "store", "partition": "file", "partition-file": "p.json"}
    )
    data = settings.data
    assert [data.dataset, data.data_dir, data.partition_file, settings.run.output_dir] == [
        str(tmp_path / name) for name in ("here.npz", "store", "p.json", "runs")
    ]
    assert read_settings({"dataset": "there.csv", "data-dir": "store"}).data.dataset.endswith("store/there.csv")
    assert read_settings({"dataset": "mnist"}).data.dataset == "mnist"


@pytest.mark.parametrize("value", ["plain", 'a "quoted" \\ ä\n\x7f', "", True, 3, 0.1, 1e-7, 1000.0])
def test_toml_round_trip(value: object) -> None:
    back = tomllib.loads(f"key = {toml(value)}")["key"]  # type: ignore[arg-type]
    assert back == value
    assert type(back) is type(value)


def test_piped_lists_print_one_line_per_row() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posy", "settings"],
        env=_environment(COLUMNS="80"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    for key in defaults():
        [line] = [line for line in lines if line.startswith(f"  {key} ")]
        assert toml(defaults()[key]) in line
    assert len(lines) < len(defaults()) + 5 * (len(METHODS) + 5)  # allow for the headings of the groups


def test_methods_datasets_and_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == cli.main(["datasets"]) == cli.main(["settings", "fedacs"]) == 0
    printed = capsys.readouterr().out
    for word in ("FedAMP", "digits", "num-clients", "fedacs-p", "emnist-letters"):
        assert word in printed
    assert "fedfew-mu" not in printed


def test_an_undeclared_setting_is_refused_before_connecting() -> None:
    with pytest.raises(LaunchError, match=r"fedper-personal is not in \[tool.flwr.app.config\].*docs/generate.py"):
        control.run_on_superlink({"lr": 0.1, "fedper-personal": 2}, Connection("127.0.0.1:1"))


def test_posy_run_refuses_settings_of_another_method(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fedfew-models .* is a setting of fedfew"):
        posy.run(method="fedavg", fedfew_models=5, output_dir=str(tmp_path))


class Unsteady(httpx.BaseTransport):
    """Simulate a SuperLink that loses the connection: each "-" in `outages` is a request without an answer."""

    def __init__(self, outages: str, log: str) -> None:
        self._outages, self._log = list(outages), log

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._outages.pop(0) == "-":
            raise httpx.ConnectError("out of reach")
        if request.url.path == "/v1/control/stream-logs":
            return httpx.Response(200, stream=Parts(self.log(StreamLogsRequest.FromString(request.content))))
        assert request.url.path == "/v1/control/list-runs"
        answer = ListRunsResponse(now="2026-01-01T00:00:09+00:00")
        run = answer.run_dict[1]
        run.run_id, run.pending_at = 1, "2026-01-01T00:00:00+00:00"
        run.status.status, run.status.sub_status = ("running", "") if self._outages else ("finished", "completed")
        return httpx.Response(200, content=answer.SerializeToString())

    def log(self, request: StreamLogsRequest) -> Iterator[bytes]:
        """Yield each letter of the log as an answer in two parts, and disconnect after every fifth letter."""
        for number in range(int(request.after_timestamp), len(self._log)):
            part = StreamLogsResponse(log_output=self._log[number], latest_timestamp=number + 1).SerializeToString()
            yield len(part).to_bytes(4) + part[:1]
            yield part[1:]
            if number % 5 == 4:
                raise httpx.RemoteProtocolError("broken off")


class Parts(httpx.SyncByteStream):
    """The content of a response."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return self._parts


def unsteady_control(outages: str, log: str) -> control.Control:
    return control.Control(httpx.Client(transport=Unsteady(outages, log), base_url="http://here"), "here")


def test_following_a_run_survives_superlink_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`patience` limits one outage, not the duration of the run or the sum of its outages."""
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.3)
    lines: list[str] = []
    unsteady = unsteady_control("+-+--+-++-+-++", "one\ntwo\nthree\nend")
    assert unsteady.follow("1", lines.append, patience=0.8).ended
    assert lines == ["one\n", "two\n", "three\n", "end\n"]  # each once
    unreachable = unsteady_control("-" * 9, "")
    with pytest.raises(httpx.ConnectError):
        unreachable.follow("1", lines.append, patience=0.8)


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(APP), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}


@pytest.mark.slow
def test_the_app_bundle_contains_only_runtime_files() -> None:
    """A node fetches it as one message."""
    from flwr.cli.build import build_fab_from_disk

    content = build_fab_from_disk(APP)
    assert len(content) < 3e6
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        names = set(bundle.namelist())
    assert {"posy/__init__.py", "client_app/app.py", "pyproject.toml", "LICENSE"} <= names
    assert "papers/ppfe/settings/ppfe-cifar10-s2.yaml" in names
    assert not [name for name in names if name.startswith(("benchmarks/", "docs/", "tests/"))]
