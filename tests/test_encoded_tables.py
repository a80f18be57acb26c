"""Tables with missing values and categories: reading, the encoder, sites that agree on it, and predictions on raw rows.

scikit-learn and pandas compute the expected columns from the raw tables.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from nodes import NodeGrid
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression
from sklearn.metrics import root_mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import posy
from benchmarks.local_federation import MOST_SECONDS, Deployment
from posy.client_app.policy import violations
from posy.client_app.stored import ClientModel
from posy.client_app.workspace import Workspace
from posy.commands import cli
from posy.commands.check_site import check_site
from posy.data.agreement import Description, agreed, is_complete
from posy.data.datasets import load_clients, load_dataset
from posy.data.encoding import Encoder
from posy.data.errors import DataError
from posy.data.labels import LabelRule
from posy.data.policy import Policy
from posy.data.readers.published import HOSPITALS
from posy.data.settings import DataSettings
from posy.data.sites import describe_site, load_site, read_site, site_split
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.registry import from_json, read_settings

Tables = dict[str, pd.DataFrame]
ROOT = Path(__file__).resolve().parent.parent
CATEGORIES = ["cp", "restecg", "slope", "thal"]
NUMBERS = ["age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca"]
POLICY = Policy(min_rows=10)


def raw_tables() -> dict[str, pd.DataFrame]:
    """Return the hospitals' tables as strings."""
    tables = {}
    for file in HOSPITALS:
        header, *rows = map(json.loads, (ROOT / f"data/heart_disease/{file}.jsonl").read_text().splitlines())
        tables[file] = pd.DataFrame(rows, columns=header)
    return tables


def numeric(table: pd.DataFrame) -> pd.DataFrame:
    return table.replace({"?": None, "": None}).astype(float)


def reference(train: pd.DataFrame, rows: pd.DataFrame) -> np.ndarray:
    """Return encoded and standardised rows, with transformers that scikit-learn fits on the training rows."""
    frequent = [
        [code for code, count in train[name].value_counts().sort_index().items() if count >= 10] for name in CATEGORIES
    ]
    numbers = make_pipeline(SimpleImputer(strategy="mean"), StandardScaler())
    encoded = ColumnTransformer(
        [("n", numbers, NUMBERS), ("c", OneHotEncoder(categories=frequent, handle_unknown="ignore"), CATEGORIES)],
        sparse_threshold=0,
    )
    with pd.option_context("mode.copy_on_write", True):
        return np.asarray(encoded.fit(train).transform(rows))


def split_columns(names: tuple[str, ...], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of numbers and of categories in the reference's order."""
    numbers = [names.index(name) for name in NUMBERS]
    categories = [i for column in CATEGORIES for i, name in enumerate(names) if name.startswith(f"{column}=")]
    return values[:, numbers], values[:, categories]


def assert_encoded(names: tuple[str, ...], values: np.ndarray, train: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Compare normalised samples with the reference, and indicator columns with the missing values."""
    expected = reference(train, rows)
    numbers, categories = split_columns(names, values)
    np.testing.assert_allclose(numbers, expected[:, : len(NUMBERS)], rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(categories, expected[:, len(NUMBERS) :])
    for column in names:
        if column.endswith(" missing"):
            np.testing.assert_array_equal(values[:, names.index(column)], rows[column.removesuffix(" missing")].isna())


# -- in process ------------------------------------------------------------------------------------------


def test_raw_hospitals_equal_scikit_learns_encoding() -> None:
    workspace = Workspace(read_settings({"method": "fedavg", "dataset": "heart-disease", "device": "cpu"}))
    data, part = workspace.dataset, workspace.partition
    table = numeric(pd.concat(raw_tables().values(), ignore_index=True))
    table[["chol", "trestbps"]] = table[["chol", "trestbps"]].replace(0, np.nan)
    assert part.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach") and len(data) == 920
    np.testing.assert_array_equal(data.y, table["num"] > 0)
    train = table.iloc[np.concatenate(part.train)]
    indicators = {name for name in data.columns if name.endswith(" missing")}
    assert indicators == {f"{name} missing" for name in table if train[name].isna().sum() >= 10}
    for client in range(4):
        values = workspace.client_data(client).x_test.numpy()
        assert_encoded(data.columns, values, train, table.iloc[part.test[client]])


def test_scaling_per_client_applies_after_imputation() -> None:
    config = {"method": "fedavg", "dataset": "heart-disease", "device": "cpu", "scaling": "client"}
    workspace = Workspace(read_settings(config))
    names = workspace.dataset.columns
    for client in range(4):
        x = workspace.client_data(client).x_train.numpy()
        numbers, categories = split_columns(names, x)
        np.testing.assert_allclose(numbers.mean(0), 0, atol=1e-4)
        assert set(np.unique(categories)) <= {0, 1}
        assert set(numbers.std(0).round(3)) <= {0, 1}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path, **settings: Any) -> Any:
    data, part = load_clients(DataSettings(dataset=str(path), partition="iid", num_clients=1, **settings), path, 0)
    return data, part


ROWS = [("1.5", "a", "0"), ("2.5", "b", "1"), ("", "a", "1"), ("4", "", "0")] * 8


@pytest.mark.parametrize("form", ["csv", "semicolon", "tab", "bar", "parquet", "dictionary"])
def test_forms_of_a_table_give_the_same_samples(form: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS, columns=["dose", "kind", "label"])
    if form in ("parquet", "dictionary"):
        frame = frame.replace("", None).astype({"dose": float, "label": int})
        frame = frame.astype({"kind": "category"}) if form == "dictionary" else frame
        frame.to_parquet(path := tmp_path / "t.parquet")
    else:
        sign = {"csv": ",", "semicolon": ";", "tab": "\t", "bar": "|"}[form]
        commas = frame.assign(dose=frame["dose"].str.replace(".", ",")) if form != "csv" else frame
        commas.to_csv(path := tmp_path / "t.csv", sep=sign, index=False)
    data, part = load(path, missing="impute", min_category_rows=3)
    assert data.columns == ("dose", "dose missing", "kind=a", "kind=b", "kind missing")
    doses = np.array([np.nan if dose == "" else float(dose) for dose, *_ in ROWS])
    mean = np.nanmean(doses[part.train[0]])
    np.testing.assert_allclose(data.x[:, 0], np.where(np.isnan(doses), mean, doses), rtol=1e-15)
    np.testing.assert_array_equal(data.x[:, 1], np.isnan(doses))
    np.testing.assert_array_equal(data.x[:, 2:], [[k == "a", k == "b", k == ""] for _, k, _ in ROWS])
    np.testing.assert_array_equal(data.std[1:], 1)
    np.testing.assert_array_equal(data.mean[1:], 0)
    np.testing.assert_allclose(data.std[0], np.where(np.isnan(doses), mean, doses)[part.train[0]].std(), rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("a;b;label\n1,234;x;0\n2,500;y;1\n", {}, "column a: '1,234' is ambiguous.*set decimal=comma"),
        ("a;b;label\n1,5;1.5;0\n2;2;1\n", {}, "column a has decimal commas, and column b has decimal points"),
        ("a;b;label\n1,5;2;0\n2,5;x;1\n3,5;3;0\n", {}, "row 3, column b: 'x'"),
        ("a,b,label\n1,2,0\n?,3,1\n", {}, "row 3, column a: '\\?' is a missing value; set missing=impute"),
        ("a,b,label\nx,2,0\n,3,1\n", {}, "row 3, column a: '' is a missing value"),
        ("a,b,label\n1,2,0\nx,3,1\n", {"missing": "impute"}, "row 3, column a: 'x'.*categories"),
        ("a,b,label\n1,2,0\n2,3,?\n", {"label_column": "label > 0"}, "row 3, column label: the label is missing"),
        ("a,b,label\n1,2,0\n2,3,x\n", {"label_column": "label > 0"}, "row 3, column label: 'x'.*numbers"),
        ("a,b,label\n1,2,0\n2,3,1\n", {"categories": "label"}, "categories = 'label': this is not an input column"),
    ],
)
def test_unusable_tables_name_the_cell(text: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path / "t.csv", text), **settings)


@pytest.mark.parametrize(
    ("ward", "partition", "names_the_setting"),
    [
        ("ward", "natural", True),
        ("ward", "iid", False),
        ("group", "natural", False),  # this table has groups, and its column "other" is refused
    ],
)
def test_a_refused_column_may_contain_the_groups(
    ward: str, partition: str, names_the_setting: bool, tmp_path: Path
) -> None:
    rows = ["3,1,5,0", "A,2,5,1", "3,3,6,0", "A,x,7,1", *["3,1,5,0", "A,2,6,1"] * 2]
    path = write(tmp_path / "t.csv", "\n".join([f"{ward},other,age,label", *rows]))
    with pytest.raises(DataError) as caught:
        load_dataset(DataSettings(dataset=str(path), partition=partition, num_clients=2), path, 0)
    assert caught.value.column == ("ward" if ward == "ward" else "other")
    assert ("group-column" in str(caught.value)) == names_the_setting


@pytest.mark.parametrize(
    ("dataset", "key"),
    [
        (dataset, key)
        for dataset, unused in {
            "a.npz": ["missing", "min_category_rows", "categories", "separator", "decimal"],
            "images.npz": ["missing", "categories", "scaling"],
            "a.parquet": ["separator", "decimal"],
            "texts.csv": ["missing", "min_category_rows", "scaling"],
            "diabetes": ["categories"],
            "heart-disease": ["categories"],
        }.items()
        for key in unused
    ],
)
def test_settings_of_tables_without_effect_are_refused(dataset: str, key: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "missing": "impute", "min_category_rows": 3, "categories": "s7", "separator": "tab", "decimal": "comma",
        "scaling": "client",
    }  # fmt: skip
    y, x = np.arange(12) % 2, np.arange(24.0).reshape(12, 2)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    np.savez(tmp_path / "images.npz", x_train=np.zeros((12, 8, 8), np.uint8), y_train=y)
    pd.DataFrame({"a": y, "b": y, "label": y}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "texts.csv").write_text("text,label\n" + "".join(f"word{i},{i % 2}\n" for i in range(12)))
    with pytest.raises(SettingsError, match=f"^{key.replace('_', '-')} = "):
        load_dataset(DataSettings(dataset=dataset, **{key: values[key]}), tmp_path, 0)


def test_settings_resolve_ambiguous_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a;b|c;label\n1,234;1|2;0\n2,500;3|4;1\n")
    data = load_dataset(
        DataSettings(dataset=str(path), separator="semicolon", decimal="comma", input_columns="a"), path, 0
    )
    assert data.x[:, 0].tolist() == pytest.approx([1.234, 2.5])


@pytest.mark.parametrize(
    ("sign", "expected"),
    [(">", [0, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0]), ("<=", [1, 1, 0]), ("==", [0, 1, 0]), ("!=", [1, 0, 1])],
)
def test_label_rules_give_the_classes_0_and_1(sign: str, expected: list[int], tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "num,a,num > 9\n1.0,1,7\n2,2,7\n3e0,3,8\n")
    data = load_dataset(DataSettings(dataset=str(path), label_column=f"num {sign} 2"), path, 0)
    assert data.task.class_names == ("0", "1") and data.y.tolist() == expected and data.columns == ("a", "num > 9")
    named = load_dataset(DataSettings(dataset=str(path), label_column="num > 9"), path, 0)  # the name of a column
    assert named.task.class_names == ("7", "8")
    assert LabelRule.parse("num") is None and LabelRule.parse("num > x") is None


def test_constant_and_identifying_columns_are_reported(tmp_path: Path) -> None:
    rows = "".join(f"p{i},{1000 + 7 * i},5,{i % 7},{'xyz'[i % 3]},{i % 2}\n" for i in range(80))
    data, _ = load(write(tmp_path / "t.csv", "patient,number,unit,dose,kind,label\n" + rows))
    notes = " ".join(data.notes)
    assert "columns with the same value in all rows: unit" in notes
    assert "may be identifiers, because few of their values repeat: patient, number" in notes
    assert "not used: patient" in notes
    assert data.columns == ("number", "unit", "dose", "kind=x", "kind=y", "kind=z")


def test_rare_categories_share_a_column(tmp_path: Path) -> None:
    kinds = ["a"] * 30 + ["b"] * 6 + ["c"] * 6 + [""] * 3
    rows = "".join(f"{i % 9},{kind},{i % 2}\n" for i, kind in enumerate(kinds))
    path = write(tmp_path / "t.csv", "dose,kind,label\n" + rows)
    data, part = load(path, missing="impute", min_category_rows=10)
    train = np.array(kinds)[part.train[0]]
    assert (train == "b").sum() < 10 > (train == "c").sum()
    assert data.columns == ("dose", "kind=a", "kind other")
    np.testing.assert_array_equal(data.x[:, 2], np.array(kinds) != "a")


def test_an_encoder_survives_json_and_rejects_other_text() -> None:
    data, _ = load_clients(read_settings({"method": "fedavg", "dataset": "heart-disease"}).data, Path("x"), 0)
    assert data.encoder is not None and Encoder.from_json(data.encoder.to_json()) == data.encoder
    first = '[{"name": "a", "mean": 1'
    for text in (
        *("", "[]", "{}", "[1]", '[{"name": "a"}]', '[{"name": "a", "mean": NaN}]', '[{"name": "a", "mean": "1"}]'),
        *(first + ', "categories": ["x"]}]', first + ', "size": 2}]', first + '}, {"name": "a", "mean": 1}]'),
        *('[{"name": "a", "categories": ["x", "x"]}]', '[{"name": "a", "categories": "xy"}]', "[" * 100_000),
    ):
        with pytest.raises(SettingsError, match="encoder"):
            Encoder.from_json(text)


# -- sites -----------------------------------------------------------------------------------------------


def write_sites(folder: Path) -> dict[str, pd.DataFrame]:
    """Write the hospitals' tables with their real traps, and return the tables.

    Hungary has another column order and semicolons, Long Beach an unseen category of ``thal`` in three rows, and
    Switzerland only patients with disease.
    """
    tables = raw_tables()
    tables["hungarian"] = tables["hungarian"][["num", *reversed([c for c in tables["hungarian"] if c != "num"])]]
    tables["va"].loc[[3, 4, 5], "thal"] = "99"
    swiss = tables["switzerland"]
    tables["switzerland"] = swiss[swiss["num"] != "0"].reset_index(drop=True)
    for name, table in tables.items():
        sign = ";" if name == "hungarian" else ","
        table.to_csv(folder / f"{name}.csv", index=False, sep=sign)
    return tables


SITES = {
    "dataset": "sites", "num-clients": 4, "method": "fedavg", "model": "logistic", "num-server-rounds": 2, "lr": 0.05,
    "local-epochs": 1, "batch-size": 16, "device": "cpu", "label-column": "num > 0", "missing": "impute",
    "categories": ",".join(CATEGORIES), "metric": "accuracy",
}  # fmt: skip
"""The settings of a run over the hospitals."""


def expected_encoder(folder: Path, tables: Tables) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Return the means, standard deviations and one-hot columns of the sites' training rows, from the raw tables.

    A site with fewer than ten missing values in a column counts all of its rows. A site with fewer than ten values
    counts none.
    """
    settings = DataSettings(dataset="sites", label_column="num > 0", missing="impute", categories=",".join(CATEGORIES))
    parts = []
    for name, table in tables.items():
        rows, _ = site_split(read_site(folder / f"{name}.csv", settings, POLICY), settings, POLICY)
        parts.append(numeric(table).iloc[rows])
    means, stds, columns = {}, {}, set()
    for column in [*NUMBERS, *CATEGORIES]:
        if any(len(part) - part[column].count() >= 10 for part in parts):
            columns.add(f"{column} missing")
        if column in CATEGORIES:
            for part in parts:
                counts, gaps = part[column].value_counts(), part[column].isna().sum()
                columns |= {f"{column}={code:g}" for code, n in counts.items() if n >= 10}
                if counts[counts < 10].sum() + (gaps if gaps < 10 else 0) >= 10:
                    columns.add(f"{column} other")
            continue
        sites = [part[column] for part in parts if part[column].count() >= 10]
        weights = [s.count() if s.isna().sum() >= 10 else len(s) for s in sites]
        means[column] = np.average([s.mean() for s in sites], weights=weights)
        squares = sum(
            s.var(ddof=0) * s.count() + weight * (s.mean() - means[column]) ** 2
            for s, weight in zip(sites, weights, strict=True)
        )
        stds[column] = np.sqrt(squares / sum(map(len, parts)))
        columns.add(column)
    return means, stds, columns


def assert_agreed(data: DataSettings, folder: Path, tables: dict[str, pd.DataFrame]) -> None:
    """Compare the agreed encoder and statistics with a computation from the raw tables."""
    encoder, (means, stds, columns) = Encoder.from_json(data.encoder), expected_encoder(folder, tables)
    assert set(encoder.names) == columns and encoder.inputs == tuple(name for name in tables["va"] if name != "num")
    assert (data.classes, int(data.input_shape)) == ("0,1", len(encoder.names))
    numbers = (map(float, text.split(",")) for text in (data.feature_mean, data.feature_std))
    for name, mean, std in zip(encoder.names, *numbers, strict=True):
        assert (mean, std) == pytest.approx((means.get(name, 0.0), stds.get(name, 1.0)), rel=1e-9), name


def node_configs(folder: Path, names: list[str]) -> list[dict[str, str]]:
    """Return the node configs of sites whose policy fixes the label."""
    policy = folder / "policy.yaml"
    policy.write_text("min-rows: 10\nscores: exact\ncode: any\nlabel: num > 0\n")
    folders = {name: {"data": folder / f"{name}.csv", "state-dir": folder / f"state-{name}"} for name in names}
    return [
        {"name": name, "policy": str(policy), **{key: str(path) for key, path in paths.items()}}
        for name, paths in folders.items()
    ]


@pytest.mark.parametrize("masks", [False, True])
def test_hospitals_with_raw_tables_agree_and_predict(masks: bool, tmp_path: Path) -> None:
    """Four sites with the real traps of their tables, with and without secure aggregation."""
    tables = write_sites(tmp_path)
    config = SITES | {"output-dir": str(tmp_path / "runs"), "run-name": "a"}
    config |= {"secure-aggregation": True} if masks else {}
    done = run(NodeGrid(*node_configs(tmp_path, list(tables))), config)
    assert done.summary["status"] == "completed" and done.summary["sites"] == sorted(tables)
    settings = from_json(done.strategy.settings.to_json()).data
    assert_agreed(settings, tmp_path, tables)
    hungary, _ = load_site(read_site(tmp_path / "hungarian.csv", settings, POLICY), settings, POLICY)
    beach, _ = load_site(read_site(tmp_path / "va.csv", settings, POLICY), settings, POLICY)
    swiss, _ = load_site(read_site(tmp_path / "switzerland.csv", settings, POLICY), settings, POLICY)
    row = numeric(tables["hungarian"]).iloc[7]
    assert hungary.x[7, hungary.columns.index("age")] == row["age"]
    thal = {name: beach.x[4, i] for i, name in enumerate(beach.columns) if name.startswith(("thal=", "thal "))}
    assert [name for name, value in thal.items() if value] == [name for name in thal if name == "thal other"]
    assert swiss.y.tolist() == [1] * len(tables["switzerland"])
    assert_predicts(
        posy.load(tmp_path / "state-va").predictor("va"),
        tables["va"].iloc[4].to_dict(),
        *expected_encoder(tmp_path, tables)[:2],
    )


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_hospitals_on_real_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same sites as processes with TLS. Each site predicts a raw row with its own model."""
    tables = write_sites(tmp_path)
    configs = node_configs(tmp_path, list(tables))
    federation = Deployment(tmp_path, list(tables))
    try:
        for config in configs:
            federation.node(config["name"], *(f"{key}={value}" for key, value in config.items()))
        for name in tables:
            federation.until(lambda name=name: federation.ready(name), name, MOST_SECONDS)
        summary = federation.run("hearts", *(f"{key}={value}" for key, value in SITES.items()))
    finally:
        federation.stop()
    assert (summary["status"], summary["sites"], summary["dropped"]) == ("completed", sorted(tables), {})
    log = federation.log("run-hearts")
    assert "hungarian: columns are in a different order" in log
    assert re.search(r"feature chol: switzerland's mean", log)
    means, stds, _ = expected_encoder(tmp_path, tables)
    for name, table in tables.items():
        model = posy.load(tmp_path / f"state-{name}").predictor(name)
        assert_agreed(model.settings.data, tmp_path, tables)
        row = table.iloc[4]
        probabilities = assert_predicts(model, row.to_dict(), means, stds)
        row.to_frame().T.to_csv(raw := tmp_path / f"{name}-row.csv", index=False, sep=";")
        capsys.readouterr()
        assert cli.main(["predict", str(tmp_path / f"state-{name}"), name, str(raw), "--json"]) == 0
        (answer,) = json.loads(capsys.readouterr().out)
        assert list(answer["probabilities"].values()) == pytest.approx(probabilities, rel=1e-4)


def assert_predicts(model: ClientModel, row: dict[str, str], means: dict[str, float], stds: dict[str, float]) -> Any:
    """Return the probabilities of a logistic regression from a raw row, and compare the model's prediction."""
    inputs = []
    names = model.preprocessing.features
    for name in names:
        column, _, code = name.partition("=")
        if name.endswith(" missing"):
            inputs.append(float(row[name.removesuffix(" missing")] == "?"))
        elif name.endswith(" other"):
            column, cell = name.removesuffix(" other"), row[name.removesuffix(" other")]
            codes = {float(other.partition("=")[2]) for other in names if other.startswith(f"{column}=")}
            inputs.append(float(float(cell) not in codes if cell != "?" else f"{column} missing" not in names))
        elif code:
            inputs.append(float(row[column] != "?" and float(row[column]) == float(code)))
        else:
            value = means[column] if row[column] == "?" else float(row[column])
            inputs.append((value - means[column]) / stds[column])
    tensors = model.members[0].state_dict()
    weight, bias = (tensors[next(key for key in tensors if key.endswith(end))].numpy() for end in ("weight", "bias"))
    logits = weight.astype(float) @ np.array(inputs) + bias
    if len(logits) == 1:
        logits = np.array([0.0, logits[0]])
    expected = np.exp(logits) / np.exp(logits).sum()
    sample = {name: value for name, value in row.items() if name != "num"}
    assert list(model.predict(sample).probabilities.values()) == pytest.approx(expected.tolist(), rel=1e-4)
    return [float(probability) for probability in expected]


@pytest.mark.parametrize(
    ("tables", "settings", "message"),
    [
        ([["1", "2"], ["a", "b"]], {}, "column dose contains numbers at site-0, and categories at site-1"),
        ([["1", "2"], ["1", "2"]], {"feature_mean": "0", "feature_std": "1", "encoder": "[]"}, "encoder = '\\[\\]'"),
        ([["1", "2"], ["1", "2"]], {"encoder": '[{"name": "dose", "mean": 1}]'}, "encoder: it needs feature-mean"),
    ],
)
def test_sites_that_differ_need_a_decision(
    tables: list[list[str]], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = DataSettings(dataset="sites", **settings)
    with pytest.raises(SettingsError, match=message):
        describe_and_agree(tables, data, tmp_path)


def describe_and_agree(tables: list[list[str]], settings: DataSettings, folder: Path) -> tuple[DataSettings, list[str]]:
    descriptions = []
    for number, values in enumerate(tables):
        rows = "".join(f"{values[i % len(values)]},{i},{i // 2 % 2}\n" for i in range(60))
        path = write(folder / f"{number}.csv", "dose,other,label\n" + rows)
        answer = describe_site(read_site(path, settings, POLICY), settings, POLICY).as_answer()
        descriptions.append(Description.from_answer(answer))
    is_complete(settings)
    return agreed(settings, descriptions, [f"site-{i}" for i in range(len(tables))])


def test_named_categories_settle_a_difference(tmp_path: Path) -> None:
    data, _ = describe_and_agree([["1", "2"], ["a", "b"]], DataSettings(dataset="sites", categories="dose"), tmp_path)
    assert Encoder.from_json(data.encoder).names == ("dose=1", "dose=2", "dose=a", "dose=b", "other")


def test_rare_values_stay_at_the_site(tmp_path: Path) -> None:
    """Three rows of a category, and five missing values, are neither in the answer nor in the masked numbers."""
    rows = "".join(f"{'' if i < 5 else i},{'rare' if i % 20 == 0 else 'xy'[i % 2]},{i // 2 % 2}\n" for i in range(60))
    path = write(tmp_path / "a.csv", "dose,kind,label\n" + rows)
    settings = DataSettings(dataset="sites", missing="impute")
    answer = describe_site(read_site(path, settings, POLICY), settings, POLICY).as_answer()
    facts = json.loads(answer["table"])
    assert "rare" not in str(answer) and facts["categories"] == [[], ["x", "y"]]
    assert facts["present"] == [answer["count"]] * 2 and facts["missing"] == facts["other"] == [False, False]


@pytest.mark.parametrize(
    "change",
    [{"kinds": ["number"]}, {"present": [-1, 2]}, {"present": [1.5, 2]}, {"kinds": ["a", "b"]}, {"missing": [1, 0]},
     {"categories": [["x" * 301], []]}, {"present": [1000, 2]}],
)  # fmt: skip
def test_implausible_facts_are_rejected(change: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b,label\n" + "".join(f"{i},{'xy'[i % 2]},{i % 2}\n" for i in range(40)))
    settings = DataSettings(dataset="sites")
    answer = describe_site(read_site(path, settings, POLICY), settings, POLICY).as_answer()
    assert Description.from_answer(answer).table is not None
    with pytest.raises((DataError, ValueError)):
        Description.from_answer(answer | {"table": json.dumps(json.loads(answer["table"]) | change)})


def test_a_policy_fixes_the_label_rule(tmp_path: Path) -> None:
    write_sites(tmp_path)
    policy = replace(POLICY, label="num > 0")
    assert [v.rule for v in violations(policy, SITES | {"label-column": "num > 1"})] == ["label"]
    assert not violations(policy, SITES)


def test_check_site_reports_encoded_columns(tmp_path: Path) -> None:
    write_sites(tmp_path)
    settings = read_settings(SITES).data
    report = check_site({"data": str(tmp_path / "va.csv")}, settings)
    assert {"cp=4", "thal missing", "chol"} <= {name for name, *_ in report.statistics}
    assert "encoder" in report.facts["agreed on in a run"]


# -- values and labels -----------------------------------------------------------------------------------


def patients(rows: int, seed: int = 0) -> pd.DataFrame:
    """Return two values that depend on numbers and categories, some of which are missing."""
    rng = np.random.default_rng(seed)
    dose, age = rng.normal(5, 2, rows), rng.integers(20, 90, rows).astype(float)
    kind, ward = rng.choice(["a", "b", ""], rows, p=[0.4, 0.3, 0.3]), rng.integers(1, 4, rows)
    days = 100 * dose - age + 50 * (kind == "a") - 30 * (ward == 2) + rng.normal(0, 5, rows)
    frame = pd.DataFrame({"dose": dose, "kind": kind, "age": age, "ward": ward, "days": days, "cost": 9 - days / 1000})
    frame.loc[rng.random(rows) < 0.3, "dose"] = np.nan
    return frame


def least_squares(train: pd.DataFrame) -> Any:
    """Return scikit-learn's linear regression on encoded rows; the imputed constants come from the training rows."""
    encoded = ColumnTransformer(
        [
            ("numbers", SimpleImputer(strategy="mean", add_indicator=True), ["dose", "age"]),
            ("categories", OneHotEncoder(), ["kind", "ward"]),
        ],
        sparse_threshold=0,
    )
    return make_pipeline(encoded, LinearRegression()).fit(train, train[["days"]])


def test_a_regression_on_categories_and_missing_values_equals_least_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full-batch training with all defaults of the splits converges to the solution of scikit-learn."""
    monkeypatch.chdir(tmp_path)
    frame = patients(200)
    frame.drop(columns="cost").to_csv("t.csv", index=False)
    table = {
        "dataset": "t.csv",
        "task": "regression",
        "label_column": "days",
        "missing": "impute",
        "categories": "ward",
    }
    record = posy.run(
        method="fedavg", model="linear", num_clients=1, num_server_rounds=1, local_epochs=400, batch_size=200, lr=0.2,
        momentum=0.0, weight_decay=0.0, run_name="a", **table,
    )  # fmt: skip
    _, part = load_clients(DataSettings(num_clients=1, partition="iid", **table), tmp_path, record.summary["seed"])
    expected = least_squares(frame.iloc[part.train[0]])
    test = frame.iloc[part.test[0]]
    values = expected.predict(test)[:, 0]
    rows = test[["dose", "kind", "age", "ward"]].astype(object).to_dict("records")
    predictions = [prediction["days"] for prediction in record.predictor(0).predict_all(rows)]
    np.testing.assert_allclose(predictions, values, rtol=1e-3, atol=0.1)
    assert record.clients["served_rmse"].iloc[-1] == pytest.approx(root_mean_squared_error(test["days"], values), 1e-3)


@pytest.mark.parametrize("masks", [False, True])
def test_sites_encode_the_tables_of_a_regression(masks: bool, tmp_path: Path) -> None:
    """The encoder and the scales of features and values are those of the training rows of all sites."""
    (tmp_path / "policy.yaml").write_text("min-rows: 10\nscores: exact\ncode: any\nlabel: days,cost\n")
    frames, sites = [patients(80, seed) for seed in range(3)], []
    for number, frame in enumerate(frames):
        swapped = frame[["cost", *frame.columns[-2::-1]]] if number == 1 else frame
        swapped.to_csv(path := tmp_path / f"site-{number}.csv", index=False)
        sites.append({"name": f"site-{number}", "data": str(path), "policy": str(tmp_path / "policy.yaml")})
    config = {
        "method": "fedavg", "dataset": "sites", "task": "regression", "label-column": "days,cost", "num-clients": 3,
        "num-server-rounds": 1, "model": "linear", "device": "cpu", "missing": "impute", "categories": "ward",
        "output-dir": str(tmp_path / "runs"), "run-name": "a",
    }  # fmt: skip
    config |= {"secure-aggregation": True, "classes": "days,cost"} if masks else {}
    done = run(NodeGrid(*sites), config)
    data, policy = from_json(done.strategy.settings.to_json()).data, replace(POLICY, label="days,cost")
    encoder = Encoder.from_json(data.encoder)
    assert done.rounds == 1 and set(encoder.names) == {
        "dose", "dose missing", "kind=a", "kind=b", "kind missing", "age", "ward=1", "ward=2", "ward=3",
    }  # fmt: skip
    contents = [read_site(Path(site["data"]), data, policy) for site in sites]
    splits = [site_split(content, data, policy)[0] for content in contents]
    train = pd.concat([frame.iloc[rows] for frame, rows in zip(frames, splits, strict=True)])
    names = data.classes.split(",")
    for key, expected in (("target_mean", train[names].mean()), ("target_std", train[names].std(ddof=0))):
        np.testing.assert_allclose([float(word) for word in getattr(data, key).split(",")], expected, rtol=1e-9)
    scale = dict(zip(encoder.names, map(float, data.feature_std.split(",")), strict=True))
    filled = train[["dose", "age"]].fillna(train["dose"].mean())
    assert [scale["dose"], scale["age"], scale["ward=1"]] == pytest.approx([*filled.std(ddof=0), 1.0], rel=1e-9)
    local, _ = load_site(contents[1], data, policy)
    np.testing.assert_array_equal(local.y, frames[1][names])
    np.testing.assert_array_equal(local.x[:, encoder.names.index("kind missing")], frames[1]["kind"] == "")


@pytest.mark.parametrize(
    ("rows", "settings", "code"),
    [
        (["1,a,?"], {"missing": "impute"}, "wrong-target"),
        ([",a,1.5", "1,b,x"], {"missing": "impute"}, "wrong-target"),
        (["1,a,inf"], {}, "wrong-target"),
        ([",a,1"], {}, "missing-value"),
        (["1,a,1.5"], {"task": "multi-label"}, "wrong-target"),
    ],
)
def test_a_missing_or_wrong_value_names_its_column(
    rows: list[str], settings: dict[str, Any], code: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "\n".join(["dose,kind,label", "2,a,0", *rows]))
    with pytest.raises(DataError) as caught:
        load(path, **({"task": "regression"} | settings))
    assert (caught.value.code, caught.value.column) == (code, "label" if code == "wrong-target" else "dose")


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (["1;4,97", "2;5,1", "3;6"], {}, "row 2, column label: '4,97'.*task=regression"),
        (["1,5;4,97", "2;5,1", "3;6"], {}, "row 2, column label: '4,97'.*task=regression"),
        (["1;4.97", "2;5.1", "3;6"], {}, "row 2, column label: '4.97'.*task=regression"),
        (["1;1,234", "2;5,678"], {}, "column label: '1,234' is ambiguous"),
        (["1;1,234", "2;5,678"], {"decimal": "comma"}, "row 2, column label: '1,234'.*task=regression"),
        (["1.5;1,2", "2;1,3"], {}, "column label has decimal commas, and column dose has decimal points"),
        *(
            ([f"1;{gap}", "2;4,97", "3;5"], {}, "row 3, column label: '4,97'.*task=regression")
            for gap in ("", "NA", "?", "-", "nan")
        ),
        (["1.5;NA", "2;4.97"], {}, "row 3, column label: '4.97'.*task=regression"),
        (["1.5;NA", "2;4.97"], {"task": "regression"}, "row 2, column label: 'NA' is a missing value"),
    ],
)
def test_labels_with_decimal_marks_are_not_classes(
    rows: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "\n".join(["dose;label", *rows]))
    with pytest.raises(DataError, match=message):
        load_dataset(DataSettings(dataset=str(path), **settings), path, 0)


@pytest.mark.parametrize(
    ("rows", "settings", "classes"),
    [
        (["1,5;1,2", "2;1,3"], {"decimal": "point", "input_columns": "dose", "categories": "dose"}, ["1,2", "1,3"]),
        (["1.5;1,2", "2;1,3"], {"decimal": "point"}, ["1,2", "1,3"]),
        (["1,5;1,2", "2;1,x"], {}, ["1,2", "1,x"]),
        (["1,5;1", "2;0"], {}, ["0", "1"]),
        (["1.5;0.5", "2;low", "3;NA"], {}, ["0.5", "NA", "low"]),
        (["1,5;4,97", "2;5,1"], {"label_column": "label > 5"}, ["0", "1"]),
    ],
)
def test_labels_with_commas_may_be_classes(
    rows: list[str], settings: dict[str, Any], classes: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", "\n".join(["dose;label", *rows]))
    assert list(load_dataset(DataSettings(dataset=str(path), **settings), path, 0).task.class_names) == classes


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([None, 4.97, 5.0], "row 2, column label: '4.97'; .*set task=regression"),
        (["NA", "4.97", "5"], "row 2, column label: '4.97'; .*store them as numbers and set task=regression"),
        ([None, "4.97", "5"], "row 2, column label: '4.97'; .*store them as numbers and set task=regression"),
        ([None, 1.0, 2.0], "row 1, column label: it is empty"),
    ],
)
def test_labels_of_a_parquet_file_with_decimals_are_not_classes(
    labels: list[Any], message: str, tmp_path: Path
) -> None:
    pd.DataFrame({"dose": [1.0, 2.0, 3.0], "label": labels}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.parquet")


def test_values_may_have_decimal_commas(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "dose;kind;label\n1;a;0,5\n2;b;1,25\n3;a;2\n4;b;3\n")
    data = load_dataset(DataSettings(dataset=str(path), task="regression"), path, 0)
    assert data.y[:, 0].tolist() == [0.5, 1.25, 2, 3]
