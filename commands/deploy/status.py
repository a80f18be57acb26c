"""Show the state of a federation from its SuperLink and, on the SuperLink's machine, from the runs' status files."""

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posy.commands.deploy.control import Run, local_time
from posy.listing import print_table
from posy.server_app.progress import duration, size

VERSIONS = ("posy", "flwr", "torch", "python")
"""Software that should have the same version on all nodes."""
RUN_COLUMNS = (
    *("run id", "run-name", "method", "status", "since", "time"),
    *("round", "dropped", "sent again", "waits for"),
)
NODE_COLUMNS = ("name", "status", "since", "does", "clock", *VERSIONS)
TOLERATED = 2.0
"""Posy reports a node's clock error only if it exceeds this number of seconds."""


def show(runs: Sequence[Run], nodes: Sequence[Any], statuses: Mapping[str, Mapping[str, Any]]) -> None:
    """Print runs and nodes; ``statuses`` contains the status that each run has written, keyed by run number."""
    rows = []
    for run in runs:
        status = statuses.get(run.number, {})
        round_text = f"{status['round']}/{status['rounds']}" if "rounds" in status else ""
        counts = [str(status.get(key) or "") for key in ("dropped", "sent-again")]
        waits = "" if run.ended else waiting(status.get("waits"))
        method = run.method or status.get("method", "")  # the command that resumes a run need not name its method
        common = (run.number, run.name, method, run.status, run.since, duration(run.seconds))
        rows.append((*common, round_text, *counts, waits))
    print_table("runs" if rows else "no run was submitted", RUN_COLUMNS, rows)
    # For nodes that have never been online, the time is empty.
    since = [{"online": n.last_activated_at, "offline": n.last_deactivated_at}.get(n.status, "") for n in nodes]
    node_facts = facts_of_nodes(statuses)
    lines = []
    for node, changed_at in zip(nodes, since, strict=True):
        facts = node_facts.get(str(node.node_id), {})
        versions = [facts.get("versions", {}).get(name) or "" for name in VERSIONS]
        activity = doing(node, runs, statuses) if node.status == "online" else ""
        lines.append((node.name, node.status, local_time(changed_at), activity, offset(facts.get("clock")), *versions))
    print_table("nodes" if nodes else "no node is registered", NODE_COLUMNS, lines)


def facts_of_nodes(statuses: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the latest report from each node to any run, keyed by node number."""
    newest: dict[str, Mapping[str, Any]] = {}
    for status in statuses.values():
        for number, facts in status.get("nodes", {}).items():
            if facts.get("told", 0.0) > newest.get(number, {}).get("told", 0.0):
                newest[number] = facts
    return newest


def doing(node: Any, runs: Iterable[Run], statuses: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a node's current activity, or an empty string if it is not known."""
    active_runs = [run for run in runs if not run.ended]
    reported = [(run, statuses[run.number]) for run in active_runs if run.number in statuses]
    for run, status in reported:
        facts = status.get("nodes", {}).get(str(node.node_id), {})
        if "does" in facts:
            return f"{facts['does']} of {run.name or run.number}, for {duration(time.time() - facts['since'])}"
    return "waits" if len(reported) == len(active_runs) else ""


def waiting(waits: Mapping[str, Any] | None) -> str:
    """Describe why a run is waiting, how long it has waited, and how much time is left."""
    if not waits:
        return ""
    current_time = time.time()
    if waits["until"] is None:
        remaining = "no limit so far"
    elif (seconds_left := waits["until"] - current_time) > 0:
        remaining = f"at most {duration(seconds_left)} more"
    else:
        remaining = f"its limit passed {duration(-seconds_left)} ago"
    return f"{waits['for']}, for {duration(current_time - waits['since'])}, {remaining}"


def offset(clock: float | None) -> str:
    """Describe the difference between a node's clock and the server's."""
    if clock is None:
        return ""
    return "right" if abs(clock) <= TOLERATED else f"{abs(clock):.0f} s {'ahead' if clock > 0 else 'behind'}"


def free_disk(path: Path) -> tuple[int, int]:
    """Return the free and total bytes of the disk that contains a directory, which need not exist yet."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    usage = shutil.disk_usage(existing)
    return usage.free, usage.total


def results_of(statuses: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Return the directories in which runs store their results."""
    return sorted({Path(status["results"]).parent for status in statuses.values() if "results" in status})


def space(path: Path) -> str:
    """Describe the free space on the disk of a directory."""
    free, total = free_disk(path)
    return f"{size(free)} of {size(total)} ({100 * free / total:.0f} %)"
