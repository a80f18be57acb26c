"""The description of a run before it starts, and the commands at its end."""

import shlex
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from posy.commands import cli, guide
from posy.commands.deploy import next_steps
from posy.commands.launch import Connection
from posy.strategies.registry import read_settings

QUICK = ["max-samples=80", "num-clients=2", "local-epochs=1", "num-server-rounds=1", "model=linear", "device=cpu"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "fedfew on digits: 10 clients, 15 rounds, model chosen for the data, seed 42; results in runs/"),
        (
            {"method": "ppfe", "dataset": "mnist", "fraction-train": 0.25, "seed": 1, "run-name": "one"},
            "ppfe on mnist: 3 of 10 clients per round, 15 rounds, model chosen for the data, seed 1; "
            "results in runs/one",
        ),
        (
            {"dataset": "wine.csv", "model": "linear", "num-server-rounds": 1, "folds": 5, "output-dir": "/elsewhere"},
            "fedfew on wine.csv: 10 clients, 1 round, 5 folds, model linear, seed 42; results in /elsewhere/",
        ),
    ],
)
def test_a_run_is_described_before_it_starts(
    config: dict[str, object], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wine.csv").write_text("a,label\n1,x\n", encoding="utf-8")
    assert guide.description(read_settings(config)) == expected


def output_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that a command prints."""
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


def next_of(lines: list[str]) -> list[list[str]]:
    """Return the words of the commands at the end of a command's output."""
    return [shlex.split(line, comments=True) for line in lines[lines.index("next:") + 1 :]]


def test_the_commands_at_the_end_of_a_run_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = output_of(["run", *QUICK, "method=fedavg"], capsys)
    name = next(tmp_path.glob("runs/*")).name
    assert lines[:2] == [
        "fedavg on digits: 2 clients, 1 round, model linear, seed 42; results in runs/",
        f"model linear on cpu; results in runs/{name}",
    ]
    report, predict, serve, longer = next_of(lines)
    assert serve == ["posy", "serve", name]
    assert output_of(report[1:], capsys)[0].startswith("report.html: 1 run, ")
    digit = load_digits().images[0]
    Image.fromarray((digit * 15).astype("uint8")).save(predict[-1])
    assert any(predict[-1] in line for line in output_of(predict[1:], capsys))
    resumed = output_of(longer[1:], capsys)
    assert resumed[0] == f"resuming runs/{name} after round 1 of 2"
    assert next_of(resumed)[3] == ["posy", "run", f"resume={name}", "num-server-rounds=4"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dataset=heart-disease", "method=local"], ["report", "predict RUN 0 rows.csv", "serve", "run"]),
        (["method=feddrm", "run-name=one"], ["report", "route RUN photo.png", "serve", "run"]),
        (
            ["dataset=texts.csv", "model=fasttext", "method=fedavg"],
            ["report", "predict RUN 0 'some text'", "serve", "run"],
        ),
        (["save-models=false", "method=fedavg"], ["report", "run"]),
        (["checkpoint-every=0", "method=fedavg"], ["report", "predict RUN 0 photo.png", "serve"]),
        (["lr-schedule=cosine", "method=fedavg"], ["report", "predict RUN 0 photo.png", "serve"]),
        (["folds=2", "run-name=cv", "method=fedavg"], ["report", "predict runs/cv/fold-1 0 photo.png", "serve"]),
    ],
)
def test_the_commands_fit_the_run(
    words: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{word} {n},{word}" for word in ("good", "bad") for n in range(40)]
    (tmp_path / "texts.csv").write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")
    replaced = {word.partition("=")[0] for word in words}
    lines = output_of(["run", *words, *(w for w in QUICK if w.partition("=")[0] not in replaced)], capsys)
    commands = next_of(lines)
    name = next(path for path in tmp_path.glob("runs/*") if path.is_dir()).name
    assert len(commands) == len(expected) <= 4
    for command, start in zip(commands, expected, strict=True):
        typed = shlex.split(start.replace("RUN", name))
        assert command[: len(typed) + 1] == ["posy", *typed]


@pytest.mark.parametrize(
    ("nodes", "hosts", "on_server", "expected"),
    [
        ([], [], True, ["superlink --certificates keys", "certificates keys NODE    # at a site"]),
        (
            ["a", "b"],
            ["fl.example.org"],
            True,
            [
                "superlink --certificates keys",
                "register keys/a.pub keys/b.pub --root-certificates keys/ca.pem",
                "supernode --superlink fl.example.org:9092 --key keys/a.key --root-certificates keys/ca.pem data=PATH",
            ],
        ),
        (
            ["a"],
            [],
            False,
            [
                "register certificates/a.pub    # on the server, with a copy from keys",
                "supernode --superlink SERVER:9092 --key keys/a.key --root-certificates keys/ca.pem data=PATH",
            ],
        ),
    ],
)
def test_certificates_end_with_the_commands_that_use_them(
    nodes: list[str], hosts: list[str], on_server: bool, expected: list[str]
) -> None:
    commands = next_steps.after_certificates(Path("keys"), nodes, hosts, on_server=on_server)
    assert len(commands) == len(expected)
    assert all(command.startswith(f"posy {start}") for command, start in zip(commands, expected, strict=True))


def test_a_superlink_names_the_commands_that_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    insecure, secure = Connection("127.0.0.1:8000"), Connection("127.0.0.1:8000", tmp_path / "certificates/ca.pem")
    assert next_steps.after_superlink(insecure, "127.0.0.1:9") == [
        "posy supernode --insecure --superlink 127.0.0.1:9 partition-id=0 num-partitions=2    # and partition-id=1",
        "posy run --superlink 127.0.0.1:8000 --insecure num-clients=2",
    ]
    assert next_steps.after_superlink(secure, "0.0.0.0:9092") == [
        "posy register NODE.pub",
        "posy supernode --superlink SERVER:9092 --key NODE.key data=PATH    # at a site",
        "posy run --superlink 127.0.0.1:8000 dataset=sites num-clients=2",
    ]
    elsewhere = Connection("127.0.0.1:9", tmp_path / "ca.pem")
    register, *_ = next_steps.after_superlink(elsewhere, "0.0.0.0:9092")
    assert shlex.split(register)[2:] == ["NODE.pub", *elsewhere.words()]
