"""Compare the rows of a table: the clients' gains, the significant differences, and the costs."""

import math
import statistics
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from posy.data.settings import SITES
from posy.metrics import Metric, column_of
from posy.paths import is_file
from posy.report.recorded import client_rows, point_of
from posy.server_app.progress import coverage, members_of, metric_in, size
from posy.server_app.resume import CONFIG
from posy.settings import SettingsError
from posy.spread import Spread, spread
from posy.yaml12 import read_yaml

ALPHA = 0.05
"""Significance level."""
FEWEST_BLOCKS = 3
"""Minimum number of blocks for a rank test."""
FULL = 0.9
"""Minimum number of clients in a ranked row, as a fraction of the largest number of clients in any row (see
:func:`posy.spread.best`)."""

LEGEND = (
    "The scores are from the last round. Each method is scored by the model in the column `at`. `worst tenth`: mean "
    "over the tenth of the clients with the worst scores. `over Local`, `over FedAvg`: mean gain of a client compared "
    "with the same client under Local or FedAvg. `lose`: number of clients with a worse score than under Local or "
    "FedAvg, out of the clients of all seeds. `≈`: not significantly different from the best row. These differences, "
    "and the gains over local training, are tested with Wilcoxon's signed-rank test over the clients of all seeds at "
    "5 %, adjusted for the number of rows (Holm). With folds, they are tested with the corrected resampled t-test over "
    "the folds of all seeds instead. "
    "`6 of 60`: the figures cover 6 of the 60 clients that took part in all seeds. Rows are summarised over the "
    "clients that all rows cover. A row that covers fewer than nine tenths as many clients as the row with the most "
    "clients is summarised over its own clients, and is neither ranked nor the best row. "
    "`samples`: number of training samples, counted once per pass. `memory`: peak memory of the run's process."
)

FIXED_PARTITIONS = ("natural", "file", "given")
"""Partitions whose clients do not depend on the seed."""
SAME_CLIENTS = "All seeds have the same clients, so the tests and `lose` use each client's mean over the seeds."
MOST_PERMUTED = 13
"""Maximum number of differences for which SciPy computes an exact p-value despite ties."""
MOST_NAMED = 12
"""Maximum number of clients for which a table shows each client's score."""
WORST = -1e300
"""Score of a diverged run in the ranking. It is finite, so that the run can be ranked."""
Repeat = tuple[int, int]
"""A seed, and a fold of cross-validation (0 without folds)."""
Scores = Mapping[int, float]
"""Metrics, keyed by client. Clients for which the metric is undefined are omitted."""


def client_scores(path: Path, point: str, server_round: int, metric: Metric) -> dict[int, float]:
    """Return the clients' scores at an evaluation point in one round of a run, read from the run's directory."""
    column = column_of(point, metric.name)
    rows = client_rows(path, server_round)
    return {int(row["partition"]): float(row[column]) for row in rows if row.get(column)}


class Gain(NamedTuple):
    """The mean per-client gain of one method over another, from a paired comparison."""

    mean: float
    """Mean difference of the scores, which is positive for a better method."""
    losing: int
    clients: int
    """Number of clients with a worse score, and total number of clients. Each seed's clients count separately, unless
    all seeds have the same clients."""
    p: float
    """p-value of Wilcoxon's signed-rank test; 1 if all differences are 0."""


def gain(
    pairs: Sequence[tuple[Scores, Scores]],
    populations: Sequence[Hashable] | None = None,
    *,
    lower_is_better: bool = False,
) -> Gain | None:
    """Compare two methods client by client.

    Parameters
    ----------
    pairs : sequence of (Mapping, Mapping)
        For each seed, the scores of the method and of the other method, each keyed by client.
    populations : sequence, optional
        For each seed, an identifier of its clients; by default, each seed has other clients. If seeds have the same
        clients, a client's difference is its mean over these seeds, because the test needs independent differences.
    lower_is_better : bool
        Whether lower scores are better.

    Returns
    -------
    Gain or None
        None if no client has a score for both methods.

    References
    ----------
    F. Wilcoxon: Individual Comparisons by Ranking Methods, 1945.
    """
    sign = -1 if lower_is_better else 1
    of_clients: dict[tuple[Hashable, int], list[float]] = {}
    for population, (scores, other) in zip(populations or range(len(pairs)), pairs, strict=True):
        for client in sorted(scores.keys() & other.keys()):
            of_clients.setdefault((population, client), []).append(sign * (scores[client] - other[client]))
    if not of_clients:
        return None
    differences = np.array([statistics.fmean(values) for values in of_clients.values()])
    return Gain(float(differences.mean()), int((differences < 0).sum()), len(differences), signed_rank_p(differences))


def signed_rank_p(differences: np.ndarray) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test, ignoring differences of 0; 1 if all are 0.

    For a few differences with ties, SciPy takes seconds to compute the exact p-value. This function instead computes
    the rank sums for all 2^n sign patterns in one matrix product.
    """
    signed = differences[differences != 0]
    if not len(signed):
        return 1.0
    ranks = stats.rankdata(np.abs(signed))
    if len(differences) > MOST_PERMUTED or (len(signed) == len(differences) == len(np.unique(ranks))):
        return float(stats.wilcoxon(differences).pvalue)
    signs = np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks)) & 1
    sums, observed = signs @ ranks, ranks[signed > 0].sum()  # ranks are multiples of 1/2, so sums are exact
    return min(1.0, 2 * min(float((sums <= observed).mean()), float((sums >= observed).mean())))


def gain_over_folds(
    pairs: Mapping[Repeat, tuple[Scores, Scores]], folds: int, *, lower_is_better: bool = False
) -> Gain | None:
    """Compare two methods over the folds of one or more seeds.

    A client's score is its mean over the folds of a seed. The test is the corrected resampled t-test on the mean
    difference over the clients in each of the J folds: t = mean / sqrt((1 / J + n_test / n_train) variance) with J - 1
    degrees of freedom and n_test / n_train = 1 / (folds - 1). The folds of a seed share training samples, and the seeds
    share all samples, so an uncorrected test would find too many differences.

    Parameters
    ----------
    pairs : mapping
        The scores of the method and of the other method in each fold, each keyed by client.
    folds : int
        Number of folds per seed.
    lower_is_better : bool
        Whether lower scores are better.

    References
    ----------
    C. Nadeau, Y. Bengio: Inference for the Generalization Error, 2003, section 5. R. Bouckaert, E. Frank: Evaluating
    the Replicability of Significance Tests for Comparing Learning Algorithms, 2004.
    """
    sign = -1 if lower_is_better else 1
    of_clients: dict[tuple[int, int], list[float]] = {}
    of_folds = []
    for (seed, _), (scores, other) in sorted(pairs.items()):
        differences = {c: sign * (scores[c] - other[c]) for c in sorted(scores.keys() & other.keys())}
        for client, difference in differences.items():
            of_clients.setdefault((seed, client), []).append(difference)
        if differences:
            of_folds.append(statistics.fmean(differences.values()))
    if not of_folds:
        return None
    means = [statistics.fmean(differences) for differences in of_clients.values()]
    mean, count = statistics.fmean(of_folds), len(of_folds)
    variance = statistics.variance(of_folds) if count > 1 else 0.0
    p = 1.0
    if variance:
        t = mean / math.sqrt((1 / count + 1 / (folds - 1)) * variance)
        p = float(2 * stats.t.sf(abs(t), count - 1))
    return Gain(statistics.fmean(means), sum(value < 0 for value in means), len(means), p)


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm, 1979)."""
    from statsmodels.stats.multitest import multipletests  # noqa: PLC0415 - takes a second

    return [float(value) for value in multipletests(p, method="holm")[1]] if p else []


def over_same_clients(rows: Mapping[str, Mapping[Repeat, Scores]]) -> dict[str, dict[Repeat, dict[int, float]]]:
    """Drop the rows that cover too few clients, and return the scores of the clients that all other rows cover.

    Means over different clients, for example over a cohort and over all clients, are not comparable.

    Parameters
    ----------
    rows : mapping
        Scores of each row, keyed by seed and fold, and then by client. A fold without scores has no effect.

    Returns
    -------
    dict
        Scores of the clients that all remaining rows cover. A row is dropped if, for any seed with scores, it covers
        fewer than :data:`FULL` times as many clients as the largest row.
    """
    measured = {row: {seed: scores for seed, scores in seeds.items() if scores} for row, seeds in rows.items()}
    fullest: dict[Repeat, int] = {}
    for seeds in measured.values():
        for seed, scores in seeds.items():
            fullest[seed] = max(len(scores), fullest.get(seed, 0))
    full = {
        row: seeds
        for row, seeds in measured.items()
        if all(len(scores) >= FULL * fullest[seed] for seed, scores in seeds.items())
    }
    shared = {
        seed: set.intersection(*(set(seeds[seed]) for seeds in full.values() if seed in seeds))
        for seed in fullest
        if any(seed in seeds for seeds in full.values())
    }
    return {
        row: {seed: {c: scores[c] for c in sorted(shared[seed])} for seed, scores in seeds.items()}
        for row, seeds in full.items()
    }


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of methods over blocks. Each block is one seed of one data set.

    ``mean`` is each method's mean rank, best (1) first. ``friedman`` is the p-value of Friedman's test of the
    hypothesis that all methods are equal. ``pairs`` contains the p-value of each pair of methods (Nemenyi's test), and
    ``each`` the rank of each method in each block.
    """

    mean: "pd.Series[float]"
    friedman: float
    pairs: pd.DataFrame
    each: pd.DataFrame

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.each)

    def ties_with_best(self) -> list[str]:
        """Return the best method and the methods that do not differ significantly from it."""
        best = str(self.mean.index[0])
        if self.friedman >= ALPHA:
            return [str(name) for name in self.mean.index]
        return [str(name) for name in self.mean.index if name == best or self.pairs.loc[best, name] >= ALPHA]

    @property
    def critical_difference(self) -> float:
        """The smallest significant difference between two mean ranks (Nemenyi's test)."""
        count = len(self.mean)
        quantile = float(stats.studentized_range.ppf(1 - ALPHA, count, np.inf)) / math.sqrt(2)
        return quantile * math.sqrt(count * (count + 1) / (6 * self.blocks))

    def interval(self, method: str) -> tuple[float, float]:
        """Return the 95 % interval of a method's mean rank over the blocks (Student's t), within the possible ranks."""
        ranks = self.each[method]
        half = float(stats.t.ppf(1 - ALPHA / 2, self.blocks - 1) * ranks.std(ddof=1)) / math.sqrt(self.blocks)
        return max(1.0, self.mean[method] - half), min(float(len(self.mean)), self.mean[method] + half)


def ranks(scores: pd.DataFrame) -> Ranks | None:
    """Rank methods by their scores and test the differences.

    Parameters
    ----------
    scores : pandas.DataFrame, (blocks, methods)
        A higher score is better. Blocks that lack a method are skipped.

    Returns
    -------
    Ranks or None
        None for fewer than three blocks or methods.

    References
    ----------
    J. Demšar: Statistical Comparisons of Classifiers over Multiple Data Sets, 2006.
    """
    complete = scores.dropna(axis="index")
    if len(complete) < FEWEST_BLOCKS or complete.shape[1] < 3:
        return None
    import scikit_posthocs  # noqa: PLC0415 - takes seconds

    values: npt.NDArray[np.float64] = complete.to_numpy(np.float64)
    each = pd.DataFrame(stats.rankdata(-values, axis=1), columns=complete.columns)
    mean = each.mean().sort_values(kind="stable")
    equal = (values == values[:, :1]).all()
    friedman = 1.0 if equal else float(stats.friedmanchisquare(*values.T).pvalue)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pairs = scikit_posthocs.posthoc_nemenyi_friedman(values)
    pairs.index = pairs.columns = complete.columns
    return Ranks(mean, friedman, pairs.fillna(1.0), each)


def last_round(summary: Mapping[str, Any], point: str) -> Mapping[str, Any]:
    """Return the statistics of a run's last round, or an empty mapping if that round was not evaluated."""
    figures: Mapping[str, Any] = summary[point]["last"] or {}
    return figures if figures.get("round") == summary["rounds"] else {}


class Run(NamedTuple):
    """A finished run in a table."""

    variant: str
    row: str
    method: str
    seed: int
    summary: Mapping[str, Any]
    path: Path
    fold: int = 0

    @property
    def repeat(self) -> Repeat:
        """The seed and the fold of the run."""
        return self.seed, self.fold

    @property
    def point(self) -> str:
        """The evaluation point at which the run's method is scored."""
        return point_of({"method": self.method, **self.summary})

    @property
    def population(self) -> Hashable:
        """Identifier of the run's clients; a partition that is drawn has other clients for each seed of the data."""
        config = self.path / CONFIG
        settings = read_yaml(config)["settings"] if is_file(config) else {}
        if settings.get("dataset") == SITES or settings.get("partition") in FIXED_PARTITIONS:
            return "fixed"
        seed = settings.get("split-seed", -1)
        return self.seed if seed == -1 else f"split-seed {seed}"

    @property
    def comparable(self) -> bool:
        """Whether the scores of individual clients are available; secure aggregation hides them."""
        return "client-scores" not in self.summary

    @property
    def metric(self) -> Metric:
        """The metric of the run."""
        return metric_in(self.summary)

    def scores(self, point: str) -> dict[int, float]:
        """Return the clients' scores in the last round."""
        return client_scores(self.path, point, self.summary["rounds"], self.metric)


def check_metrics(runs: Sequence[Run]) -> None:
    """Raise :class:`SettingsError` unless all runs have the same metric."""
    names = {run.metric.name: run for run in runs}
    if len(names) > 1:
        (first, run), (second, other), *_ = names.items()
        raise SettingsError(
            f"{run.row} is scored by {first}, but {other.row} by {second}; compare only runs with the same metric"
        )


def over_clients(runs: Sequence[Run]) -> pd.DataFrame:
    """Compare the rows of each variant client by client, each row at its method's evaluation point.

    Returns
    -------
    pandas.DataFrame
        One line per variant and row, with the following columns:

        - ``mean``, ``worst``, ``tenth``, ``std`` and ``jain`` over the clients that all rows cover
          (:func:`over_same_clients`), as means over the seeds
        - ``clients``: number of these clients over all seeds
        - ``members``: number of clients that took part
        - ``ranked``: whether the row covers enough clients
        - ``gain-local`` and ``gain-fedavg``: gain over local training and over FedAvg, if the variant has such a row
        - ``losing-local`` and ``losing-fedavg``: number of clients that lose, out of all clients, such as ``3/20``
        - ``newcomers-served`` and ``newcomers-local``: scores of hold-out clients
        - ``alike``: whether the row does not differ significantly from the variant's best row (Wilcoxon, Holm)
        - ``served-beats-local`` and ``local-beats-local``: whether clients gain significantly over local training at
          this point
        - ``beats-fedavg``: whether clients gain significantly over FedAvg
        - ``same``: whether all seeds have the same clients
        - ``samples`` and ``memory``: costs of the row
    """
    lines = []
    for variant in dict.fromkeys(run.variant for run in runs):
        rows: dict[str, list[Run]] = {}
        for run in runs:
            if run.variant == variant:
                rows.setdefault(run.row, []).append(run)
        lines += [{"variant": variant, **line} for line in _compare_rows(rows)]
    return pd.DataFrame(lines)


def _compare_rows(rows: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Return the lines of :func:`over_clients` for the rows of one variant."""
    scores = {
        (name, point): {run.repeat: run.scores(point) for run in row_runs}
        for name, row_runs in rows.items()
        for point in ("served", "local")
    }
    points = {name: row_runs[0].point for name, row_runs in rows.items()}
    lower = next(iter(rows.values()))[0].metric.lower_is_better
    populations = {run.repeat: run.population for row_runs in rows.values() for run in row_runs}
    folds = max(run.summary.get("folds", 0) for row_runs in rows.values() for run in row_runs)

    @cache
    def gain_over(name: str, point: str, other: str | None) -> Gain | None:
        if other is None:
            return None
        tested, baseline = scores[name, point], scores[other, points[other]]
        pairs = {repeat: (tested[repeat], baseline[repeat]) for repeat in tested.keys() & baseline.keys()}
        if folds:
            return gain_over_folds(pairs, folds, lower_is_better=lower)
        return gain(list(pairs.values()), [populations[repeat] for repeat in pairs], lower_is_better=lower)

    of_rows = {name: scores[name, points[name]] for name in rows}
    same = over_same_clients(of_rows)
    lines = {name: _summarise_clients(row_runs, of_rows[name], same.get(name)) for name, row_runs in rows.items()}
    best = max(same, key=lambda name: _goodness(lines[name]["mean"], lower))
    different = _significant({name: gain_over(name, points[name], best) for name in same}, lower=True)
    # Reversed, so that the first row of each method is kept.
    by_method = {row_runs[0].method: name for name, row_runs in reversed(rows.items())}
    baselines = {method: by_method.get(method) for method in ("local", "fedavg")}
    beats = {
        point: _significant(
            {name: gain_over(name, point, baselines["local"]) for name in rows if name != baselines["local"]},
            lower=False,
        )
        for point in ("served", "local")
    }
    fedavg = baselines["fedavg"]
    over_fedavg = {name: gain_over(name, points[name], fedavg) for name in rows if name != fedavg}
    beats_fedavg = _significant(over_fedavg, lower=False)
    for name, line in lines.items():
        for label, other in baselines.items():
            entry = gain_over(name, points[name], other) if other != name else None
            line[f"gain-{label}"] = entry.mean if entry else float("nan")
            line[f"losing-{label}"] = f"{entry.losing}/{entry.clients}" if entry else ""
        line["alike"] = not different.get(name, True)
        line.update({f"{point}-beats-local": beats[point].get(name, False) for point in beats})
        line["beats-fedavg"] = beats_fedavg.get(name, False)
        line["same"] = not folds and len(populations) > 1 and len(set(populations.values())) == 1
    return [{"method": name, **line, **_average_extras(rows[name])} for name, line in lines.items()]


def _goodness(score: float, lower_is_better: bool) -> float:
    """Return a number that is higher for better scores, and is lowest for NaN."""
    if np.isnan(score):
        return -math.inf
    return -score if lower_is_better else score


def _summarise_clients(
    runs: Sequence[Run], measured: Mapping[Repeat, Scores], shared: Mapping[Repeat, Scores] | None
) -> dict[str, Any]:
    """Return statistics of a row's scores over the row's clients.

    ``measured`` contains the scores of the row's clients by seed. ``shared`` contains the scores of the clients that
    all rows cover, or is None if the row covers too few of them.
    """
    used, lower = measured if shared is None else shared, runs[0].metric.lower_is_better
    spreads = [over for scores in used.values() if (over := _spread_over(scores, lower))]
    line: dict[str, Any] = {"point": runs[0].point}
    worst = "max" if lower else "min"
    for column, key in (("mean", "mean"), ("worst", worst), ("tenth", "tenth"), ("std", "std"), ("jain", "jain")):
        line[column] = average(dict(over)[key] for over in spreads)
    line["clients"] = sum(over["clients"] for over in spreads)
    line["members"] = sum(members_of(run.summary) for run in runs if measured[run.repeat])
    line["ranked"] = shared is not None
    return line


def _average_extras(runs: Sequence[Run]) -> dict[str, float]:
    """Return the scores of hold-out clients and the costs of a row, averaged over its runs."""
    extras = {}
    for point in ("served", "local"):
        newcomers = [(run.summary.get("newcomers") or {}).get(point) or {} for run in runs]
        extras[f"newcomers-{point}"] = average(entry.get("mean") for entry in newcomers)
    extras["samples"] = average(run.summary["samples"] for run in runs)
    extras["memory"] = average(run.summary.get("peak-memory") for run in runs)
    return extras


def scores_by_block(runs: Sequence[Run], diverged: Iterable[tuple[str, int, str]] = ()) -> pd.DataFrame:
    """Return the rows' ranking scores in the last round, ``(variants x seeds, rows)``, each at its method's point.

    The score is the mean metric over the clients that all rows cover, negated if lower values are better. A row that
    covers too few clients in any variant is dropped. ``diverged`` lists diverged runs as (variant, seed, row), which
    rank last.
    """
    blocks: dict[tuple[str, int], dict[str, float]] = {}
    for variant, seed, row in diverged:
        blocks.setdefault((variant, seed), {})[row] = WORST
    partial: set[str] = set()
    for variant in dict.fromkeys(run.variant for run in runs):
        of_rows: dict[str, dict[Repeat, dict[int, float]]] = {}
        for run in runs:
            if run.variant == variant:
                of_rows.setdefault(run.row, {})[run.repeat] = run.scores(run.point)
                lower = run.metric.lower_is_better
        same = over_same_clients(of_rows)
        partial |= of_rows.keys() - same.keys()
        for row, repeats in of_rows.items():
            goodness: dict[int, list[float]] = {}
            for repeat in repeats:
                over = _spread_over(same.get(row, {}).get(repeat, {}), lower)
                goodness.setdefault(repeat[0], []).append(_goodness(over["mean"], lower) if over else float("nan"))
            for seed, values in goodness.items():  # the folds of a seed are one block
                blocks.setdefault((variant, seed), {})[row] = statistics.fmean(values)
    return pd.DataFrame.from_dict(blocks, orient="index").drop(columns=[*partial])


def compared(clients: pd.DataFrame, ranked: Ranks | None, metric: Metric) -> str:
    """Return the comparison of a table's rows as Markdown."""
    header = ["method", "at", "mean", "worst client", "worst tenth", "std", "Jain"]
    header += ["over Local", "lose", "over FedAvg", "lose", "samples", "memory"]
    new = len(clients) and clients[["newcomers-served", "newcomers-local"]].notna().any(axis=None)
    header += ["newcomers, served", "newcomers, local"] if new else []
    parts = []
    for variant, rows in clients.groupby("variant", sort=False) if len(clients) else ():
        lines = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
        for row in rows.to_dict("records"):
            cells = [row["method"] + (" ≈" if row["alike"] else ""), row["point"]]
            covered = f" ({coverage(row['clients'], row['members'])})" if row["clients"] < row["members"] else ""
            cells.append(metric.number(row["mean"]) + covered)
            cells += [metric.number(row[key]) for key in ("worst", "tenth", "std")]
            cells.append("" if pd.isna(row["jain"]) else f"{row['jain']:.4f}")
            for other in ("local", "fedavg"):
                cells += [metric.number(row[f"gain-{other}"], sign="+"), row[f"losing-{other}"]]
            cells += [f"{row['samples']:,.0f}", "" if pd.isna(row["memory"]) else size(row["memory"])]
            cells += [metric.number(row[f"newcomers-{point}"]) for point in ("served", "local")] if new else []
            lines.append(cells)
        parts += [f"## Clients{': ' * bool(variant)}{variant}"]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
        records = rows.to_dict("records")
        winners = {
            "local training": [row["method"] for row in records if row[f"{row['point']}-beats-local"]],
            "FedAvg": [row["method"] for row in records if row["beats-fedavg"]],
        }
        parts += [f"Significant gains over {other}: {', '.join(names)}." for other, names in winners.items() if names]
    parts += [LEGEND] if parts else []
    parts += [SAME_CLIENTS] if len(clients) and clients["same"].any() else []
    if ranked is not None:
        order = ", ".join(f"{name} {rank:.2f}" for name, rank in ranked.mean.items())
        ties = ranked.ties_with_best()
        partial = dict.fromkeys(row["method"] for row in clients.to_dict("records") if not row["ranked"])
        unranked = f" Not ranked, because they cover too few clients: {', '.join(partial)}." if partial else ""
        parts.append(
            f"## Ranks\n\nMean ranks over {ranked.blocks} blocks (data sets x seeds; diverged runs are last): {order}. "
            f"Friedman's test of the hypothesis that all are equal: p = {ranked.friedman:.2g}. "
            f"Not significantly different from the best (Nemenyi, 5 %): {', '.join(ties)}.{unranked} Each block counts "
            "once, so with few blocks this test finds fewer differences than the test over the clients."
        )
    return "\n" + "\n\n".join(parts) + "\n" if parts else ""


def per_client(runs: Sequence[Run], metric: Metric) -> str:
    """Return the score of each named client as Markdown: the mean and the standard deviation over the seeds.

    The result omits variants without client names, and variants with more than :data:`MOST_NAMED` clients.
    """
    parts = []
    for variant in dict.fromkeys(run.variant for run in runs):
        of_variant = [run for run in runs if run.variant == variant]
        names = of_variant[0].summary.get("sites") or []
        if not names or len(names) > MOST_NAMED or not all(names):
            continue
        lines = [["method", "at", *names], ["---", "---", *["---:"] * len(names)]]
        for row in dict.fromkeys(run.row for run in of_variant):
            of_row = [run for run in of_variant if run.row == row]
            scores = [run.scores(run.point) for run in of_row]
            cells = [[each[client] for each in scores if client in each] for client in range(len(names))]
            texts = [metric.number(average(values)) + _over_seeds(values, metric) for values in cells]
            lines.append([row, of_row[0].point, *texts])
        parts.append(f"## Each client{': ' * bool(variant)}{variant}")
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n" + "\n\n".join(parts) + "\n" if parts else ""


def _over_seeds(values: Sequence[float], metric: Metric) -> str:
    defined = [value for value in values if not math.isnan(value)]
    return f" ± {metric.number(statistics.stdev(defined))}" if len(defined) > 1 else ""


def _significant(gains: Mapping[str, Gain | None], *, lower: bool) -> dict[str, bool]:
    """Return whether each comparison shows a significant gain (with ``lower``, a loss) after Holm's adjustment."""
    tested = {name: result for name, result in gains.items() if result is not None}
    adjusted = holm([result.p for result in tested.values()])
    return {
        name: p < ALPHA and (result.mean < 0 if lower else result.mean > 0)
        for (name, result), p in zip(tested.items(), adjusted, strict=True)
    }


def average(values: Iterable[Any]) -> float:
    """Return the mean of the values that are not NaN, or NaN if all are NaN. pandas would round partial sums."""
    numbers = [float(value) for value in values if not pd.isna(value)]
    return statistics.fmean(numbers) if numbers else float("nan")


def _spread_over(scores: Scores, lower_is_better: bool) -> Spread | None:
    """Return the spread over clients of equal weight, or None if there are no clients."""
    return spread([*scores.values()], [1.0] * len(scores), lower_is_better=lower_is_better)
