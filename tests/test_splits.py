"""Stratified splits, splits by patient, and folds, in process and at sites."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from nodes import NodeGrid
from PIL import Image
from scipy import stats

import posy
from posy.client_app.policy import violations
from posy.client_app.workspace import Workspace
from posy.commands.table import plan_of, run_table
from posy.data.columns import Columns
from posy.data.datasets import load_clients
from posy.data.errors import DataError
from posy.data.partitions import Partition
from posy.data.policy import Policy
from posy.data.readers.own import read_own
from posy.data.settings import DataSettings
from posy.data.sites import read_site, site_split
from posy.data.splits import RANDOM, Strata, count_aside, split, split_folds
from posy.predictions import read_predictions
from posy.report.comparison import gain_over_folds
from posy.scores import Predictions
from posy.server_app import pooled_scores
from posy.server_app.app import run
from posy.server_app.recorder import Recorder
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

POLICY = Policy(min_rows=2)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def table(path: Path, rows: int = 40, rare: int = 4, patients: int = 0, hospitals: int = 2) -> Path:
    """Write a table in which each hospital has ``rare`` rows of a rare class, and rows of ``patients`` patients."""
    lines = ["patient,hospital,age,label"]
    for hospital in range(hospitals):
        for row in range(rows):
            patient = row % patients if patients else row
            label = "ill" if patient < rare else "well"
            lines.append(f"p{patient},h{hospital},{hospital * rows + row},{label}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def natural(path: Path, **changes: object) -> DataSettings:
    common = {"partition": "natural", "group_column": "hospital", "input_columns": "age", "num_clients": 2}
    return DataSettings(dataset=str(path), **{**common, **changes})


# -- fractions -----------------------------------------------------------------------------------------------


def test_each_class_is_set_aside_in_proportion() -> None:
    """Sainte-Laguë's divisors 1, 3, 5, … divide 10 places among classes of 24, 12 and 4 samples as 6, 3 and 1."""
    labels = np.repeat([0, 1, 2], [24, 12, 4])
    for seed in range(8):
        ((rest, aside),) = split([np.arange(40)], 0.25, rng(seed), Strata(labels))
        assert np.bincount(labels[aside]).tolist() == [6, 3, 1]
        assert sorted([*rest, *aside]) == list(range(40))


def test_a_class_with_one_sample_remains_and_a_class_with_two_is_in_both_parts() -> None:
    labels = np.repeat([0, 1, 2], [37, 2, 1])
    for seed in range(8):
        ((rest, aside),) = split([np.arange(40)], 0.25, rng(seed), Strata(labels))
        assert np.bincount(labels[rest], minlength=3).tolist() == [28, 1, 1] and len(aside) == 10


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    fraction=st.floats(0.01, 0.9),
    seed=st.integers(0, 99),
)
def test_the_parts_have_the_same_sizes_with_and_without_strata(labels: list[int], fraction: float, seed: int) -> None:
    y, samples = np.array(labels), np.arange(len(labels))
    ((rest, aside),) = split([samples], fraction, rng(seed), Strata(y))
    assert len(aside) == count_aside(len(y), fraction)
    assert sorted([*rest, *aside]) == samples.tolist()
    counts = np.bincount(y)
    if (counts[counts > 1] - 1).sum() >= len(aside):  # the classes with several samples suffice
        assert set(y) == set(y[rest])


def test_random_splits_are_the_splits_of_earlier_versions() -> None:
    shuffled = rng(3).permutation(np.arange(50, 90))
    ((rest, aside),) = split([np.arange(50, 90)], 0.25, rng(3), RANDOM)
    assert aside.tolist() == shuffled[:10].tolist() and rest.tolist() == shuffled[10:].tolist()


def test_every_seed_tests_a_rare_class(tmp_path: Path) -> None:
    """Random splits had no test sample of a class with 4 of 40 rows in 3 of 8 seeds."""
    settings, without = natural(table(tmp_path / "a.csv"), validation_fraction=0.25), []
    for seed in range(8):
        data, part = load_clients(settings, tmp_path, seed)
        for splits in (part.train, part.test, part.validation):
            assert all((data.y[rows] == 0).any() for rows in splits)
        random = load_clients(replace(settings, stratify=False), tmp_path, seed)[1]
        without += [seed for rows in random.test if not (data.y[rows] == 0).any()]
    assert without


# -- patients ------------------------------------------------------------------------------------------------


def patients_apart(patients: np.ndarray, part: Partition) -> bool:
    """Return whether no client has a patient in two of its splits."""
    clients = zip(part.train, part.test, part.validation, strict=True)
    sets = [[set(patients[rows]) for rows in splits] for splits in clients]
    return all(not (a & b or a & c or b & c) for a, b, c in sets)


def test_all_rows_of_a_patient_are_in_one_split(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", rows=60, patients=12, rare=3)
    settings = natural(path, split_column="patient", input_columns="", validation_fraction=0.3)
    data, part = load_clients(settings, tmp_path, 1)
    patients = np.arange(len(data)) % 12
    assert data.columns == ("age",) and data.split_groups is not None
    assert patients_apart(patients, part)
    assert [len(rows) for rows in part.test] == [15, 15]  # 3 of 12 patients
    assert all((data.y[rows] == 0).any() for rows in part.test)
    by_row = load_clients(natural(path, input_columns="age", validation_fraction=0.3), tmp_path, 1)[1]
    assert not patients_apart(patients, by_row)


FORMS = {
    "a.npz": {"split_column": "eye"},
    "b.npz": {},
    "arrays": {"split_column": "eye"},
    "a.parquet": {"split_column": "eye", "group_column": "hospital"},
    "images": {"split_column": "eye", "group_column": "hospital"},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_data_keeps_patients_together(form: str, tmp_path: Path) -> None:
    y, eyes, hospitals = np.arange(48) % 2, np.arange(48) // 4, np.arange(48) // 24
    x = np.stack([eyes, np.arange(48)], axis=1).astype(float)
    names = np.array([f"eye {eye}" for eye in eyes])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, eye_train=names, groups_train=hospitals)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, patients_train=eyes, groups_train=hospitals)
    (tmp_path / "arrays").mkdir()
    for name, array in {"x": x, "y": y, "eye": names, "groups": hospitals}.items():
        np.save(tmp_path / f"arrays/{name}.npy", array)
    table = pd.DataFrame({"eye": eyes, "number": np.arange(48), "hospital": hospitals, "label": y})
    table.to_parquet(tmp_path / "a.parquet")
    files = [f"{'ab'[label]}/{number:02d}.png" for number, label in enumerate(y)]
    for number, file in enumerate(files):
        (tmp_path / "images" / file).parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / "images" / file)
    table.assign(file_name=files).sample(frac=1, random_state=0).to_csv(tmp_path / "images/metadata.csv", index=False)
    settings = DataSettings(dataset=form, partition="natural", num_clients=2, validation_fraction=0.3, **FORMS[form])  # type: ignore[arg-type]
    data, part = load_clients(settings, tmp_path, 1)
    if form == "images":
        number = np.rint(data.x[:, 0, 0, 0]).astype(int)
    else:
        number = data.x[:, data.columns.index("number") if data.columns else 1].astype(int)
    assert patients_apart(eyes[number], part)
    for client, parts in enumerate(zip(part.train, part.test, part.validation, strict=True)):
        assert sorted(number[np.concatenate(parts)]) == list(range(24 * client, 24 * client + 24))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "needs a file metadata.csv"),
        ("file,eye\na/0.png,1\n", "it needs one column file_name"),
        ("file_name,hospital\na/0.png,1\n", "it needs one column eye"),
        ("file_name,eye\na/0.png,1\nb/0.png,\n", "b/0.png has no value"),
        ("file_name,eye\na/0.png\n", "row 2 does not have 2 cells"),
        ("", "metadata.csv"),
    ],
)
def test_unusable_metadata_of_images_is_refused(metadata: str | None, message: str, tmp_path: Path) -> None:
    for file in ("a/0.png", "b/0.png"):
        (tmp_path / file).parent.mkdir()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / file)
    if metadata is not None:
        (tmp_path / "metadata.csv").write_text(metadata)
    with pytest.raises(DataError, match=message):
        read_own(tmp_path, columns=Columns(split="eye"))


def test_groups_of_unequal_size_come_close_to_the_fraction() -> None:
    sizes = [30, 1, 2, 3, 5, 4, 5]
    groups = np.repeat(np.arange(7), sizes)
    for seed in range(20):
        ((rest, aside),) = split([np.arange(50)], 0.2, rng(seed), Strata(None, groups))
        assert not set(groups[rest]) & set(groups[aside]) and len(rest) and 7 <= len(aside) <= 12


def test_one_patient_is_never_set_aside() -> None:
    for parts in (
        split([np.arange(6)], 0.5, rng(), Strata(None, np.zeros(6, np.int64))),
        split_folds([np.arange(6)], 3, 1, rng(), Strata(None, np.zeros(6, np.int64))),
    ):
        assert [len(part) for part in parts[0]] == [6, 0]


# -- folds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_patient", [False, True])
def test_folds_set_each_sample_aside_once(by_patient: bool) -> None:
    labels = rng().permutation(np.repeat([0, 1, 2], [31, 12, 5]))
    groups = np.arange(48) % 16 if by_patient else None
    folds = [split_folds([np.arange(48)], 5, k, rng(1), Strata(labels, groups))[0] for k in range(1, 6)]
    assert sorted(np.concatenate([aside for _, aside in folds])) == list(range(48))
    for rest, aside in folds:
        assert sorted([*rest, *aside]) == list(range(48)) and 8 <= len(aside) <= 12
        if groups is None:
            counts = np.bincount(labels[aside], minlength=3)
            assert counts[0] in (6, 7) and counts[1] in (2, 3) and counts[2] == 1
        else:
            assert not set(groups[rest]) & set(groups[aside])


def test_small_clients_have_folds_without_test_samples() -> None:
    folds = [split_folds([np.arange(2), np.arange(2, 3)], 4, k, rng(), RANDOM) for k in range(1, 5)]
    assert sorted(len(first[1]) for first, _ in folds) == [0, 0, 1, 1]
    assert all(len(second[0]) == 1 and not len(second[1]) for _, second in folds)


def test_folds_need_test_samples_that_posy_selects(tmp_path: Path) -> None:
    x, y = np.zeros((20, 2), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = DataSettings(dataset="a.npz", partition="iid", num_clients=2, folds=2, fold=1)
    with pytest.raises(SettingsError, match=r"folds = 2: a\.npz comes with a test set"):
        load_clients(settings, tmp_path, 0)
    part = load_clients(replace(settings, test_set="pooled"), tmp_path, 0)[1]
    assert [len(rows) for rows in part.test] == [10, 10]
    with pytest.raises(SettingsError, match="folds = 1"):
        DataSettings(folds=1)


def test_the_split_seed_determines_the_splits_and_the_seed_the_model() -> None:
    def draws(**seeds: int) -> list[list[int]]:
        config = {"method": "fedavg", "max-samples": 120, "num-clients": 3, "folds": 3, "fold": 1, "device": "cpu"}
        changes = {key.replace("_", "-"): value for key, value in seeds.items()}
        workspace = Workspace(read_settings({**config, "validation-fraction": 0.2, **changes}))
        part, images = workspace.partition, workspace.dataset.x
        splits = [images[rows].sum() for name in ("train", "test", "validation") for rows in getattr(part, name)]
        first = workspace.initial(workspace.architecture, workspace.settings.run.seed)
        return [[len(rows) for rows in part.train], splits, first.tolist()[:50]]

    first, model, splits = draws(seed=1, split_seed=4), draws(seed=2, split_seed=4), draws(seed=1, split_seed=5)
    assert first[:2] == model[:2] and first[2] != model[2]
    assert first[2] == splits[2] and first[1] != splits[1]
    assert draws(seed=4)[:2] == first[:2]


def test_small_clients_are_listed(make_config: Callable[..., dict[str, Any]]) -> None:
    """The tiny data set has a client with one class, and a client with one sample and no test sample."""
    summary = run(None, make_config("fedavg", num_server_rounds=1)).summary
    expected = {"one-training-sample": [3], "one-training-class": [2, 3], "no-test-samples": [3]}
    assert summary["small-clients"] == expected


# -- sites ---------------------------------------------------------------------------------------------------


def test_a_sites_split_is_stratified_by_its_policy_and_not_by_the_run(tmp_path: Path) -> None:
    content = read_own(table(tmp_path / "a.csv", hospitals=1), columns=Columns(inputs=("age",)))
    y = content.distinct[0]
    _, test = site_split(content, DataSettings(dataset="sites"), POLICY)
    assert np.bincount(y[test]).tolist() == [1, 9]
    _, same = site_split(content, DataSettings(dataset="sites", stratify=False, test_fraction=0.5), POLICY)
    assert same.tolist() == test.tolist()
    _, random = site_split(content, DataSettings(dataset="sites"), replace(POLICY, stratify=False))
    assert random.tolist() != test.tolist()


def test_a_site_keeps_the_patients_of_its_policy_together(tmp_path: Path) -> None:
    path, settings = table(tmp_path / "a.csv", rows=60, patients=12, hospitals=1), DataSettings(dataset="sites")
    policy = replace(POLICY, split_column="patient", columns="age,hospital")
    content = read_site(path, replace(settings, input_columns="age"), policy)
    train, test = site_split(content, settings, policy)
    assert not set(train % 12) & set(test % 12) and len(test) == 15
    with pytest.raises(DataError) as raised:
        read_site(path, replace(settings, input_columns="age,patient"), policy)
    assert "split-column" in str(raised.value) and "input-columns" in str(raised.value)
    with pytest.raises(DataError, match="split-column = 'name'"):
        read_site(path, settings, Policy(split_column="name"))
    y = np.arange(48) % 2
    np.savez(tmp_path / "b.npz", x_train=np.zeros((48, 2)), y_train=y, patient_train=np.arange(48) % 12)
    content = read_site(tmp_path / "b.npz", settings, policy)
    train, test = site_split(content, settings, policy)
    assert not set(train % 12) & set(test % 12) and len(test) == 12
    np.savez(tmp_path / "c.npz", x_train=np.zeros((48, 2)), y_train=y)
    with pytest.raises(DataError, match="no array patient_train"):
        read_site(tmp_path / "c.npz", settings, policy)
    for part in ("train", "test"):
        (tmp_path / f"pfllib/{part}").mkdir(parents=True)
        np.savez(tmp_path / f"pfllib/{part}/0.npz", data={"x": np.zeros((4, 2)), "y": np.arange(4) % 2})
    with pytest.raises(DataError, match="split-column = 'patient'"):
        read_site(tmp_path / "pfllib", settings, policy)


def test_a_site_refuses_folds_unless_its_policy_allows_them(tmp_path: Path) -> None:
    values = {"dataset": "sites", "folds": 4, "fold": 1}
    assert [v.rule for v in violations(POLICY, values)] == ["folds"]
    assert [v.rule for v in violations(replace(POLICY, folds=5), values)] == ["folds"]
    allowed = replace(POLICY, folds=4)
    assert "folds" not in [v.rule for v in violations(allowed, values)]
    content = read_own(table(tmp_path / "a.csv", hospitals=1), columns=Columns(inputs=("age",)))
    folds = [site_split(content, DataSettings(dataset="sites", folds=4, fold=k), allowed) for k in range(1, 5)]
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(40))
    with pytest.raises(DataError) as raised:
        site_split(content, DataSettings(dataset="sites", folds=4, fold=1), replace(allowed, min_rows=11))
    assert raised.value.code == "too-few-rows"


# -- runs over all folds -------------------------------------------------------------------------------------


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the settings of a short run on a table of two hospitals with 24 rows each."""
    monkeypatch.chdir(tmp_path)
    path = table(tmp_path / "a.csv", rows=24, rare=8)
    common = {"partition": "natural", "group_column": "hospital", "input_columns": "age", "num_clients": 2}
    short = {"method": "fedavg", "model": "linear", "num_server_rounds": 2, "local_epochs": 1, "device": "cpu"}
    return {"dataset": str(path), **common, **short, "folds": 3, "run_name": "cv", "save_predictions": True}


def test_a_run_with_folds_scores_every_sample_once(heart: dict[str, object]) -> None:
    record = posy.run(**heart)
    assert record.summary["status"] == "completed" and [entry["fold"] for entry in record.summary["runs"]] == [1, 2, 3]
    for client, hospital in enumerate(("h0", "h1")):
        samples, hits = [], []
        for fold in range(1, 4):
            lines = (record.path / f"fold-{fold}/predictions/served-{client}.csv").read_text().splitlines()
            for row in csv.DictReader(lines):
                samples.append(int(row["sample"]))
                predicted = max(("ill", "well"), key=lambda name, row=row: float(row[f"p({name})"]))
                hits.append(predicted == row["label"])
        assert sorted(samples) == list(range(24 * client, 24 * client + 24))
        row = record.clients.set_index("partition").loc[client]
        assert row["served_accuracy"] == pytest.approx(np.mean(hits)) and row["n_test"] == 24
        assert record.summary["sites"][client] == hospital
    pooled = record.summary["pooled"]["served"]
    assert pooled["samples"] == 48 and np.sum(pooled["confusion"]) == 48
    last = record.summary["served"]["last"]
    assert last["mean"] == pytest.approx(record.clients["served_accuracy"].mean())


def test_a_stopped_run_with_folds_resumes(heart: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = posy.run(**{**heart, "run_name": "whole"})
    finish, number = Recorder.finish_round, 0

    def stop(self: Recorder, *arguments: object) -> None:
        nonlocal number
        finish(self, *arguments)
        number += 1
        if number == 5:  # after the first round of the second fold; round 0 also counts
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "finish_round", stop)
        with pytest.raises(KeyboardInterrupt):
            posy.run(**heart)
    assert posy.load("cv").summary["status"] == "stopped"
    resumed = posy.run(resume="cv")
    for key in ("served", "local", "pooled", "runs"):
        assert resumed.summary[key] == whole.summary[key]
    with pytest.raises(SettingsError, match="all folds are complete"):
        posy.run(resume="cv")


def test_folds_on_nodes_give_means_of_each_client(heart: dict[str, object], tmp_path: Path) -> None:
    """The predictions stay on the nodes, but a mean of accuracies is the accuracy over all of a client's samples."""
    config = {key.replace("_", "-"): value for key, value in heart.items() if key != "save_predictions"}
    nodes = NodeGrid(*({"partition-id": client, "num-partitions": 2} for client in range(2)))
    summary = run(nodes, config).summary
    whole = posy.run(**{**heart, "run_name": "whole"})
    assert "pooled" not in summary and "stay on the nodes" in summary["fold-scores"]
    assert "fold-scores" not in whole.summary
    rows = pd.read_csv(tmp_path / "runs/cv/clients.csv").set_index("partition")
    expected = whole.clients.set_index("partition")
    assert rows["n_test"].tolist() == [24, 24]
    np.testing.assert_allclose(rows["served_accuracy"], expected["served_accuracy"])
    np.testing.assert_allclose(rows["served_log_loss"], expected["served_log_loss"], rtol=1e-5)
    for key in ("mean", "std", "min", "max", "clients"):
        assert summary["served"]["last"][key] == pytest.approx(whole.summary["served"]["last"][key])
    folds = pd.concat([pd.read_csv(tmp_path / f"runs/cv/fold-{k}/clients.csv").query("round == 2") for k in (1, 2, 3)])
    means = folds.groupby("partition").apply(lambda part: np.average(part["served_auroc"], weights=part["n_test"]))
    np.testing.assert_allclose(rows["served_auroc"], means)


def test_each_file_of_predictions_is_read_once(heart: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def count(path: Path, *arguments: Any) -> Predictions:
        read.append(path)
        return read_predictions(path, *arguments)

    monkeypatch.setattr(pooled_scores, "read_predictions", count)
    posy.run(**heart)
    summarised = [path for path in read if path.parent.parent.name.startswith("fold-")]
    folds_read = len(set(summarised))
    assert folds_read == 12 and len(summarised) == 2 * folds_read  # by the fold, and by the summary of all folds


def test_a_table_has_a_run_for_each_fold(heart: dict[str, object], tmp_path: Path) -> None:
    settings = {key.replace("_", "-"): value for key, value in heart.items() if key not in ("run_name", "method")}
    rows = [{"name": name, "settings": {"method": name}} for name in ("fedavg", "local")]
    content = {"settings": {**settings, "folds": 2}, "seeds": [0, 1], "runs": rows, "output": str(tmp_path / "out")}
    plan = plan_of(content, tmp_path / "t.yaml", {})
    assert len(plan.cells) == 8
    assert plan.cells[3].name == "fedavg / seed 1 / fold 2" and plan.cells[3].config["fold"] == 2
    assert run_table(plan, jobs=1) == 0
    text = (tmp_path / "out/table.md").read_text()
    assert "corrected resampled t-test" in text and "| fedavg | 4/4 |" in text
    clients = pd.read_csv(tmp_path / "out/clients.csv").set_index("method")
    assert clients.loc["local", "losing-fedavg"].endswith("/4")  # two clients in two seeds


def test_the_corrected_t_test_by_hand() -> None:
    """Five folds with the mean differences 0.1, 0.2, 0.3, 0.2, 0.2: variance 0.005, t = 0.2 / sqrt(0.45 x 0.005)."""
    differences = (0.1, 0.2, 0.3, 0.2, 0.2)
    pairs = {(0, k): ({0: 0.5 + d, 1: 0.4 + d}, {0: 0.5, 1: 0.4}) for k, d in enumerate(differences, 1)}
    result = gain_over_folds(pairs, 5)
    assert result is not None and result.mean == pytest.approx(0.2) and (result.losing, result.clients) == (0, 2)
    t = 0.2 / np.sqrt((1 / 5 + 1 / 4) * 0.005)
    assert result.p == pytest.approx(2 * stats.t.sf(t, 4))
    assert result.p > 2 * stats.t.sf(0.2 / np.sqrt(0.005 / 5), 4)  # the uncorrected test
    worse = gain_over_folds(pairs, 5, lower_is_better=True)
    assert worse is not None and worse.losing == 2 and worse.mean == pytest.approx(-0.2)
    assert gain_over_folds({}, 5) is None
