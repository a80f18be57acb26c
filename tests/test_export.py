"""Export of stored models: the files return what `posy predict` returns, for each network, kind of sample and task."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors
import torch
from safetensors.torch import load_file

import posy
from posy.client_app.export import files
from posy.client_app.export.check import ExportError, compare
from posy.client_app.export.files import export_model
from posy.client_app.export.graph import EncodedTable, codes_of
from posy.client_app.export.samples import random_check
from posy.client_app.predictors import Member, Predictor
from posy.client_app.schema import input_specs, model_card, output_specs
from posy.client_app.stored import ClientModel
from posy.commands import cli
from posy.data.encoding import EncodedColumn, Encoder
from posy.data.inputs import Preprocessing
from posy.data.task import Task
from posy.metrics import CLASSES, LABELS, VALUES
from posy.models.architecture import Architecture, architecture_for
from posy.models.catalogue import MODELS
from posy.server_app.app import run
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]
ROOT = Path(__file__).resolve().parent.parent
LARGE = {"resnet18-gn", "resnet18-bn"}
FORMATS = ("onnx", "torchscript")
every_format = pytest.mark.parametrize("file_format", FORMATS)

NETWORKS = '''
import torch
from torch import nn


class Recurrent(nn.Module):
    """A bidirectional nn.LSTM over a series, BatchNorm and dropout, and a check of the shape in Python."""

    def __init__(self, task):
        super().__init__()
        self.lstm = nn.LSTM(task.input_shape[1], 6, batch_first=True, bidirectional=True)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(12, task.num_classes)

    def forward(self, x):
        h, _ = self.lstm(x)
        if h.shape[2] != 12:
            raise ValueError(h.shape)
        return self.out(self.dropout(self.norm(h[:, -1].reshape(x.shape[0], 12))))


class Sized(nn.Module):
    """The trace of len is a constant, but an exported program has any size."""

    def __init__(self, task):
        super().__init__()
        self.hidden = nn.Linear(task.input_shape[0], 6)
        self.out = nn.Linear(3, task.num_classes)

    def forward(self, x):
        return self.out(self.hidden(x).reshape(len(x), 3, 2).amax(2))


class Bag(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.bag = nn.EmbeddingBag(task.vocabulary, 7, mode="mean")
        self.out = nn.Linear(7, task.num_classes)

    def forward(self, x):
        return self.out(self.bag(x))


class Branches(nn.Module):
    """The graph depends on the values of the samples, which no exporter supports."""

    def __init__(self, task):
        super().__init__()
        self.hidden = nn.Linear(task.input_shape[0], 5)
        self.out = nn.Linear(5, task.num_classes)

    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.out(self.hidden(x))


def recurrent(task):
    return Recurrent(task)


def sized(task):
    return Sized(task)


def bag(task):
    return Bag(task)


def branches(task):
    return Branches(task)
'''


def task_for(kind: str, target: str = CLASSES, classes: int = 3) -> Task:
    """Return a small task."""
    shapes = {"image": (3, 20, 16), "features": (5,), "series": (9, 2), "text": (12,)}
    values = ((100.0, -3.0, 0.5)[:classes], (20.0, 0.1, 4.0)[:classes]) if target == VALUES else ((), ())
    names = ("cat", "dog", "other")[:classes]
    return Task(kind, shapes[kind], names, 30 if kind == "text" else 0, target, *values)


def preprocessing_for(task: Task, sample_kind: str = "", **fields: Any) -> Preprocessing:
    """Return the preprocessing of a task, with a different scale for each feature or channel."""
    if task.kind == "text":
        return Preprocessing(task, sample_kind or "tokens", np.zeros(0), np.ones(0), **fields)
    size = task.input_shape[0] if task.kind == "image" else task.input_shape[-1]
    dtype = np.float32 if task.kind == "image" else np.float64
    mean = np.linspace(0.3, 0.6, size, dtype=dtype) if task.kind == "image" else np.linspace(-5, 1e6, size)
    std = np.linspace(0.2, 0.4, size, dtype=dtype) if task.kind == "image" else np.geomspace(1e-2, 1e3, size)
    return Preprocessing(task, sample_kind or task.kind, mean, std, **fields)


def stored_model(
    preprocessing: Preprocessing,
    model: str = "auto",
    method: str = "fedavg",
    coefficients: tuple[float, ...] = (1.0,),
    ranks: tuple[tuple[str, int], ...] = (),
    **settings: Any,
) -> ClientModel:
    """Return a model with random weights and running statistics."""
    config = read_settings({"method": method, "model": model, "num-clients": 4, **settings})
    plain: Architecture = architecture_for(config.train.model, preprocessing.task)
    network = config.method.network(plain, 4)
    rng = np.random.default_rng(5)
    members = []
    for seed, coefficient in enumerate(coefficients):
        reduced = replace(network, ranks=ranks if seed else ())
        flat = reduced.initial(seed) + 0.1 * rng.random(reduced.layout.size).astype(np.float32)
        members.append(Member(torch.from_numpy(flat), reduced, coefficient))
    about = {"client": "2", "round": "7", "site": "Kraków / A", "point": "served", "chosen": ""}
    predictor = Predictor(members, logarithms=config.method.sums_logarithms)
    return ClientModel(predictor, preprocessing, config, about)


def export(model: ClientModel, folder: Path, file_format: str) -> Path:
    path = folder / f"model{files.SUFFIXES[file_format]}"
    assert export_model(model, model_card(model, "my-run", {"accuracy": 0.5}), path, file_format) <= 1e-5
    return path


def assert_same_predictions(model: ClientModel, path: Path, file_format: str) -> None:
    """Compare a file's outputs for new samples with `predict_all`."""
    target = model.preprocessing.task.target
    check = random_check(model, seed=11)
    predictions = model.predict_all(check.samples)
    rows = [list((p if target == VALUES else p.probabilities).values()) for p in predictions]
    scale = np.array(model.preprocessing.task.value_std or 1.0)
    for count in (8, 1):
        inputs = check.part(slice(count)).inputs
        if file_format == "onnx":
            session = onnxruntime.InferenceSession(path)
            outputs, *classes = session.run(None, inputs)
            if target == CLASSES:
                assert classes[0].tolist() == [p.label for p in predictions[:count]]
        else:
            assert len(inputs) == 1
            outputs = torch.jit.load(path)(*map(torch.from_numpy, inputs.values())).numpy()
        assert np.abs(outputs - np.array(rows[:count])).max() <= 1e-5 * scale.max()
        assert outputs.std() > 0


@every_format
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in MODELS]
)
def test_every_network_can_be_exported(name: str, file_format: str, tmp_path: Path) -> None:
    for kind in MODELS[name].kinds:
        model = stored_model(preprocessing_for(task_for(kind, classes=MODELS[name].num_classes or 3)), name)
        assert_same_predictions(model, export(model, tmp_path, file_format), file_format)


@every_format
@pytest.mark.parametrize("target", [CLASSES, LABELS, VALUES])
@pytest.mark.parametrize("kind", ["features", "series"])
def test_every_target_can_be_exported(kind: str, target: str, file_format: str, tmp_path: Path) -> None:
    model = stored_model(preprocessing_for(task_for(kind, target)))
    path = export(model, tmp_path, file_format)
    assert_same_predictions(model, path, file_format)


@every_format
@pytest.mark.parametrize(
    ("method", "network"),
    [("feddrm", "mlp"), ("feddrm", "cnn"), ("fedcp", "mlp"), ("fednh", "mlp"), ("ppfe", "cnn-3fc-wide")],
)
def test_networks_of_methods_can_be_exported(method: str, network: str, file_format: str, tmp_path: Path) -> None:
    """Two branches, a conditional policy, a cosine head, and a network with dropout."""
    model = stored_model(preprocessing_for(task_for("image")), network, method)
    assert_same_predictions(model, export(model, tmp_path, file_format), file_format)


@every_format
@pytest.mark.parametrize("target", [CLASSES, LABELS, VALUES])
@pytest.mark.parametrize("outputs", ["probabilities", "logarithms"])
@pytest.mark.parametrize("coefficients", [(0.7, -0.2, 1.3), (0.0, 0.0, 0.0)])
def test_ensembles_can_be_exported(
    coefficients: tuple[float, ...], outputs: str, target: str, file_format: str, tmp_path: Path
) -> None:
    """Stages after the first have low-rank layers, and coefficients may be negative."""
    outputs = {"logarithms": "log-probabilities"}.get(outputs, outputs)
    settings = {"ppfe-outputs": outputs} if target != VALUES else {}
    ranks = (("fc1", 2), ("fc2", 3))
    model = stored_model(
        preprocessing_for(task_for("features", target)), "mlp", "ppfe", coefficients, ranks, **settings
    )
    assert_same_predictions(model, export(model, tmp_path, file_format), file_format)


@every_format
@pytest.mark.parametrize("sample_kind", ["image", "image-float"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_raw_pixels(channels: int, sample_kind: str, file_format: str, tmp_path: Path) -> None:
    task = replace(task_for("image"), input_shape=(channels, 20, 16))
    model = stored_model(preprocessing_for(task, sample_kind), "cnn")
    (spec,) = input_specs(model.preprocessing)
    assert (spec.datatype, spec.shape) == ("UINT8" if sample_kind == "image" else "FP32", (-1, channels, 20, 16))
    assert_same_predictions(model, export(model, tmp_path, file_format), file_format)


@every_format
@pytest.mark.parametrize("words", [(), ("good", "bad", "don't")])
def test_texts_are_tokens(words: tuple[str, ...], file_format: str, tmp_path: Path) -> None:
    model = stored_model(preprocessing_for(task_for("text"), "text", words=words), "lstm")
    path = export(model, tmp_path, file_format)
    assert_same_predictions(model, path, file_format)
    (spec,) = input_specs(model.preprocessing)
    assert ("position in preprocessing.words" if words else "crc32(word in UTF-8) mod 28") in spec.description


def test_tokens_may_be_empty_or_have_gaps(tmp_path: Path) -> None:
    """The LSTM skips padding, also between words; a text of padding has the initial state."""
    model = stored_model(preprocessing_for(task_for("text")), "lstm")
    tokens = np.random.default_rng(0).integers(0, 3, (6, 12))
    tokens[2] = 0
    path = export(model, tmp_path, "onnx")
    outputs = onnxruntime.InferenceSession(path).run(None, {"tokens": tokens})[0]
    with torch.no_grad():
        assert np.abs(outputs - model(torch.from_numpy(tokens)).numpy()).max() <= 1e-5


@pytest.mark.parametrize("target", [CLASSES, VALUES])
def test_a_file_with_different_outputs_is_refused(target: str) -> None:
    model = stored_model(preprocessing_for(task_for("features", target)))
    scale = np.array(model.preprocessing.task.value_std or 1.0)

    @torch.no_grad()
    def outputs(inputs: Mapping[str, np.ndarray], difference: float = 0.0) -> np.ndarray:
        return model(model.prepare(list(inputs["features"]))).numpy() + difference * scale

    assert compare(model, outputs) < 1e-6  # the rounding depends on the size of a batch
    assert 1e-7 < compare(model, partial(outputs, difference=5e-6)) < 1e-5
    with pytest.raises(ExportError, match=r"in a batch of 8 random samples, it returns .* where the stored model"):
        compare(model, partial(outputs, difference=1e-3))
    with pytest.raises(ExportError, match=r"for 8 samples, its output has the shape \(7, 3\)"):
        compare(model, lambda inputs: outputs(inputs)[:7])


# -- tables with an encoder --------------------------------------------------------------------------------

COLUMNS = (
    EncodedColumn("age", 54.0, imputes=True),
    EncodedColumn("chest pain", None, True, ("1", "2", "typisch"), missing=True, other=True),
    EncodedColumn("id"),  # not used
    EncodedColumn("probabilities", 240.5, imputes=True, missing=True),
    EncodedColumn("thal", None, True, ("normal",)),
    EncodedColumn("class", None, True, ("a", "b"), other=True),
)


def table_model(columns: tuple[EncodedColumn, ...], target: str = CLASSES) -> ClientModel:
    encoder = Encoder(columns)
    task = replace(task_for("features", target), input_shape=(len(encoder.names),))
    mean, std = np.zeros(len(encoder.names)), np.ones(len(encoder.names))
    mean[encoder.is_number] = [column.mean for column in columns if column.mean is not None]
    std[encoder.is_number] = 7.5
    names = tuple(column.name for column in columns)
    return stored_model(Preprocessing(task, "features", mean, std, (), names, encoder), "mlp")


NUMERIC = tuple(column for column in COLUMNS if column.mean is not None)
CATEGORICAL = tuple(column for column in COLUMNS if column.mean is None)


@pytest.mark.parametrize("columns", [COLUMNS, NUMERIC, CATEGORICAL])
def test_tables_have_one_onnx_input_for_each_column(columns: tuple[EncodedColumn, ...], tmp_path: Path) -> None:
    """A column may have the name of an output; unused columns are not inputs."""
    model = table_model(columns)
    path = export(model, tmp_path, "onnx")
    assert_same_predictions(model, path, "onnx")
    session = onnxruntime.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == [column.name for column in columns if column.is_used]
    names = {column.name for column in columns}
    expected = [name + "_" * (name in names) for name in ("probabilities", "class")]
    assert [o.name for o in session.get_outputs()] == expected == [s.name for s in output_specs(model.preprocessing)]


def test_cells_of_tables_have_the_spellings_that_predict_accepts(tmp_path: Path) -> None:
    model = table_model(COLUMNS)
    session = onnxruntime.InferenceSession(export(model, tmp_path, "onnx"))
    cells = ["1", "1.0", "typisch", "", "NA", "n/A", "?", "never seen"]
    rows = [[50.5, cell, None, None, "normal", "b"] for cell in cells]
    inputs: dict[str, np.ndarray] = {"age": np.full(8, 50.5), "chest pain": np.array(cells, object)}
    inputs |= {"probabilities": np.full(8, np.nan), "thal": np.full(8, "normal", object)}
    outputs = session.run(None, inputs | {"class": np.full(8, "b", object)})[0]
    expected = [list(p.probabilities.values()) for p in model.predict_all(rows)]
    assert np.abs(outputs - np.array(expected)).max() <= 1e-5
    assert len({tuple(row) for row in outputs.round(4).tolist()}) == 4


@pytest.mark.parametrize("columns", [COLUMNS, NUMERIC, CATEGORICAL])
def test_tables_are_numbers_and_strings_in_torchscript(columns: tuple[EncodedColumn, ...], tmp_path: Path) -> None:
    model = table_model(columns, VALUES)
    path = export(model, tmp_path, "torchscript")
    extra = {"posy.json": ""}
    module = torch.jit.load(path, _extra_files=extra)
    card = json.loads(extra["posy.json"])
    check = random_check(model, seed=3)
    arguments: list[Any] = []
    if names := card["arguments"]["numbers"]:
        arguments.append(torch.from_numpy(np.stack([check.inputs[name] for name in names], axis=1)))
    if names := card["arguments"]["categories"]:
        arguments.append([check.inputs[name].tolist() for name in names])
    assert card["call"] == f"model({', '.join(name for name, part in card['arguments'].items() if part)})"
    expected = [list(values.values()) for values in model.predict_all(check.samples)]
    assert np.allclose(module(*arguments).numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("missing", ["number", "category"])
def test_a_missing_value_in_a_required_column_makes_the_output_nan(missing: str) -> None:
    """`posy predict` refuses such a row, but a graph cannot raise an error."""
    table = EncodedTable(Encoder((EncodedColumn("a", 1.0), EncodedColumn("b", categories=("x", "y")))))
    number, code = (math.nan, 0) if missing == "number" else (2.0, -1)
    rows = table(torch.tensor([[number], [2.0]], dtype=torch.float64), torch.tensor([[code], [1]]))
    assert rows[0].isnan().any() and rows[1].tolist() == [2, 0, 1]
    assert codes_of(EncodedColumn("b", categories=("x", "2")))["2.0"] == 1


# -- custom networks ---------------------------------------------------------------------------------------


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    (tmp_path / "export_nets.py").write_text(NETWORKS)
    return tmp_path / "export_nets.py"


@every_format
@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param("recurrent", "series", marks=pytest.mark.slow), ("bag", "text")]
)
def test_custom_networks_can_be_exported(
    name: str, kind: str, file_format: str, networks: Path, tmp_path: Path
) -> None:
    model = stored_model(preprocessing_for(task_for(kind)), f"{networks}:{name}")
    path = export(model, tmp_path, file_format)
    assert_same_predictions(model, path, file_format)
    assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.slow
def test_a_network_that_uses_len_can_be_exported_to_onnx(networks: Path, tmp_path: Path) -> None:
    """PyTorch's newer exporter records the network."""
    model = stored_model(preprocessing_for(task_for("features")), f"{networks}:sized")
    path = export(model, tmp_path, "onnx")
    assert_same_predictions(model, path, "onnx")
    assert str(tmp_path).encode() not in path.read_bytes()
    with pytest.raises(ExportError, match=r"export_nets.py:sized.*x\.shape\[0\] instead of len"):
        export(model, tmp_path, "torchscript")


@pytest.mark.slow
@every_format
def test_a_torchvision_network_can_be_exported(file_format: str, tmp_path: Path) -> None:
    task = replace(task_for("image"), input_shape=(3, 64, 64))
    model = stored_model(preprocessing_for(task), "torchvision:shufflenet_v2_x0_5")
    assert_same_predictions(model, export(model, tmp_path, file_format), file_format)


@every_format
def test_a_network_that_cannot_be_exported_is_an_error_without_a_file(
    file_format: str, networks: Path, tmp_path: Path
) -> None:
    model = stored_model(preprocessing_for(task_for("features")), f"{networks}:branches")
    before = set(tmp_path.iterdir())
    message = rf"export_nets.py:branches.*--format {file_format}: export_nets.py, line .* reads the value"
    with pytest.raises(
        ExportError, match=rf"{message}.*no file was written.* or --format safetensors.*values"
    ) as error:
        export(model, tmp_path, file_format)
    assert "\n" not in str(error.value)
    assert set(tmp_path.iterdir()) == before


def test_safetensors_have_the_names_of_the_custom_module(networks: Path, tmp_path: Path) -> None:
    """The file loads into the user's module, without Posy, and gives the same logits."""
    model = stored_model(preprocessing_for(task_for("series")), f"{networks}:recurrent")
    path = export(model, tmp_path, "safetensors")
    spaces: dict[str, Any] = {}
    exec(NETWORKS, spaces)
    module = spaces["recurrent"](model.preprocessing.task).eval()
    module.load_state_dict(load_file(path))
    x = model.prepare(random_check(model).samples)
    with torch.no_grad():
        assert torch.allclose(module(x).softmax(-1), model(x), atol=1e-6)


# -- the card and the command ------------------------------------------------------------------------------


def card_in(path: Path) -> dict[str, Any]:
    """Return the model card in a file."""
    if path.suffix == ".onnx":
        text = {prop.key: prop.value for prop in onnx.load(path).metadata_props}["posy"]
    elif path.suffix == ".pt":
        extra = {"posy.json": ""}
        torch.jit.load(path, _extra_files=extra)
        text = extra["posy.json"]
    else:
        with safetensors.safe_open(path, "pt") as file:
            text = file.metadata()["posy"]
    card: dict[str, Any] = json.loads(text)
    return card


@pytest.fixture(scope="module")
def hearts(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A run on the four hospitals, whose tables have missing values and categories."""
    folder = tmp_path_factory.mktemp("runs")
    return posy.run(
        method="ppfe", dataset="heart-disease", num_server_rounds=4, ppfe_stages=2, model="mlp",
        output_dir=str(folder), run_name="hearts",
    )  # fmt: skip


@pytest.mark.parametrize("file_format", [*FORMATS, "safetensors"])
def test_the_command_exports_a_run(
    file_format: str,
    hearts: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    site = hearts.names[1]
    assert cli.main(["export", str(hearts.path), site, "--format", file_format]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name == f"hearts-{site}{files.SUFFIXES[file_format]}"
    assert capsys.readouterr().out.startswith(f"{path.name}: ")
    card = card_in(path)
    model = hearts.predictor(1)
    assert (card["run"], card["method"], card["client"], card["site"]) == ("hearts", "ppfe", 1, site)
    assert (card["point"], card["round"], card["members"]) == (model.point, model.round, 2)
    assert card["classes"] == list(model.class_names)
    row = hearts.clients[(hearts.clients["partition"] == 1) & (hearts.clients["round"] == model.round)].iloc[0]
    assert card["scores"]["accuracy"] == pytest.approx(row[f"{model.point}_accuracy"])
    assert {"auroc", "balanced-accuracy"} <= card["scores"].keys()
    assert Preprocessing.from_json(json.dumps(card["preprocessing"])).to_json() == model.preprocessing.to_json()
    content = path.read_bytes()
    for word in (str(ROOT), str(hearts.path.parent), str(Path.home()), "site-packages"):
        assert word.encode() not in content


def test_an_exported_table_takes_the_rows_of_the_table(hearts: Record, tmp_path: Path) -> None:
    """Read the hospital's table with pandas, and compare with `posy predict` on the same rows."""
    import pandas as pd

    assert cli.main(["export", str(hearts.path), "0", "-o", str(tmp_path / "m.onnx")]) == 0
    header, *rows = map(json.loads, (ROOT / "data/heart_disease/va.jsonl").read_text().splitlines())
    table = pd.DataFrame(rows, columns=header)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    inputs = {
        entry.name: table[entry.name].fillna("").astype(str).to_numpy(object)
        if entry.type == "tensor(string)"
        else pd.to_numeric(table[entry.name], errors="coerce").to_numpy(np.float64)
        for entry in session.get_inputs()
    }
    probabilities, classes = session.run(None, inputs)
    model = hearts.predictor(0)
    expected = model.predict_all([dict(zip(header, row, strict=True)) for row in rows])
    assert np.abs(probabilities - [list(p.probabilities.values()) for p in expected]).max() <= 1e-5
    assert classes.tolist() == [p.label for p in expected]


def test_torchscript_loads_in_a_process_without_posy(hearts: Record, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    assert cli.main(["export", str(hearts.path), "0", "--format", "torchscript", "-o", str(path)]) == 0
    card, model = card_in(path), hearts.predictor(0)
    check = random_check(model, seed=2)
    numbers = [check.inputs[name].tolist() for name in card["arguments"]["numbers"]]
    strings = [check.inputs[name].tolist() for name in card["arguments"]["categories"]]
    code = (
        "import json, sys, torch\n"
        f"model = torch.jit.load({str(path)!r})\n"
        "numbers, strings = json.load(sys.stdin)\n"
        "outputs = model(torch.tensor(numbers, dtype=torch.float64).T, strings)\n"
        "assert 'posy' not in sys.modules\n"
        "print(json.dumps(outputs.tolist()))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=json.dumps([numbers, strings]), env=environment, cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = [list(p.probabilities.values()) for p in model.predict_all(check.samples)]
    assert np.abs(np.array(json.loads(done.stdout)) - np.array(expected)).max() <= 1e-5


def test_both_points_can_be_exported(make_config: MakeConfig, tmp_path: Path) -> None:
    path = run(None, make_config("fedavg", model="mlp")).directory.path
    for point in ("served", "local"):
        assert cli.main(["export", str(path), "0", "--point", point, "-o", str(tmp_path / f"{point}.onnx")]) == 0
        assert card_in(tmp_path / f"{point}.onnx")["point"] == point


def test_a_folder_of_a_node_has_no_scores(make_config: MakeConfig, tmp_path: Path) -> None:
    record = run(None, make_config("fedavg", model="mlp")).record()
    (tmp_path / "run-on-node").mkdir()
    (record.models / "client-0.safetensors").rename(tmp_path / "run-on-node" / "client-0.safetensors")
    assert cli.main(["export", str(tmp_path), "0", "--format", "safetensors", "-o", str(tmp_path / "x")]) == 0
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        card = json.loads(file.metadata()["posy"])
    assert (card["scores"], card["run"]) == ({}, "run-on-node")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "0", "--format", "tflite"], "--format tflite: it must be onnx, torchscript, safetensors"),
        (["RUN", "9"], "client '9': "),
        (["gone", "0"], "no run in"),
        (["RUN", "0", "-o", "gone/x.onnx"], "gone/x.onnx: the folder gone does not exist"),
    ],
)
def test_export_reports_errors(
    words: list[str], message: str, hearts: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", *(str(hearts.path) if word == "RUN" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_package_is_an_error_with_the_command(
    hearts: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PACKAGES", ("onnx", "not_installed"))
    with pytest.raises(
        SettingsError, match=r"needs not_installed, which is not installed.*pip install 'posy\[export\]'"
    ):
        export_model(hearts.predictor(0), {}, tmp_path / "x.onnx", "onnx")
