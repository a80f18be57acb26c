"""Show a run's progress, and the tables of its task and its results."""

import logging
import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from posy.listing import WIDTH, as_lines, laid_out, shortened
from posy.metrics import METRICS, Metric, column_of
from posy.server_app.resume import WITHOUT_MODEL
from posy.strategies.run_settings import RunSettings

MAX_LINES = 200
"""Approximate maximum number of lines that a run writes to a log, regardless of its number of rounds."""
MAX_NAMED = 10
"""Maximum number of clients named in a line of the results table."""
POOLED = "all samples"
"""Label of a score over the test samples of all clients, which is all that the server knows with secure aggregation."""
ABSENT = "n/a"
"""Table cell for a metric that needs individual clients' scores, which secure aggregation hides from the server."""
POOLED_NOTE = "pooled over the clients; each client's score is in its node's log"
"""Line of the results table for a run with secure aggregation."""
MAX_ROWS = 50
"""Maximum number of sites in the task table."""
PACE_ROUNDS = 20
"""Number of recent rounds over which the time per round is averaged. The first round is slow, because it loads data."""
FIRST_SECONDS = 10.0
"""Age of the first round, in seconds, from which Posy estimates the run's duration from the clients trained so far."""
WITHOUT_MODEL_TITLE = "without final model"
"""Start of the line that lists the clients to which the final model was not delivered."""
TASK_COLUMNS = ("site", "client", "training", "test", "samples", "classes", "skipped", "node settings")


class Progress:
    """Shows a run's rounds on a stream, as a live bar in a terminal or as plain lines in a log.

    In a log, such as the stream that Flower copies to ``flwr log``, a line appears after every n-th round. A log
    therefore contains at most about 200 of these lines. ``done`` is the number of ``rounds`` that had finished before
    this process started. ``clock`` returns the time in seconds.
    """

    def __init__(
        self,
        rounds: int,
        metric: Metric,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or time.monotonic
        self._metric = metric
        self._columns = {point: column_of(point, metric.name) for point in ("served", "local")}
        self._rounds = rounds
        self._done = done
        self._stream = stream or sys.stdout
        self._every = math.ceil(rounds / MAX_LINES)
        # Flower mirrors a stream by replacing its `write`, and a bar would fill `flwr log` with escape codes.
        live = self._stream.isatty() and "write" not in vars(self._stream)
        self._bar = _bar(self._stream) if live else None
        self._stack = ExitStack()
        self._latest: dict[str, tuple[int, str]] = {}  # last round and text of each metric, keyed by name
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_ROUNDS)  # rounds and the times at which they ended
        self._estimated = False

    def __enter__(self) -> Self:
        self._ends.append((self._done, self._clock()))
        if self._bar is not None:
            self._stack.enter_context(self._bar)
            self._task = self._bar.add_task("", total=self._rounds, completed=self._done, figures="")
            self._redirect_logs()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def note_trained(self, trained: int, clients: int, share: float) -> None:
        """Estimate the run's duration in a long first round. A log shows the first estimate, a bar the newest one.

        Parameters
        ----------
        trained, clients : int
            Number of clients that have been trained in this round, and of all its clients.
        share : float
            Share of the round's training samples that the clients have processed.
        """
        seconds = self._clock() - self._ends[0][1]
        if len(self._ends) > 1 or trained == clients or seconds < FIRST_SECONDS:
            return
        total = duration(seconds / share * (self._rounds - self._done))
        text = f"{trained} of {clients} clients trained in {duration(seconds)}; the run takes about {total}"
        if self._bar is not None:
            self._bar.update(self._task, figures=text, refresh=True)
        elif not self._estimated:
            self._write(self._done + 1, text)
        self._estimated = True

    def add(self, row: Mapping[str, Any], clients: int) -> None:
        """Show a finished round.

        Parameters
        ----------
        row : mapping
            The round's row in ``rounds.jsonl``.
        clients : int
            Number of clients that a round can evaluate. If a metric covers fewer, it is shown with the number covered.
        """
        missing = len(row["missing"])
        dropped = len(row["dropped"])
        notes = [f"{clients - missing} of {clients} clients"] if missing else []
        notes += [f"{dropped} dropped"] if dropped else []
        served, local, loss = ((row[column] or {}).get("mean") for column in (*self._columns.values(), "train_loss"))
        central = row.get("central", {}).get(self._metric.name)
        remarks = {point: _remark(row[column] or {}, clients, missing) for point, column in self._columns.items()}
        self.update(row["round"], served, local, loss, "  ".join(notes), remarks, central)

    def update(
        self,
        server_round: int,
        served: float | None,
        local: float | None,
        loss: float | None = None,
        present: str = "",
        remarks: Mapping[str, str] | None = None,
        central: float | None = None,
    ) -> None:
        """Show a finished round; if a metric is missing, repeat its last value and name that value's round.

        Parameters
        ----------
        server_round : int
            Number of the round.
        served, local : float or None
            Values of the metric: means over the clients, or scores over all samples.
        loss : float, optional
            Mean training loss.
        present : str
            A note about missing clients and dropped replies.
        remarks : mapping of str to str, optional
            Remarks about the samples and clients that a metric covers, keyed by ``served`` or ``local``.
        central : float, optional
            The metric of the served model on the central test set.
        """
        self._ends.append((server_round, self._clock()))
        values = {"served": served, "local": local, "central": central}
        texts = {name: self._metric.format(value) for name, value in values.items()}
        texts["loss"] = "" if loss is None else f"{loss:.4f}"
        remarks = remarks or {}
        self._latest |= {name: (server_round, text + remarks.get(name, "")) for name, text in texts.items() if text}
        parts = [
            f"{name} {text}" + ("" if last_round == server_round else f" (round {last_round})")
            for name, (last_round, text) in self._latest.items()
        ]
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        pace, remaining = (end - start) / max(1, last - first), self._rounds - server_round
        parts += [present] if present else []
        parts += [f"{pace:.2f} s/round"] + ([f"{duration(pace * remaining)} left"] if remaining > 0 else [])
        figures = "  ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, completed=server_round, figures=figures, refresh=True)
        elif server_round in (self._done + 1, self._rounds) or server_round % self._every == 0:
            self._write(server_round, figures)

    def _write(self, server_round: int, text: str) -> None:
        """Write the line of a round to the log in a single write, because other processes write to the log too."""
        self._stream.write(f"round {server_round:{len(str(self._rounds))}d}/{self._rounds}  {text}\n")
        self._stream.flush()

    def _redirect_logs(self) -> None:
        """Redirect log lines to the bar's console, which keeps them above the bar."""
        for logger in (logging.getLogger(), logging.getLogger("flwr")):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.__stderr__):
                    self._stack.callback(handler.setStream, handler.stream)
                    handler.setStream(sys.stdout)  # the bar has replaced sys.stdout


def task_table(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> str:
    """Return a table with a row for each of a run's sites, followed by facts about the agreed task.

    Parameters
    ----------
    rows : sequence of mapping
        The facts about each site, keyed by :data:`TASK_COLUMNS`. Empty columns are skipped.
    facts : mapping of str to str
        Facts about the task, keyed by name. Long facts are wrapped.
    """
    columns = [name for name in TASK_COLUMNS if any(row.get(name, "") != "" for row in rows)]
    cells = [[shortened(str(row.get(name, ""))) for name in columns] for row in rows[:MAX_ROWS]]
    lines = as_lines(laid_out("", columns, cells, right=("client", "training", "test", "skipped")))
    lines += [f"… and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else []
    indent = " " * (max(map(len, facts)) + 2)
    for line in _aligned(facts):
        lines += textwrap.wrap(line[:1000], WIDTH, subsequent_indent=indent, max_lines=4, placeholder=" …")
    return "\n".join(["the task of this run", *lines])


def results_table(summary: Mapping[str, Any], path: Path) -> str:
    """Return a run's table of results, with rows for the last and the best round at each evaluation point.

    Parameters
    ----------
    summary : mapping
        The content of ``summary.json``.
    path : Path
        The run's directory.
    """
    metric = metric_in(summary)
    rounds = f"{summary['rounds']} round{'' if summary['rounds'] == 1 else 's'}"
    is_pooled = any("samples" in (summary[point]["last"] or {}) for point in ("served", "local"))
    figures = ("round", *((POOLED,) if is_pooled else ("mean ± std", "min", "max", "weighted", "Jain")), "clients")
    members = members_of(summary)
    rows = []
    for point in ("served", "local"):
        # The best round on the test splits gives an upper bound for the metric, not an estimate.
        choice = "best" if summary[point]["best"] else "upper-bound"
        for name, scores in (("last", summary[point]["last"]), (choice, summary[point][choice])):
            cells = _cells(scores, members, metric) if scores else ["not evaluated", *[""] * (len(figures) - 1)]
            rows.append([f"{point} model, {name.replace('-', ' ')}", *cells])
    for point, scores in (summary.get("newcomers") or {}).items():
        if point != "clients" and scores:
            newcomers = len(summary["newcomers"]["clients"])
            cells = _cells({"round": summary["rounds"], **scores}, newcomers, metric)
            rows.append([f"{point} model, newcomers", *cells])
    notes = {
        "system accuracy": _percent(summary["system-accuracy"]),
        "none fits": _none_fits(summary),
        "central test set": _central_note(summary, metric),
        "clients": _clients(summary),
        "scores": POOLED_NOTE if "client-scores" in summary else "",
        "privacy": guarantee(summary["privacy"]) if "privacy" in summary else "",
        "small clients": ", ".join(
            f"{len(clients)} with {reason.replace('-', ' ')}"
            for reason, clients in summary.get("small-clients", {}).items()
        ),
        "folds": _folds(summary),
        "stopped early": _early_stop(summary),
        "seed": str(summary["seed"]),
        "time": duration(summary["seconds"]),
        "bytes": f"{size(summary['bytes-up'])} up, {size(summary['bytes-down'])} down",
        "dropped replies": ", ".join(f"{count} x {reason}" for reason, count in summary["dropped"].items()),
        **{words: _limited(summary, key) for key, words in LIMITED_WORDS.items() if key in summary},
        "results": str(path),
        **({WITHOUT_MODEL_TITLE: _undelivered(summary, path)} if summary.get(WITHOUT_MODEL) else {}),
    }
    title = f"{summary['method']} on {summary['dataset']}: {summary['status']} after {rounds}"
    lines = as_lines(laid_out("", (metric.title, *figures), rows, right=figures))
    warnings = [f"warning: {text}" for text in summary.get("notices", ())]
    return "\n".join([title, *lines, *_metrics_table(summary), *_central_table(summary), *_aligned(notes), *warnings])


def _metrics_table(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with all metrics of the last evaluation, for the model by which the method is scored."""
    point, last = summary.get("point", "served"), summary.get("metrics") or {}
    pooled = summary.get("pooled", {}).get(point, {})
    rows = []
    for metric in METRICS.values():
        over_clients = last.get(column_of(point, metric.name))
        if over_clients is None:
            continue
        value = pooled.get("metrics", {}).get(metric.name)
        ends = pooled.get("intervals", {}).get(metric.name)
        interval = f"{metric.number(ends[0])} to {metric.format(ends[1])}" if ends else ""
        if "samples" in over_clients:  # with secure aggregation
            value, cells = over_clients["mean"], [ABSENT] * 3
        else:
            ordered = ("max", "min") if metric.lower_is_better else ("min", "max")
            mean = f"{metric.number(over_clients['mean'])} ± {metric.format(over_clients['std'])}"
            cells = [mean, *(metric.format(over_clients[end]) for end in ordered)]
        rows.append([metric.title, *cells, str(over_clients["clients"]), metric.format(value), interval])
    columns = ("mean ± std", "worst", "best", "clients", POOLED, "95 % interval")
    return as_lines(laid_out("", (f"{point} model", *columns), rows, right=columns)) if rows else []


def central_scores(summary: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the evaluation point and the scores of a run on its central test set, or None if it has no such scores.

    It is the point by which the method is scored, or the other one if the models of the first are not available.
    """
    central, point = summary.get("central", {}), summary.get("point", "served")
    return next(((at, central[at]) for at in (point, "served", "local") if at in central), None)


def _none_fits(summary: Mapping[str, Any]) -> str:
    """Return the rate of false alarms of the router, such as ``4.31 % false alarms on 348 test samples``."""
    entry = summary.get("none-fits", {})
    if "reason" in entry:
        return f"not calibrated: {entry['reason']}"
    if not entry:
        return ""
    limit = f"threshold for {100 * entry['alpha']:g} % on {entry['validation-samples']} validation samples"
    if not entry["test-samples"]:
        return limit
    return f"{_percent(entry['false-alarm-rate'])} false alarms on {entry['test-samples']} test samples, {limit}"


def _central_note(summary: Mapping[str, Any], metric: Metric) -> str:
    """Return the metric of a run on its central test set, such as ``81.20 % (served model), 500 samples``."""
    if not (scored := central_scores(summary)):
        return ""
    point, scores = scored
    value = _on_central(scores, metric) or "not defined"
    models = "model" if "intervals" in scores else "models"
    return f"{value} ({point} {models}), {summary['central']['samples']} samples"


def _on_central(scores: Mapping[str, Any], metric: Metric) -> str:
    """Return the score of a single model, or the mean and the standard deviation over clients' models or over folds."""
    over_clients = scores["metrics"].get(metric.name)
    if over_clients is None or over_clients["std"] is None or "intervals" in scores:
        return metric.format(over_clients and over_clients["mean"])
    return f"{metric.number(over_clients['mean'])} ± {metric.format(over_clients['std'])}"


def _central_table(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with all metrics on the central test set."""
    if not (scored := central_scores(summary)):
        return []
    point, scores = scored
    single = "intervals" in scores
    count = "folds" if any("folds" in spread for spread in scores["metrics"].values()) else "clients"
    rows = []
    for name, over_clients in scores["metrics"].items():
        metric = METRICS[name]
        if single:
            ends = scores["intervals"].get(name)
            cells = [f"{metric.number(ends[0])} to {metric.format(ends[1])}" if ends else ""]
        else:
            ordered = ("max", "min") if metric.lower_is_better else ("min", "max")
            cells = [*(metric.format(over_clients[end]) for end in ordered), str(over_clients[count])]
        rows.append([metric.title, _on_central(scores, metric), *cells])
    columns = ("score", "95 % interval") if single else ("mean ± std", "worst", "best", count)
    return as_lines(laid_out("", (f"{point} model, central test set", *columns), rows, right=columns))


def metric_in(summary: Mapping[str, Any]) -> Metric:
    """Return the metric of a run; runs of earlier versions report accuracy."""
    return METRICS[summary.get("metric", "accuracy")]


LIMITED_WORDS = {
    "clipped": "updates scaled down",
    "discarded": "updates discarded",
    "down-weighted": "weights lowered",
}
"""Descriptions of the summary keys that list clients whose influence the server has limited."""


def guarantee(privacy: dict[str, Any]) -> str:
    """Describe the privacy guarantee in a summary, and the values that it does not cover."""
    spent_so_far = f"ε = {privacy['epsilon']:.4g}, δ = {privacy['delta']:.3g}"
    uncovered = ", ".join(privacy["not-covered"])
    return f"{spent_so_far}: dp = {privacy['mode']} hides {privacy['protects']}; not covered: {uncovered}"


def _limited(summary: Mapping[str, Any], key: str) -> str:
    """Return the clients whose influence was limited, as in ``site-b in 12 rounds``, most rounds first."""
    entries = sorted(summary.get(key, ()), key=lambda entry: (-entry["rounds"], entry["client"]))
    sites = summary.get("sites") or []
    texts = []
    for entry in entries[:MAX_NAMED]:
        client, rounds = entry["client"], entry["rounds"]
        name = (sites[client] if client < len(sites) else None) or f"client {client}"
        texts.append(f"{name} in {rounds} round{'' if rounds == 1 else 's'}")
    more = [f"{len(entries) - MAX_NAMED} more"] if len(entries) > MAX_NAMED else []
    return ", ".join([*texts, *more])


def _remark(scores: Mapping[str, Any], clients: int, missing: int) -> str:
    """Return a remark on a score of a round, or an empty string if it is the mean over all present clients.

    Parameters
    ----------
    scores : mapping
        The spread of the score over the clients, or the score over all samples. It may be empty.
    clients, missing : int
        Number of clients that a round can evaluate, and of the clients that are missing from the round.
    """
    number = scores.get("clients", clients)
    parts = [POOLED] if "samples" in scores else []
    parts += [f"{number} of {clients}"] if number < clients - missing else []
    return f" ({', '.join(parts)})" if parts else ""


def members_of(summary: Mapping[str, Any]) -> int:
    """Return the number of clients that a round can evaluate: all of a run's clients except its newcomers."""
    return int(summary["num-clients"]) - len((summary.get("newcomers") or {}).get("clients", ()))


def coverage(number: int, members: int) -> str:
    """Return the number of clients that a metric covers: ``30``, or ``3 of 30`` if it does not cover all members."""
    return str(number) if number >= members else f"{number} of {members}"


def duration(seconds: float) -> str:
    """Return a duration as text: ``46 s``, ``1 min 46 s``, ``2 h 5 min``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def size(count: float) -> str:
    """Return a number of bytes as text, in powers of 1000: ``1.23 MB``."""
    return decimal(round(count), precision=2)


def _bar(stream: TextIO) -> Bar:
    return Bar(
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}", markup=False),
        console=Console(file=stream),
        refresh_per_second=2,
    )


def _aligned(facts: Mapping[str, str]) -> list[str]:
    """Return a line for each nonempty fact, with the texts aligned."""
    texts = {key: text for key, text in facts.items() if text}
    width = max(map(len, ("system accuracy", *texts)))
    return [f"{key:<{width}}  {text}" for key, text in texts.items()]


def _early_stop(summary: Mapping[str, Any]) -> str:
    """Return why ``patience`` has ended a run, or an empty string."""
    if not (entry := summary.get("stopped-early")):
        return ""
    return f"{entry['reason']} in {entry['patience']} evaluations, after round {entry['after']}"


def _folds(summary: Mapping[str, Any]) -> str:
    """Return the fold of a run, or the number of folds that a cross-validation has finished."""
    if "fold" in summary:
        return f"{summary['fold']} of {summary['folds']}"
    if "folds" in summary:
        meaning = summary.get("fold-scores", "scores over the test samples of all folds")
        return f"{len(summary['runs'])} of {summary['folds']}; {meaning}"
    return ""


def _clients(summary: Mapping[str, Any]) -> str:
    """Return the number of clients, and the names of the clients missing from the last evaluation."""
    clients, missing = summary["num-clients"], summary.get("missing", [])
    if not missing:
        return str(clients)
    names = summary.get("sites", [None] * clients)
    first_names = ", ".join(names[client] or f"client {client}" for client in missing[:MAX_NAMED])
    more = ", …" if len(missing) > MAX_NAMED else ""
    return f"{clients - len(missing)} of {clients} (missing in the last evaluation: {first_names}{more})"


def _undelivered(summary: Mapping[str, Any], path: Path) -> str:
    """Return the clients without a final model, and how to deliver it.

    If the nodes store the models, the delivery needs the run's SuperLink, whose address the ServerApp does not know.
    """
    clients, names = summary[WITHOUT_MODEL], summary.get("sites") or []
    titles = [(names[client] if client < len(names) else None) or f"client {client}" for client in clients[:MAX_NAMED]]
    more = ", …" if len(clients) > MAX_NAMED else ""
    is_default = path.parent == Path(RunSettings.output_dir).absolute()
    words = f"resume={path.name}" + ("" if is_default else f" output-dir={path.parent}")
    is_here = any(path.glob("models/client-*.safetensors"))
    delivery = f"deliver it with `posy run {words}`" if is_here else "resume the run on its SuperLink to deliver it"
    return f"{', '.join(titles)}{more}; when they are connected, {delivery}"


def _cells(row: Mapping[str, Any], members: int, metric: Metric) -> list[str]:
    """Return the table cells for an evaluation; ``members`` is the number of clients that a round can evaluate."""
    covered = coverage(row["clients"], members)
    if "samples" in row:
        return [str(row["round"]), metric.format(row["mean"]), covered]
    jain = "" if row["jain"] is None else f"{row['jain']:.4f}"
    values = (metric.format(row[key]) for key in ("min", "max", "weighted"))
    mean = f"{metric.number(row['mean'])} ± {metric.format(row['std'])}"
    return [str(row["round"]), mean, *values, jain, covered]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
