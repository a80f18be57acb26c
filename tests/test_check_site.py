"""`posy check-site` reports the data of a site as the site's node reads it in a run."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nodes import LENIENT, POLICY, class_folders, table
from rich.console import Console

from posy.commands.check_site import check_site, show
from posy.commands.cli import main
from posy.data.errors import DataError
from posy.data.settings import DataSettings
from posy.data.sites import load_site, read_site

NODE = {"policy": str(LENIENT)}
OPEN = DataSettings(dataset="sites")


def folder(root: Path) -> Path:
    return class_folders(root, np.random.default_rng(0).integers(0, 256, (8, 4, 5), np.uint8), "aaaaaabb")


def test_image_folders_are_reported(tmp_path: Path) -> None:
    (folder(tmp_path) / "a" / "torn.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"torn\.png: not an image.*skip-unreadable=true"):
        check_site(NODE | {"data": str(tmp_path)}, OPEN)
    report = check_site(NODE | {"data": str(tmp_path), "name": "here", "skip-unreadable": "true"}, OPEN)
    samples = "8: 6 for training, 2 for testing"
    assert [report.facts[key] for key in ("site", "kind", "shape", "samples")] == ["here", "image", "1x4x5", samples]
    assert {name: sum(counts) for name, counts in report.classes.items()} == {"a": 6, "b": 2}
    assert report.facts["agreed on in a run"] == "sample-kind, input-shape, classes"
    assert len(report.unreadable) == 1
    task = replace(OPEN, sample_kind="image", input_shape="3x8x8", classes="a,b,c")
    report = check_site(NODE | {"data": str(tmp_path), "skip-unreadable": "true"}, task)
    assert [report.facts[key] for key in ("shape", "missing classes", "agreed on in a run")] == ["3x8x8", "c", ""]
    dataset, part = load_site(read_site(tmp_path, task, POLICY, skip_unreadable=True), task, POLICY)
    for column, rows in enumerate((part.train[0], part.test[0])):
        counts = np.bincount(dataset.y[rows], minlength=3).tolist()
        assert [report.classes[name][column] for name in "ab"] == counts[:2]


def test_unusual_features_are_reported(tmp_path: Path) -> None:
    x = np.array([[i % 7, 5.0, 1.7e9 + i] for i in range(400)])
    x[17, 0] = 1e5
    path = table(tmp_path / "s.csv", x, np.arange(400) % 2)
    report = check_site(NODE | {"data": str(path)}, OPEN)
    assert [feature[:3] for feature in report.features] == [("f0", "0", "100000"), ("f1", "5", "5")]
    assert [reason.split()[0] for *_, reason in report.features] == ["has", "constant"]
    # In a run with another unit for a feature, all values of this column are far from the mean.
    run = replace(OPEN, sample_kind="features", input_shape="3", classes="0,1", feature_mean="0,5,0", feature_std="9")
    assert [name for name, *_ in check_site(NODE | {"data": str(path)}, run).features] == [
        "f0",
        "f1",
        "f2",
    ]


def test_zeros_that_may_be_missing_values_are_reported(tmp_path: Path) -> None:
    """Cholesterol is 0 in all rows, and blood pressure in some. Oldpeak and the sex are 0 in many rows of real data."""
    rows = np.arange(40)
    pressure = np.where(rows % 5 == 0, 0, 110 + rows)
    columns = [np.zeros(40), pressure, np.where(rows % 2, 0, rows / 10), rows % 2, 30 + rows]
    path = table(tmp_path / "s.csv", np.stack(columns, axis=1), rows % 2)
    reasons = {name: reason for name, *_, reason in check_site(NODE | {"data": str(path)}, OPEN).features}
    remedy = "zeros may be a code for missing values: if so, export ? or an empty cell instead"
    assert reasons == {"f0": f"constant; 40 {remedy}", "f1": f"8 {remedy}"}


def test_indicators_of_missing_values_are_no_codes(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("\n".join(["age,cp,label", *(f"{60 + i % 3},{'abc'[i % 3]},{i % 2}" for i in range(30))]))
    settings = replace(OPEN, missing="impute", categories="cp", input_columns="age,cp")
    assert check_site(NODE | {"data": str(path)}, settings).features == []


def test_shared_statistics_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.column_stack([np.arange(8.0), np.full(8, 6.2)])
    path = table(tmp_path / "s.csv", x, [0, 1] * 4)
    report = check_site(NODE | {"data": str(path)}, OPEN)
    task = replace(OPEN, sample_kind="features", input_shape="2", classes="0,1", feature_mean="0", feature_std="1")
    rows = load_site(read_site(path, OPEN, POLICY), task, POLICY)[1].train[0]
    mean = sum(rows.tolist()) / 6
    deviation = (sum((row - mean) ** 2 for row in rows.tolist()) / 6) ** 0.5
    assert report.statistics == [("f0", f"{mean:.4g}", f"{deviation:.3g}"), ("f1", "6.2", "0")]
    assert main(["check-site", f"policy={LENIENT}", f"data={path}"]) == 0
    assert "standard deviation" in capsys.readouterr().out


def test_the_next_commands_repeat_the_settings_that_a_run_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.csv"
    rows = (f"{60 + i % 3},{'?' if i == 3 else i % 2},{i % 2}" for i in range(12))
    path.write_text("\n".join(["age,cp,label", *rows]))
    words = ["missing=impute", "categories=cp"]
    assert main(["check-site", f"policy={LENIENT}", f"data={path}", *words]) == 0
    supernode, run = capsys.readouterr().out.partition("next:\n")[2].splitlines()
    node_words = f"policy={LENIENT} data={path}"
    assert supernode.strip() == f"posy supernode --superlink SERVER:9092 --key NODE.key {node_words}"
    command = "posy run --superlink 127.0.0.1:8000 dataset=sites num-clients=N missing=impute categories=cp"
    assert run.partition("    #")[0].strip() == command
    assert main(["check-site", f"policy={LENIENT}", f"data={path}"]) == 2  # refuses the missing value


def test_a_log_that_is_not_in_a_terminal_has_no_colours(tmp_path: Path) -> None:
    path = table(tmp_path / "s.csv", np.arange(16.0).reshape(8, 2), [0, 1] * 4)
    words = [sys.executable, "-m", "posy", "check-site", f"policy={LENIENT}", f"data={path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "INFO :" in done.stderr and "\x1b" not in done.stderr + done.stdout


def test_unexpected_columns_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "s.csv", np.ones((4, 3)), [0, 1] * 2)
    words = ["sample-kind=features", "input-shape=2", "feature-names=f0,f1", "classes=0,1"]
    assert main(["check-site", f"policy={LENIENT}", f"data={path}", *words]) == 2
    assert "feature-names (unknown: f2)" in capsys.readouterr().err


def test_a_site_with_one_class_can_take_part(tmp_path: Path) -> None:
    path = table(tmp_path / "s.csv", np.ones((8, 2)), ["ill"] * 8)
    assert check_site(NODE | {"data": str(path)}, OPEN).classes == {"ill": (6, 2)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "data=PATH is missing"),
        (("data=s.csv",), "must be an absolute path"),
        (("data={}/gone.csv",), "does not exist"),
        (("data={}/s.csv", "classes=a,b"), "label '0' of sample 0 is not a class"),
        (("data={}/s.csv", "sample-kind=image"), "features samples; .* is image"),
        (("data={}/s.csv", "input-shape=3"), "samples of shape 2; .* is 3"),
        (("data={}/s.csv", "input-shape=3x3"), "input-shape = '3x3'"),
        (("data={}/s.csv", "shift=low"), "shift = 'low' .*has no effect"),
        (("data={}/s.csv", "skip-unreadable=perhaps"), "skip-unreadable = 'perhaps'"),
        (("data={}/s.csv", "nonsense=1"), "nonsense .* is not a setting"),
    ],
)
def test_errors_take_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path / "s.csv", np.arange(8.0).reshape(4, 2), [0, 1, 0, 1])
    status = main(["check-site", f"policy={LENIENT}", "name=a", *(word.format(tmp_path) for word in words)])
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    (line,) = [line for line in captured.err.splitlines() if line.startswith("posy:")]
    assert re.search(message, line)


def test_report_lists_samples_classes_and_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path)
    for number in range(25):
        (tmp_path / "b" / f"torn-{number}.png").write_bytes(b"no image")
    assert main(["check-site", f"policy={LENIENT}", f"data={tmp_path}", "name=here", "skip-unreadable=true"]) == 0
    output = capsys.readouterr().out
    for part in ("here", "1x4x5", "8: 6 for training, 2 for testing", "2 classes", "25 of 33 image files"):
        assert part in output
    assert output.count("not an image that can be read") == 20
    assert "and 5 more" in output
    words = f"policy={LENIENT} data={tmp_path} name=here skip-unreadable=true"
    start = f"posy supernode --superlink SERVER:9092 --key NODE.key {words}"
    assert output.endswith(f"This site can take part.\nnext:\n  {start}\n")
    names = [f"[red]class-{i}[/]" for i in range(3)]  # no markup
    path = table(tmp_path / "s.csv", np.arange(24.0).reshape(8, 3), [*names, *names, *names[:2]])
    console = Console(width=100)
    with console.capture() as capture:
        show(check_site(NODE | {"data": str(path)}, OPEN), console)
    assert all(name in capture.get() for name in names)
