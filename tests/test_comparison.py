"""Statistics of a table: gains, ranks and significance tests, compared with results by hand."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from posy.metrics import METRICS
from posy.report.comparison import (
    Run,
    client_scores,
    compared,
    gain,
    holm,
    over_clients,
    over_same_clients,
    ranks,
    scores_by_block,
)
from posy.report.table_figures import draw_gains, draw_ranks, gains_of
from posy.yaml12 import dump

ACCURACY, LOG_LOSS = METRICS["accuracy"], METRICS["log-loss"]


def test_gain_is_computed_per_client() -> None:
    first = ({0: 0.9, 1: 0.5, 2: 0.7}, {0: 0.8, 1: 0.6, 2: 0.7})
    second = ({0: 0.9, 1: 0.7}, {0: 0.5, 1: 0.5, 5: 1.0})  # client 5 has no counterpart
    result = gain([first, second])
    assert result is not None
    assert result.mean == pytest.approx((0.1 - 0.1 + 0.0 + 0.4 + 0.2) / 5)
    assert (result.losing, result.clients) == (1, 5)
    assert gain([({}, {0: 1.0})]) is None
    assert gain([({0: 0.5}, {0: 0.5})]) == (0.0, 0, 1, 1.0)


def test_clients_that_all_seeds_share_count_once() -> None:
    """Three seeds with the same four clients give four independent differences, so p is at least 2 / 2^4."""
    seeds = [({c: 0.6 + 0.01 * (c + s) for c in range(4)}, dict.fromkeys(range(4), 0.5)) for s in range(3)]
    separate, same = gain(seeds), gain(seeds, ["fixed"] * 3)
    assert separate is not None and same is not None
    assert same.mean == pytest.approx(separate.mean) == pytest.approx(0.125)
    assert (separate.clients, same.clients) == (12, 4)
    assert same.p == pytest.approx(2 / 2**4) and separate.p < 0.001
    mixed = gain(seeds, ["fixed", "fixed", 7])
    assert mixed is not None and mixed.clients == 8
    losing = gain([({0: 0.5}, {0: 0.6}), ({0: 0.9}, {0: 0.6})], ["fixed"] * 2)
    assert losing is not None and (losing.losing, losing.clients) == (0, 1)


@pytest.mark.parametrize(
    ("settings", "population"),
    [
        ({"dataset": "digits", "partition": "dirichlet", "split-seed": -1}, 3),
        ({"dataset": "digits", "partition": "dirichlet", "split-seed": 5}, "split-seed 5"),
        ({"dataset": "a.csv", "partition": "natural", "split-seed": -1}, "fixed"),
        ({"dataset": "mnist", "partition": "given"}, "fixed"),
        ({"dataset": "sites", "partition": "dirichlet"}, "fixed"),
    ],
)
def test_drawn_partitions_have_other_clients_for_each_seed(
    settings: dict[str, Any], population: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dump({"settings": settings}), encoding="utf-8")
    assert Run("v", "row", "fedavg", 3, {}, tmp_path).population == population


def test_a_table_states_that_all_seeds_have_the_same_clients(runs: list[Run]) -> None:
    for run in runs:
        (run.path / "config.yaml").write_text(dump({"settings": {"partition": "natural"}}), encoding="utf-8")
    lines = over_clients(runs)
    assert set(lines["losing-local"]) == {"", "0/4", "3/4"}
    assert not lines["local-beats-local"].any()  # four clients are too few
    assert "All seeds have the same clients" in compared(lines, None, ACCURACY)


def test_p_value_of_differences_of_the_same_sign() -> None:
    """For n differences of the same sign, the two-sided p-value is 2 / 2^n."""
    result = gain([({c: 0.5 + 0.01 * c for c in range(1, 9)}, dict.fromkeys(range(1, 9), 0.5))])
    assert result is not None and result.p == pytest.approx(2 / 2**8)


def test_holm_multiplies_by_the_number_of_remaining_tests() -> None:
    assert holm([0.03, 0.01, 0.5]) == pytest.approx([0.06, 0.03, 0.5])
    assert holm([]) == []


def test_ranks_by_hand() -> None:
    scores = pd.DataFrame(
        {"a": [0.9, 0.8, 0.9, 0.9], "b": [0.5, 0.6, 0.9, 0.4], "c": [0.1, 0.2, 0.3, 0.5]}, index=list("wxyz")
    )
    scores.loc["lacking"] = [0.1, np.nan, 0.9]
    ranking = ranks(scores)
    assert ranking is not None and ranking.blocks == 4
    assert ranking.mean.to_dict() == {"a": (1 + 1 + 1.5 + 1) / 4, "b": (2 + 2 + 1.5 + 3) / 4, "c": (3 + 3 + 3 + 2) / 4}
    # Friedman's statistic with ties: 12/(nk(k+1)) sum R^2 - 3n(k+1), over 1 - sum(t^3 - t)/(nk(k^2 - 1)).
    statistic = (12 / 48 * (4.5**2 + 8.5**2 + 11**2) - 48) / (1 - 6 / 96)
    assert ranking.friedman == pytest.approx(np.exp(-statistic / 2))  # chi-squared with two degrees of freedom
    assert ranking.ties_with_best()[0] == "a"
    assert ranks(scores.head(2)) is None and ranks(scores[["a", "b"]]) is None


def test_a_consistently_worse_row_differs_from_the_best() -> None:
    rng = np.random.default_rng(0)
    result = ranks(pd.DataFrame({"good": 0.9 + 0.01 * rng.random(20), "same": 0.9 + 0.01 * rng.random(20), "bad": 0.1}))
    assert result is not None and result.friedman < 0.05
    assert set(result.ties_with_best()) == {"good", "same"}
    equal = ranks(pd.DataFrame({"a": [1.0] * 3, "b": [1.0] * 3, "c": [1.0] * 3}))
    assert equal is not None and equal.friedman == 1 and len(equal.ties_with_best()) == 3


def make_run(
    folder: Path, row: str, method: str, seed: int, served: list[float], local: list[float], members: int = 0
) -> Run:
    path = folder / row / str(seed)
    path.mkdir(parents=True)
    with (path / "clients.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "partition", "served_accuracy", "local_accuracy"])
        writer.writerow([1, 0, 0.0, 0.0])
        for client in range(len(local)):
            writer.writerow([2, client, served[client] if served else "", local[client]])

    def last(values: list[float]) -> Any:
        if not values:
            return {"last": None}
        spread = {"mean": np.mean(values), "min": min(values), "tenth": min(values), "std": 0.0, "jain": 1.0}
        return {"last": {"round": 2, **spread}}

    summary = {"rounds": 2, "served": last(served), "local": last(local), "samples": 1000, "peak-memory": 5_000_000}
    summary["num-clients"] = members or len(local)
    return Run("v", row, method, seed, summary, path)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Return three rows: Ditto beats Local on every client of each seed, FedAvg loses on all clients but the fourth."""
    rows = []
    for seed in (0, 1, 2):
        local = [0.70 + 0.01 * (c + seed) for c in range(4)]
        rows.append(make_run(tmp_path, "Local", "local", seed, [], local))
        served = [0.5, 0.5, 0.5, 0.99]
        rows.append(make_run(tmp_path, "FedAvg", "fedavg", seed, served, local))
        rows.append(
            make_run(tmp_path, "Ditto", "ditto", seed, served, [a + 0.02 * (c + 1) for c, a in enumerate(local)])
        )
    return rows


def test_accuracies_are_read_for_a_round(runs: list[Run]) -> None:
    assert client_scores(runs[1].path, "served", 2, ACCURACY) == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.99}
    assert client_scores(runs[0].path, "served", 2, ACCURACY) == {}


def test_rows_are_compared_by_their_served_or_local_model(runs: list[Run]) -> None:
    lines = {line["method"]: line for line in over_clients(runs).to_dict("records")}
    assert [lines[name]["point"] for name in ("Local", "FedAvg", "Ditto")] == ["local", "served", "local"]
    assert lines["Ditto"]["gain-local"] == pytest.approx(0.05)
    assert (lines["Ditto"]["losing-local"], lines["FedAvg"]["losing-local"]) == ("0/12", "9/12")
    assert lines["Ditto"]["losing-fedavg"] == "3/12"  # the client with 0.99, in each seed
    assert pd.isna(lines["Local"]["gain-local"]) and lines["Local"]["losing-local"] == ""
    assert lines["Ditto"]["local-beats-local"] and not lines["Ditto"]["served-beats-local"]
    assert not lines["FedAvg"]["served-beats-local"] and not lines["FedAvg"]["local-beats-local"]
    assert lines["Ditto"]["alike"] and not lines["Local"]["alike"]
    assert lines["FedAvg"]["worst"] == 0.5
    scores = scores_by_block(runs)
    assert scores.shape == (3, 3)
    assert scores.loc[("v", 0), "FedAvg"] == pytest.approx(2.49 / 4)
    text = compared(over_clients(runs), ranks(scores), ACCURACY)
    assert "| Ditto ≈ | local |" in text
    assert "Significant gains over local training: Ditto." in text
    assert "All seeds have the same clients" not in text
    assert "Mean ranks over 3 blocks" in text
    assert compared(over_clients([]), None, ACCURACY) == ""


SERVED = [0.5, 0.6, 0.7, 0.8, 0.9, 0.4, 0.5, 0.6, 0.7, 0.8]
"""Accuracies of FedAvg's served model on ten clients, with a mean of 0.65."""


@pytest.fixture
def partial(tmp_path: Path) -> list[Run]:
    """Return three rows over ten clients, and FedAS, whose local models exist only for a cohort of two clients.

    On these two clients FedAS is 0.05 below FedAvg, but its mean of 0.80 is above FedAvg's mean over all clients.
    """
    rows = []
    for seed in (0, 1, 2):
        rows.append(make_run(tmp_path, "FedAvg", "fedavg", seed, SERVED, SERVED))
        rows.append(make_run(tmp_path, "FedProx", "fedprox", seed, [a + 0.01 for a in SERVED], SERVED))
        rows.append(make_run(tmp_path, "Local", "local", seed, [], [a - 0.1 for a in SERVED]))
        cohort = make_run(tmp_path, "FedAS", "fedas", seed, [], [], 10)
        with (cohort.path / "clients.csv").open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([[2, 3, "", 0.75], [2, 4, "", 0.85]])
        rows.append(cohort)
    return rows


def test_rows_are_compared_over_the_same_clients(partial: list[Run]) -> None:
    lines = {line["method"]: line for line in over_clients(partial).to_dict("records")}
    assert lines["FedAS"]["mean"] == pytest.approx(0.80)
    assert lines["FedAvg"]["mean"] == pytest.approx(0.65)
    assert {name: (line["clients"], line["members"]) for name, line in lines.items()} == {
        "FedAvg": (30, 30),
        "FedProx": (30, 30),
        "Local": (30, 30),
        "FedAS": (6, 30),
    }
    assert [name for name, line in lines.items() if not line["ranked"]] == ["FedAS"]
    # Paired over the two clients of the cohort: 0.75 against 0.8, and 0.85 against 0.9.
    assert lines["FedAS"]["gain-fedavg"] == pytest.approx(-0.05)
    assert lines["FedAS"]["losing-fedavg"] == "6/6"
    assert lines["FedProx"]["alike"] and not lines["FedAS"]["alike"]  # the best row covers all clients
    scores = scores_by_block(partial)
    assert sorted(scores.columns) == ["FedAvg", "FedProx", "Local"]
    text = compared(over_clients(partial), ranks(scores), ACCURACY)
    assert "| FedAS | local | 80.00 (6 of 30) |" in text
    assert "| FedAvg | served | 65.00 |" in text
    assert "cover too few clients: FedAS" in text


def test_rows_of_one_cohort_are_ranked(partial: list[Run]) -> None:
    """Cohorts depend on the seed alone, so all rows with only local models cover the same clients."""
    rows = [run for run in partial if run.row == "FedAS"]
    both = rows + [run._replace(row="FedPer") for run in rows]
    lines = over_clients(both).to_dict("records")
    assert [(line["ranked"], line["clients"], line["members"]) for line in lines] == [(True, 6, 30)] * 2
    assert "80.00 (6 of 30)" in compared(over_clients(both), None, ACCURACY)


def test_a_client_missing_in_a_row_is_dropped_from_all_rows() -> None:
    """After a dropped reply, 9 of 10 clients are enough for a rank."""
    all_ten = {0: {c: 0.5 + 0.01 * c for c in range(10)}}
    nine = {0: dict.fromkeys(range(9), 0.6)}
    eight = {0: dict.fromkeys(range(8), 0.9)}
    common = over_same_clients({"a": all_ten, "b": nine, "c": eight, "d": {0: {}}})
    assert common.keys() == {"a", "b", "d"}
    assert common["a"] == {0: {c: 0.5 + 0.01 * c for c in range(9)}}
    assert common["b"] == nine and common["d"] == {}


def test_diverged_runs_rank_last(runs: list[Run]) -> None:
    ranking = ranks(scores_by_block(runs))
    assert ranking is not None and ranking.mean["Ditto"] == 1
    remaining = [run for run in runs if (run.row, run.seed) != ("Ditto", 0)]
    assert ranks(scores_by_block(remaining)) is None  # two blocks
    diverged = ranks(scores_by_block(remaining, [("v", 0, "Ditto")]))
    assert diverged is not None and diverged.blocks == 3
    assert diverged.mean["Ditto"] == pytest.approx((3 + 1 + 1) / 3)


def test_the_critical_difference_agrees_with_the_pairs() -> None:
    """Demsar (2006), section 3.2.2: 2.569 is the quantile for four methods, so CD = 1.25 for 14 data sets."""
    rng = np.random.default_rng(0)
    ranking = ranks(pd.DataFrame(rng.normal([0, 0.5, 1, 2], size=(14, 4)), columns=list("abcd")))
    assert ranking is not None
    assert ranking.critical_difference == pytest.approx(1.25, abs=0.005)
    best, reach = ranking.mean.iloc[0], ranking.mean.iloc[0] + ranking.critical_difference
    assert ranking.ties_with_best() == [name for name, mean in ranking.mean.items() if mean <= reach] != [*"dcba"]
    low, high = ranking.interval(str(ranking.mean.index[0]))
    assert 1 <= low < best < high < 4


def test_gains_are_per_client_and_seed(runs: list[Run]) -> None:
    result = gains_of(runs, "v")
    assert result is not None
    local, gains = result
    assert local == pytest.approx({(seed, c): 0.70 + 0.01 * (c + seed) for seed in range(3) for c in range(4)})
    assert gains["Ditto"] == pytest.approx({(seed, c): 0.02 * (c + 1) for seed in range(3) for c in range(4)})
    assert gains["FedAvg"][2, 3] == pytest.approx(0.99 - 0.75) and "Local" not in gains
    assert gains_of([run for run in runs if run.row != "Local"], "v") is None


def test_gains_of_sites_are_means_over_the_seeds(runs: list[Run]) -> None:
    for run in runs:
        run.summary["sites"] = ["a", "b", "c", "d"]  # type: ignore[index]
    result = gains_of(runs, "v")
    assert result is not None
    assert result[1]["FedAvg"] == pytest.approx({(0, c): v - 0.71 - 0.01 * c for c, v in enumerate([0.5] * 3 + [0.99])})


def test_the_figures_of_a_table_are_drawn(runs: list[Run], tmp_path: Path) -> None:
    ranking = ranks(scores_by_block(runs))
    assert ranking is not None
    draw_ranks(ranking, tmp_path / "ranks.png", "a table", {run.row: run.method for run in runs})
    draw_gains(runs, tmp_path / "gains.png", "a table")
    draw_gains([run for run in runs if run.row != "Local"], tmp_path / "none.png", "a table")
    assert [(tmp_path / f"{name}.png").exists() for name in ("ranks", "gains", "none")] == [True, True, False]
