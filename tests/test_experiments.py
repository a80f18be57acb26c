"""The experiments and tables of Posy load and match the papers' numbers."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posy.commands import archive
from posy.commands.launch import APP
from posy.commands.papers.item import item
from posy.commands.table import plan_as_yaml, read_plan
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.strategies.methods import METHODS
from posy.strategies.ppfe import plan_stages
from posy.strategies.registry import PAPERS, declared, read_settings, with_experiment

FILES = sorted(PAPERS.glob("*/settings/*.yaml"))
FLAMBY_SEEDS = {42, 43, 44, 45, 46}
TABLES = sorted((APP / "benchmarks/tables").glob("*.yaml"))

Config = dict[str, Any]

FEDFEW = {
    "method": "fedfew",
    "fedfew-models": 3,
    "fedfew-mu": 0.01,
    "fedfew-full-steps": False,
    "fedfew-initialisation": "same",
    "fedfew-batches": "own",
    "local-epochs": 1,
    "fraction-train": 1.0,
    "test-fraction": 0.25,
}
CWFEDAVG = {
    "method": "cwfedavg",
    "num-clients": 20,
    "lr": 0.005,
    "batch-size": 10,
    "local-epochs": 1,
    "model": "cnn",
    "num-server-rounds": 1000,
    "test-fraction": 0.25,
    "fraction-train": 1.0,
    "cwfedavg-layers": "output",
    "cwfedavg-wdr": True,
}
FEDDRM = {
    "method": "feddrm",
    "num-clients": 8,
    "feddrm-class-weight": 0.9,
    "momentum": 0.9,
    "weight-decay": 5e-4,
    "lr": 0.01,
    "lr-schedule": "cosine",
    "local-steps": 10,
    "batch-size": 128,
    "num-server-rounds": 800,
    "test-fraction": 0.3,
    "shift": "high",
    "augment": "resized-crop",
    "model": "resnet18-gn",
    "linear-init": "kaiming",
    "average-rounds": 50,
    "feddrm-routing": "density",
}
PPFE = {
    "method": "ppfe",
    "num-clients": 100,
    "fraction-train": 0.1,
    "local-epochs": 5,
    "batch-size": 10,
    "full-last-round": True,
    "test-fraction": 0.25,
    "momentum": 0.9,
    "weight-decay": 1e-4,
    "lr": 0.01,
    "ppfe-body-lr-factor": 0.1,
    "ppfe-body-lr-stage": 3,
    "num-server-rounds": 160,
    "ppfe-stages": 4,
    "ppfe-stage-rounds": "30,50,40,40",
    "ppfe-ranks": "100,50,24;80,40,16",
    "ppfe-reduction": "svd-fedavg",
    "ppfe-beta": "adaboost",
    "ppfe-loss": "cross-entropy",
    "model": "cnn-3fc",
}
PPFE_CIFAR = {**PPFE, "augment": "crop-flip"}
WIDE = {"model": "cnn-3fc-wide", "ppfe-ranks": "200,100,48;160,80,32"}
DIRICHLET, CLASSES = {"partition": "dirichlet"}, {"partition": "classes"}
DIR01 = {"partition": "dirichlet", "dirichlet-alpha": 0.1, "dirichlet-balanced": True}
DIR03 = {"partition": "dirichlet", "dirichlet-alpha": 0.3, "dirichlet-balanced": True}
NEWS = {"text-length": 200, "vocabulary": 32000}
PATHOLOGICAL = {"partition": "pathological"}
NUMBERS: dict[str, Config] = {
    "fedfew-cifar10-m10": {
        **FEDFEW,
        **DIR01,
        "num-clients": 10,
        "lr": 0.005,
        "batch-size": 50,
        "num-server-rounds": 2000,
        "model": "cnn",
    },
    "fedfew-cifar10-m20": {
        **FEDFEW,
        **DIR01,
        "num-clients": 20,
        "lr": 0.005,
        "batch-size": 50,
        "num-server-rounds": 2000,
        "model": "cnn",
    },
    "fedfew-tiny-imagenet": {
        **FEDFEW,
        **DIR01,
        "num-clients": 10,
        "lr": 5e-4,
        "batch-size": 50,
        "num-server-rounds": 2000,
        "model": "cnn",
    },
    "fedfew-agnews": {
        **FEDFEW,
        **DIR01,
        **NEWS,
        "num-clients": 20,
        "lr": 0.005,
        "batch-size": 100,
        "num-server-rounds": 2000,
        "model": "textcnn",
    },
    "fedfew-femnist": {
        **FEDFEW,
        "partition": "natural",
        "num-clients": 20,
        "lr": 0.005,
        "batch-size": 100,
        "num-server-rounds": 2000,
        "model": "cnn",
    },
    "fedfew-kvasir": {
        **FEDFEW,
        **DIR01,
        "fedfew-personal-statistics": True,
        "num-clients": 5,
        "lr": 0.002,
        "batch-size": 100,
        "num-server-rounds": 1000,
        "augment": "crop",
        "model": "resnet18-bn",
    },
    "fedfew-fedisic": {
        **FEDFEW,
        "partition": "natural",
        "fedfew-personal-statistics": True,
        "num-clients": 6,
        "lr": 0.005,
        "batch-size": 50,
        "num-server-rounds": 1000,
        "image-size": 224,
        "augment": "none",
        "model": "resnet18-bn",
    },
    "cwfedavg-cifar10-dir01": {**CWFEDAVG, **DIR01, "cwfedavg-wdr-lambda": 10.0},
    "cwfedavg-cifar10-pathological": {**CWFEDAVG, **PATHOLOGICAL, "classes-per-client": 2, "cwfedavg-wdr-lambda": 10.0},
    "cwfedavg-cifar100-pathological": {
        **CWFEDAVG,
        **PATHOLOGICAL,
        "classes-per-client": 10,
        "cwfedavg-wdr-lambda": 1000.0,
    },
    "cwfedavg-cifar100-dir01": {**CWFEDAVG, **DIR01, "cwfedavg-wdr-lambda": 1000.0},
    "cwfedavg-tiny-imagenet-dir01": {**CWFEDAVG, **DIR01, "cwfedavg-wdr-lambda": 2000.0},
    "cwfedavg-tiny-imagenet-resnet": {**CWFEDAVG, **DIR01, "cwfedavg-wdr-lambda": 2000.0, "model": "resnet18-bn"},
    "cwfedavg-mnist-pathological": {**CWFEDAVG, **PATHOLOGICAL, "classes-per-client": 2, "cwfedavg-wdr-lambda": 10.0},
    "cwfedavg-agnews": {**CWFEDAVG, **DIR01, **NEWS, "cwfedavg-wdr-lambda": 10.0, "model": "fasttext"},
    "fedacs-cifar10-pathological": {"num-clients": 100, **CLASSES, "classes-per-client": 2},
    "fedacs-fmnist-pathological": {"num-clients": 100, **CLASSES, "classes-per-client": 2},
    "fedacs-cifar10-dir05": {"num-clients": 100, **DIRICHLET, "dirichlet-alpha": 0.5, "train-samples": 0},
    "fedacs-fmnist-dir05": {"num-clients": 100, **DIRICHLET, "dirichlet-alpha": 0.5, "train-samples": 0},
    "fedacs-cifar10-50samples": {"num-clients": 100, "dirichlet-alpha": 0.5, "train-samples": 50},
    "fedacs-fmnist-50samples": {"num-clients": 100, "dirichlet-alpha": 0.5, "train-samples": 50},
    "fedacs-cifar10-50samples-classes": {"num-clients": 100, "classes-per-client": 2, "train-samples": 50},
    "fedacs-fmnist-50samples-classes": {"num-clients": 100, "classes-per-client": 2, "train-samples": 50},
    "fedacs-cifar10-500clients": {"num-clients": 500, "dirichlet-alpha": 0.5},
    "fedacs-fmnist-500clients": {"num-clients": 500, "dirichlet-alpha": 0.5},
    "feddrm-cifar10-dir03": {**FEDDRM, **DIR03},
    "feddrm-cifar10-5spc": {**FEDDRM, "partition": "shards", "shards-per-client": 5},
    "feddrm-cifar20-dir03": {**FEDDRM, **DIR03},
    "feddrm-cifar20-25spc": {**FEDDRM, "partition": "shards", "shards-per-client": 25},
    "feddrm-cifar100-dir03": {**FEDDRM, **DIR03},
    "feddrm-cifar100-25spc": {**FEDDRM, "partition": "shards", "shards-per-client": 25},
    "ppfe-cifar10-s2": {**PPFE_CIFAR, **CLASSES, "classes-per-client": 2, "samples-per-client": 150},
    "ppfe-cifar10-s5": {**PPFE_CIFAR, **CLASSES, "classes-per-client": 5, "samples-per-client": 150},
    "ppfe-cifar10-dir03": {**PPFE_CIFAR, **DIRICHLET, "dirichlet-alpha": 0.3, "train-samples": 150},
    "ppfe-cifar10-dir1": {**PPFE_CIFAR, **DIRICHLET, "dirichlet-alpha": 1.0, "train-samples": 150},
    "ppfe-cifar100-s5": {**PPFE_CIFAR, **WIDE, **CLASSES, "classes-per-client": 5, "samples-per-client": 400},
    "ppfe-cifar100-s20": {**PPFE_CIFAR, **WIDE, **CLASSES, "classes-per-client": 20, "samples-per-client": 400},
    "ppfe-emnist-letters": {**PPFE, "augment": "none", **CLASSES, "classes-per-client": 10, "samples-per-client": 100},
    "ppfe-sent140": {
        **PPFE,
        "partition": "natural",
        "model": "lstm",
        "weights": "glove.6B.300d.txt",
        "frozen": "embedding",
        "batch-size": 2,
        "num-server-rounds": 50,
        "ppfe-stages": 4,
        "ppfe-stage-rounds": "10,20,10,10",
    },
}


Rows = dict[str, Config]
FEDDRM_LENGTHS: Config = {"num-server-rounds": 800, "average-rounds": 50, "local-steps": 10}
FEDAVG_TUNED: Config = {"method": "fedavg-ft", **FEDDRM_LENGTHS, "fedavg-ft-rounds": 100, "fedavg-ft-lr": 0.0}
FEDDRM_ROWS: Rows = {
    "Ditto": {"method": "ditto", "ditto-strength": 1.0, "local-steps": 5},
    "FedRep": {"method": "fedrep", "local-steps": 5},
    "FedBABU": {
        "method": "fedbabu",
        **FEDDRM_LENGTHS,
        "fedbabu-rounds": 200,
        "fedbabu-lr": 0.0,
        "fedbabu-tuned": "head",
    },
    "FedPAC": {"method": "fedpac", "local-steps": 5, "fedpac-head-lr": 0.0},
    "FedALA": {"method": "fedala", "local-steps": 10, "num-server-rounds": 800},
    "FedAS": {"method": "fedas", "local-steps": 10, "num-server-rounds": 800},
    "ConFREE": {"method": "confree", "local-steps": 5},
    "FedAvgFT": FEDAVG_TUNED,
    "FedProxFT": {"method": "fedprox-ft", **FEDDRM_LENGTHS, "fedprox-ft-rounds": 100, "fedprox-ft-lr": 0.0},
    "FedSAMFT": {"method": "fedsam-ft", **FEDDRM_LENGTHS, "fedsam-ft-rounds": 100, "fedsam-ft-lr": 0.0},
    "FedDRM": {"method": "feddrm", "num-server-rounds": 800, "average-rounds": 50},
}
LENET: Config = {"model": "lenet-gn", "linear-init": "kaiming"}
PPFE_ROWS: Rows = {
    "FedAvg+FT": {"method": "fedavg-ft", "fedavg-ft-epochs": 5},
    "FedBABU": {"method": "fedbabu", "fedbabu-epochs": 5},
    "FedRep": {"method": "fedrep", "fedrep-head-epochs": 10},
}
IFCA_OF_FEDFEW: Rows = {"IFCA": {"method": "ifca", "ifca-clusters": 3, "client-weights": "uniform"}}
APFL: Rows = {"APFL": {"method": "apfl", "apfl-adaptive": True}}
FEDAMP: Rows = {"FedAMP": {"method": "fedamp", "fedamp-distance": "norm"}}
IFCA: Rows = {"IFCA": {"method": "ifca", "client-weights": "uniform"}}
STATISTICS: Rows = {"FedFew": {"fedfew-personal-statistics": True}}
NO_STATISTICS: Rows = {"FedFew": {"fedfew-personal-statistics": False}}
CIFAR_COLUMNS = [f"{name}, M = {m}" for name in ("CIFAR-10", "CIFAR-100", "CIFAR-100, 2 classes") for m in (10, 20)]
ROW_SETTINGS: list[tuple[str, str, str | None, Rows]] = [
    ("feddrm", "table1", None, FEDDRM_ROWS),
    ("feddrm", "table2", None, FEDDRM_ROWS),
    ("feddrm", "table3", None, {"FedAvgFT": FEDAVG_TUNED}),
    ("feddrm", "table3-average", None, {"FedAvgFT": FEDAVG_TUNED}),
    *(("feddrm", "figure6", None, {level: LENET}) for level in ("none", "shallow", "mid", "deep")),
    ("feddrm", "figure12", None, {"data": LENET}),
    ("ppfe", "table1", None, PPFE_ROWS),
    ("ppfe", "table2", None, PPFE_ROWS),
    *(("ppfe", name, None, {"FedAvg+FT": PPFE_ROWS["FedAvg+FT"]}) for name in ("figure4a", "figure4b")),
    ("fedfew", "table1", None, {**IFCA_OF_FEDFEW, **APFL, **FEDAMP, **NO_STATISTICS}),
    ("fedfew", "table2", None, {**IFCA_OF_FEDFEW, **APFL, **FEDAMP, **STATISTICS}),
    ("fedfew", "table5", None, {**IFCA_OF_FEDFEW, **APFL}),
    *(("fedfew", "table5", variant, STATISTICS) for variant in ("Kvasir", "FedISIC")),
    *(("fedfew", "table5", variant, NO_STATISTICS) for variant in CIFAR_COLUMNS),
    *(("fedfew", "table6", "Kvasir", {f"K = {k}": {"fedfew-personal-statistics": True}}) for k in range(1, 6)),
    *(("fedacs", name, None, APFL) for name in ("figure1", "figure1-insufficient")),
    ("cwfedavg", "table6", None, FEDAMP),
    *(("cwfedavg", name, None, {**FEDAMP, **IFCA}) for name in ("table1", "table2", "figure6", "figure11", "figure12")),
]
"""Settings from the papers for some rows of their tables and figures, in a single column or in all (None)."""


def test_every_experiment_file_is_tested() -> None:
    assert {path.stem for path in FILES} == NUMBERS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_experiments_match_the_papers_numbers(name: str) -> None:
    method, dataset = name.split("-")[:2]
    named = read_settings({"experiment": name}).as_config()
    submitted = read_settings(with_experiment({"experiment": name}, "a test")).as_config()
    assert {**named, "experiment": ""} == submitted
    assert named["method"] == method
    assert str(named["dataset"]).startswith(dataset)
    actual = {key: named[key] for key in NUMBERS[name]}
    if "weights" in actual:  # compare the name of the file in data-dir
        actual["weights"] = Path(str(actual["weights"])).name
    assert actual == NUMBERS[name]


@pytest.mark.parametrize(("paper", "name"), dict.fromkeys((paper, name) for paper, name, _, _ in ROW_SETTINGS))
def test_table_rows_match_the_papers_settings(paper: str, name: str) -> None:
    source = item(paper, name)
    plan = replace(source, content={**source.content, "seeds": [0]}).plan("full", folder=Path("nowhere"))
    actual = {(cell.variant, cell.row): read_settings(cell.config).as_config() for cell in plan.cells}
    for variant, rows in ((variant, rows) for *table, variant, rows in ROW_SETTINGS if table == [paper, name]):
        for column in {column for column, _ in actual} if variant is None else {variant}:
            for row, settings in rows.items():
                assert {key: actual[column, row][key] for key in settings} == settings, (column, row)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_comment_names_paper_table_and_choices(path: Path) -> None:
    comment = " ".join(line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    assert comment.startswith(METHODS[path.stem.split("-")[0]].replace("CwFedAvg", "cwFedAvg"))
    assert "Table" in comment or "Fig." in comment
    assert "The paper does not state these values, so Posy chooses them: " in comment
    assert next(iter(with_experiment({"experiment": str(path)}, "a test"))) == "method"


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.startswith("ppfe")])
def test_ppfe_stages_fit_the_network(name: str) -> None:
    classes = {"cifar100": 100, "emnist": 26, "sent140": 2}.get(name.split("-")[1], 10)
    shape = (1, 28, 28) if "emnist" in name else (3, 32, 32)
    task = Task("image", shape, tuple(map(str, range(classes))))
    if "sent140" in name:
        task = Task("text", (64,), ("negative", "positive"), vocabulary=50)
    settings = read_settings({"experiment": name})
    stages = plan_stages(settings, architecture_for(settings.train.model, task))
    rounds = str(settings.method.stage_rounds)
    assert ",".join(str(stage.rounds) for stage in stages) == rounds
    assert [len(stage.personal) for stage in stages] == list(range(len(stages)))
    assert sum(stage.rounds for stage in stages) == settings.run.num_server_rounds


def test_a_tuned_table_has_a_relative_output_path() -> None:
    path = next(path for path in TABLES if path.stem == "tune-digits")
    content = plan_as_yaml(read_plan(path), {("", "fedprox"): {"fedprox-mu": 0.5}}, {})
    assert content["output"] == "benchmarks/results/tune-digits-tuned"
    (row,) = [row for row in content["runs"] if row["name"] == "fedprox"]
    assert row["settings"] == {"method": "fedprox", "fedprox-mu": 0.5}
    assert len(content["runs"]) == len(METHODS)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_have_distinct_rows_over_the_same_data(path: Path) -> None:
    plan = read_plan(path)
    seeds = {"flamby-heart": FLAMBY_SEEDS, "compare-flamby": FLAMBY_SEEDS, "compare-heart": {0, 1}}
    assert {cell.seed for cell in plan.cells} == seeds.get(path.stem, {0, 1, 2})
    assert plan.output.name == path.stem
    matter = {key for key, setting in declared().items() if setting.decides}
    for variant in {cell.variant for cell in plan.cells}:
        resolved = {cell.row: read_settings(cell.config) for cell in plan.cells if cell.variant == variant}
        methods = {settings.run.method for settings in resolved.values()}
        assert len(methods) == len(resolved)
        computed = [{key: v for key, v in row.as_config().items() if key in matter} for row in resolved.values()]
        assert all(first != second for first, second in itertools.combinations(computed, 2))  # no two rows are equal
        assert len({settings.data for settings in resolved.values()}) == 1  # the same data for every row


@pytest.mark.parametrize(
    ("name", "samples", "variants"), [("digits", 0, 3), ("mnist", 6000, 3), ("agnews", 4000, 3), ("cifar10", 12000, 1)]
)
def test_comparison_tables_contain_every_method(name: str, samples: int, variants: int) -> None:
    plan = read_plan(APP / f"benchmarks/tables/compare-{name}.yaml")
    settings = [read_settings(cell.config) for cell in plan.cells]
    assert {s.run.method for s in settings} == set(METHODS)
    assert len(settings) == 3 * variants * len(METHODS)
    assert len({s.train for s in settings}) == 1
    runs = {(s.data.dataset, s.data.max_samples, s.run.num_server_rounds, s.data.validation_fraction) for s in settings}
    assert runs == {(name, samples, 20, 0.2)}


def test_archived_fedfew_runs_fit_the_comparison_cells() -> None:
    """Runs older than the setting used the paper's steps, which are no longer the default. They still fit the cells."""
    table = next(path for path in TABLES if path.stem == "compare-digits")
    archived = archive.read(table.parents[1] / "results/compare-digits").values()
    run = next(line for line in archived if line["config"]["settings"]["method"] == "fedfew")
    settings = dict(run["config"]["settings"])
    assert settings.pop("fedfew-full-steps", False) is False
    cell = next(cell for cell in read_plan(table).cells if cell.name == run["name"])
    assert cell.fits(settings)
    full = replace(cell, config={**cell.config, "fedfew-full-steps": True})
    assert not full.fits(settings)
