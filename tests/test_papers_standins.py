"""`posy paper` runs rows of the papers' tables and figures on synthetic data in the published layouts."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from standins import agnews, cifar, emnist_letters, fedisic, femnist, kvasir, mnist, tiny_imagenet

from posy.commands.cli import main
from posy.commands.papers import item as item_module
from posy.commands.papers import page as page_module
from posy.commands.papers.compare import Comparison
from posy.commands.papers.item import item
from posy.strategies.registry import PAPERS, parse_words
from posy.yaml12 import dump, read_yaml

ALL, ROUND = "max-samples=0", "num-server-rounds=1"


class Case(NamedTuple):
    """Rows of one column of a table, or of a figure without columns, and the settings that make the run small."""

    write: Callable[[Path, pytest.MonkeyPatch], None]
    paper: str
    name: str
    column: str
    rows: tuple[str, ...]
    settings: str
    scale: str = "small"


CASES = {
    "cifar-10-batches-py": Case(
        lambda folder, patch: cifar(folder, "CIFAR10", 12, patch),
        *("feddrm", "table1", "CIFAR-10 Dir-0.3", ("FedALA", "FedDRM")),
        f"{ROUND} {ALL} num-clients=3 average-rounds=1 local-steps=1",
    ),
    "cifar-100-python": Case(
        lambda folder, patch: cifar(folder, "CIFAR100", 6, patch),
        *("cwfedavg", "figure6", "", ("FedAvg", "cwFedAvg")),
        f"{ROUND} {ALL} num-clients=5 local-epochs=1",
    ),
    "cifar-100-python as superclasses": Case(
        lambda folder, patch: cifar(folder, "CIFAR100", 3, patch),
        *("feddrm", "table1", "CIFAR-20 Dir-0.3", ("FedALA", "FedDRM")),
        f"{ROUND} num-clients=3 average-rounds=1 local-steps=1 batch-size=16 model=cnn",
        "full",
    ),
    "MNIST/raw": Case(
        lambda folder, _: mnist(folder, "MNIST", 20),
        *("cwfedavg", "table1", "MNIST, pathological", ("FedAvg", "cwFedAvg (Output)")),
        f"{ROUND} {ALL} num-clients=5 local-epochs=1",
    ),
    "FashionMNIST/raw": Case(
        lambda folder, _: mnist(folder, "FashionMNIST", 20),
        *("fedacs", "table1", "FMNIST, Dir(0.5)", ("Local", "DITTO-P", "DITTO-G")),
        f"{ROUND} {ALL} num-clients=4",
    ),
    "EMNIST/raw": Case(
        lambda folder, _: emnist_letters(folder, 14),
        *("ppfe", "table1", "EMNIST S=10", ("FedAvg", "FedAvg+FT", "PPFE")),
        "num-server-rounds=2 ppfe-stages=2 ppfe-stage-rounds=1,1 num-clients=10 samples-per-client=20 local-epochs=1",
        "full",
    ),
    "tiny-imagenet-200": Case(
        lambda folder, _: tiny_imagenet(folder, 8, 12),
        *("fedfew", "table1", "Tiny ImageNet, M = 10", ("FedAvg", "FedFew")),
        f"{ROUND} {ALL} num-clients=3 image-size=16",
    ),
    "LEAF's femnist": Case(
        lambda folder, _: femnist(folder, 6, 20),
        *("fedfew", "table1", "FEMNIST, M = 20", ("FedAvg", "FedFew")),
        f"{ROUND} num-clients=4",
    ),
    "agnews": Case(
        lambda folder, _: agnews(folder, 20),
        *("fedfew", "table1", "AG News, M = 20", ("FedAvg", "FedFew")),
        f"{ROUND} {ALL} num-clients=3 text-length=6 vocabulary=20",
    ),
    "kvasir": Case(
        lambda folder, _: kvasir(folder, 6),
        *("fedfew", "table2", "Kvasir", ("FedFew",)),
        f"{ROUND} {ALL} num-clients=2 fedfew-models=2 image-size=16",
    ),
    "FLamby's fedisic": Case(
        lambda folder, _: fedisic(folder, 8),
        *("fedfew", "table2", "FedISIC", ("FedAvg", "FedFew")),
        f"{ROUND} {ALL} image-size=16 model=cnn",
    ),
}


def reduced(case: Case) -> dict[str, Any]:
    """Return the file of a table or figure, reduced to some rows of one column."""
    content = read_yaml(PAPERS / case.paper / f"{case.name}.yaml")
    measures = content["measure"] if isinstance(content["measure"], list) else [content["measure"]]
    columns = [entry["name"] for entry in content.get("variants", [])] or [""]
    first = columns.index(case.column) * len(measures)
    printed = {row: values[first : first + len(measures)] for row, values in content.get("printed", {}).items()}
    read = {row: reading for row, reading in content.get("read", {}).items() if row in case.rows}
    source_rows = [reading["of"] for reading in read.values() if "of" in reading]
    content |= {"printed": {row: printed[row] for row in case.rows if row in printed}, "read": read, "claims": []}
    content["runs"] = [entry for entry in content["runs"] if entry["name"] in (*case.rows, *source_rows)]
    if case.column:
        content["variants"] = [entry for entry in content["variants"] if entry["name"] == case.column]
    content["small"].pop("without", None)
    return content


@pytest.fixture
def run_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Case], tuple[Comparison, str, str]]:
    """Return a function that runs a case for one seed, and returns its numbers, its page and the command's output."""

    def run(case: Case) -> tuple[Comparison, str, str]:
        data, folder = tmp_path / "data", tmp_path / "papers/mine"
        case.write(data, monkeypatch)
        folder.mkdir(parents=True)
        (folder / "README.md").write_text("# Mine\n\nA paper.\n", encoding="utf-8")
        (folder / f"{case.name}.yaml").write_text(dump(reduced(case)), encoding="utf-8")
        for module in (item_module, page_module):
            monkeypatch.setattr(module, "PAPERS", tmp_path / "papers")
        monkeypatch.chdir(tmp_path)
        words = [*case.settings.split(), f"data-dir={data}", "download=false"]
        assert main(["paper", "mine", case.name, "--scale", case.scale, "--seeds", "1", "-j", "1", *words]) == 0
        results = Path("results/papers/mine")
        comparison = Comparison(item("mine", case.name), parse_words(words, "a test"), results)
        return comparison, (results / "mine.md").read_text(encoding="utf-8"), capsys.readouterr().out

    return run


IN_CI = ("cifar-10-batches-py", "FashionMNIST/raw", "LEAF's femnist", "agnews")


@pytest.mark.parametrize(
    "layout", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_rows_run_on_data_in_its_published_layout(
    layout: str, run_case: Callable[[Case], tuple[Comparison, str, str]]
) -> None:
    case = CASES[layout]
    comparison, page, output = run_case(case)
    runs = len(comparison.item.content["runs"])
    assert f"{runs} of {runs} runs are available" in output
    assert "not run" not in page.lower()
    assert f"Command: `posy paper mine {case.name} --scale {case.scale} {case.settings}`." in " ".join(page.split())
    lines = {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines() if line.startswith("| ")}
    measures, rounds = comparison.item.measures, int(case.settings.split()[0].partition("=")[2])
    assert {(entry.row, entry.measure) for entry in comparison.entries} == set(itertools.product(case.rows, measures))
    for entry in comparison.entries:
        assert comparison.runs_of(entry.variant, entry.row)[0] == case.scale
        assert comparison.values(entry.variant, entry.row, "rounds") == {0: rounds}
        assert entry.variant == case.column and entry.ours is not None and entry.ours.seeds == 1
        if entry.printed is not None:
            assert f" | {entry.printed.text} | {entry.ours.mean:.2f} |" in lines[entry.row]
    if comparison.item.kind != "table":
        assert Path(f"results/papers/mine/mine-{case.name}.png").is_file()


def test_the_page_lists_the_settings_of_the_command(run_case: Callable[[Case], tuple[Comparison, str, str]]) -> None:
    case = CASES["MNIST/raw"]
    _, page, _ = run_case(case)
    assert f" --scale {case.scale} {case.settings}`." in " ".join(page.split())
    assert "num-server-rounds 1 (paper: 1000)" in page
    assert "Reduced: 1 instead of 1000 rounds, 5 instead of 20 clients" in page
