"""Edge cases of data and federation for every method: the files of a run hold the measured values."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FailingGrid, Key
from recorded import check_numbers, read

from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.strategies.methods import METHODS

Config = dict[str, Any]
Data = tuple[np.ndarray, np.ndarray, list[list[int]], list[list[int]]]
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def run_method(make_config: Callable[..., Config]) -> Callable[..., tuple[dict[str, Any], list[Any], list[Any]]]:
    """Return a function that runs a method, checks its files, and returns summary, rounds and client rows."""

    def run_and_check(
        method: str, data: Data, *, fail: Collection[Key] = (), **settings: Any
    ) -> tuple[dict[str, Any], list[Any], list[Any]]:
        values = {"num_server_rounds": 4, "model": "mlp", "system_accuracy": "on", "checkpoint_every": 0, **settings}
        values = {"fedfomo_validation": 0.0, **values}  # all samples of a client train
        if values.get("fraction_train", 1) < 1:
            values["pfedme_clients"] = "cohort"
        config = make_config(method, data=data, **values)
        clients = len(data[2])
        grid: InProcessGrid = FailingGrid(clients, fail, ()) if fail else InProcessGrid(clients)
        folder: Path = run(grid, config).directory.path
        check_numbers(folder)
        summary, rounds, rows = read(folder)
        assert (summary["status"], len(rounds)) == ("completed", 4)
        for row in rows:
            client = int(row["partition"])
            if row["n_train"]:
                assert (int(row["n_train"]), int(row["n_test"])) == (len(data[2][client]), len(data[3][client]))
            else:  # the client did not reply in this round
                assert not any(row[name] for name in ("served_accuracy", "local_accuracy", "train_loss", "chosen"))
                assert row["bytes_up"] == "0"
        for way in ("up", "down"):
            sums = [sum(int(r[f"bytes_{way}"]) for r in rows if int(r["round"]) == n) for n in range(1, 5)]
            assert sums == [r[f"bytes_{way}"] for r in rounds] and sum(sums) == summary[f"bytes-{way}"]
        return summary, rounds, rows

    return run_and_check


def parts(*sizes: tuple[int, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return consecutive train and test indices of clients with these numbers of samples."""
    train, test, start = [], [], 0
    for n_train, n_test in sizes:
        train.append(list(range(start, start + n_train)))
        test.append(list(range(start + n_train, start + n_train + n_test)))
        start += n_train + n_test
    return train, test


def separate(y: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 2, (int(y.max()) + 1, 4))[y] + rng.normal(0, 1, (len(y), 4))).astype(np.float32)


SIZES = ((9, 6), (6, 4), (4, 4), (1, 0))
TWO = np.arange(sum(map(sum, SIZES))) % 2


def default_data() -> Data:
    return (separate(TWO), TWO, *parts(*SIZES))


def column(rows: list[dict[str, str]], number: int, name: str) -> dict[int, float]:
    return {int(r["partition"]): float(r[name]) for r in rows if int(r["round"]) == number and r[name] != ""}


# -- data ------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("kind", ["zeros", "outlier"])
def test_constant_features_and_outliers(method: str, kind: str, run_method: Callable[..., Any]) -> None:
    x, y, train, test = default_data()
    if kind == "zeros":
        x = np.zeros_like(x)
    else:
        x[3] = 3e38
    summary, _, rows = run_method(method, (x, y, train, test))
    assert summary["dropped"] == {}
    for number in range(1, 5):
        assert set(column(rows, number, "local_accuracy")) == {0, 1, 2}
        assert set(column(rows, number, "train_loss")) == {0, 1, 2, 3}
    if kind == "zeros":  # a model predicts the same class for all test samples
        shares = {c: {float((y[test[c]] == label).mean()) for label in (0, 1)} for c in (0, 1, 2)}
        for name in ("served_accuracy", "local_accuracy"):
            for client, accuracy in column(rows, 4, name).items():
                assert min(abs(accuracy - share) for share in shares[client]) < 1e-6


@every_method
def test_identical_clients_get_equal_scores(method: str, run_method: Callable[..., Any]) -> None:
    """With all samples in one batch, their models are equal. FedDRM has different client labels but equal classes.

    Per-FedAvg divides the batch at random.
    """
    y = np.arange(15) % 3
    x, (train, test) = separate(y), parts((9, 6))
    data = (
        np.concatenate([x] * 3),
        np.concatenate([y] * 3),
        *([[index + 15 * copy for index in part[0]] for copy in range(3)] for part in (train, test)),
    )
    summary, _, rows = run_method(method, data, batch_size=64, lr=0.3)
    assert summary["dropped"] == {}
    for number in range(1, 5):
        for name in ("served_loss", "local_loss", "train_loss"):
            values = column(rows, number, name)
            if method in ("feddrm", "per-fedavg") and name == "train_loss":
                continue  # includes the loss of the client labels, or covers half of the batch
            if values:
                assert set(values) == {0, 1, 2}
                assert list(values.values()) == pytest.approx([values[0]] * 3, rel=0.05 if method == "feddrm" else 1e-4)
    for point in ("served", "local"):
        if (last := summary[point]["last"]) and method != "feddrm":
            assert last["std"] == pytest.approx(0, abs=1e-6) and last["jain"] == pytest.approx(1)


# -- federation ------------------------------------------------------------------------------------------


@every_method
def test_a_cohort_of_one_and_rare_evaluations(method: str, run_method: Callable[..., Any]) -> None:
    _, rounds, rows = run_method(method, default_data(), fraction_train=1e-6, evaluate_every=3)
    for row in rounds:
        trained = column(rows, row["round"], "train_loss")
        assert row["cohort"] == len(trained) == (1 if method != "ppfe" else row["cohort"])
        assert row["train_loss"]["mean"] == pytest.approx(np.mean(list(trained.values())))
        served = column(rows, row["round"], "served_accuracy")
        evaluated = row["round"] in (3, 4) and method != "local"
        assert set(served) == ({0, 1, 2} if evaluated else set())
        if row["round"] not in (3, 4):
            assert row["local_accuracy"] is None


@every_method
def test_client_that_replies_from_round_3(method: str, run_method: Callable[..., Any]) -> None:
    absent = [(kind, number, 1) for kind in ("train", "evaluate") for number in (1, 2)]
    summary, rounds, rows = run_method(method, default_data(), fail=absent)
    assert sum(summary["dropped"].values()) == 4
    for number in range(1, 5):
        present = {0, 1, 2, 3} if number > 2 else {0, 2, 3}
        assert set(column(rows, number, "train_loss")) == present
        assert set(column(rows, number, "local_accuracy")) == present - {3}
        assert rounds[number - 1]["local_accuracy"]["clients"] == len(present - {3})
    # Rounds with two of three clients are not compared with rounds of all three.
    assert summary["local"]["upper-bound"]["round"] > 2
    assert summary["local"]["upper-bound"]["clients"] == 3
