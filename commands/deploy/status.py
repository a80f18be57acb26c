"""What is known of a federation: from its SuperLink, and on the SuperLink's machine from what its runs have written."""

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.proto.node_pb2 import NodeInfo

from posy.commands.deploy.control import Run, local_time
from posy.listing import print_table
from posy.server_app.progress import duration, size

VERSIONS = ("posy", "flwr", "torch", "python")
"""What nodes should have the same of."""
RUN_COLUMNS = (
    *("run id", "run-name", "method", "status", "since", "time"),
    *("round", "dropped", "sent again", "waits for"),
)
NODE_COLUMNS = ("name", "status", "since", "does", "clock", *VERSIONS)
TOLERATED = 2.0
"""Seconds by which a node's clock may be off without a word."""


def show(runs: Sequence[Run], nodes: Sequence[NodeInfo], told: Mapping[str, Mapping[str, Any]]) -> None:
    """Print runs and nodes; ``told`` is what runs have written, by their numbers."""
    rows = []
    for run in runs:
        known = told.get(run.number, {})
        at = f"{known['round']}/{known['rounds']}" if "rounds" in known else ""
        counts = [str(known.get(key) or "") for key in ("dropped", "sent-again")]
        waits = "" if run.ended else waiting(known.get("waits"))
        told_by_all = (run.number, run.name, run.method, run.status, run.since, duration(run.seconds))
        rows.append((*told_by_all, at, *counts, waits))
    print_table("runs" if rows else "no run was submitted", RUN_COLUMNS, rows)
    # Nodes that were never online have no time.
    since = [{"online": n.last_activated_at, "offline": n.last_deactivated_at}.get(n.status, "") for n in nodes]
    known_nodes = facts_of_nodes(told)
    lines = []
    for node, when in zip(nodes, since, strict=True):
        facts = known_nodes.get(str(node.node_id), {})
        versions = [facts.get("versions", {}).get(name) or "" for name in VERSIONS]
        now = doing(node, runs, told) if node.status == "online" else ""
        lines.append((node.name, node.status, local_time(when), now, offset(facts.get("clock")), *versions))
    print_table("nodes" if nodes else "no node is registered", NODE_COLUMNS, lines)


def facts_of_nodes(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the newest that nodes have told of themselves, by their numbers."""
    found: dict[str, Mapping[str, Any]] = {}
    for status in told.values():
        for number, facts in status.get("nodes", {}).items():
            if facts.get("told", 0.0) > found.get(number, {}).get("told", 0.0):
                found[number] = facts
    return found


def doing(node: NodeInfo, runs: Iterable[Run], told: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a node does now; nothing where no run tells it."""
    going_on = [run for run in runs if not run.ended]
    known = [(run, told[run.number]) for run in going_on if run.number in told]
    for run, status in known:
        facts = status.get("nodes", {}).get(str(node.node_id), {})
        if "does" in facts:
            return f"{facts['does']} of {run.name or run.number}, for {duration(time.time() - facts['since'])}"
    return "waits" if len(known) == len(going_on) else ""


def waiting(waits: Mapping[str, Any] | None) -> str:
    """Return in words what a run waits for, for how long already, and for how long yet."""
    if not waits:
        return ""
    now = time.time()
    if waits["until"] is None:
        yet = "no limit so far"
    elif (left := waits["until"] - now) > 0:
        yet = f"{duration(left)} more at most"
    else:
        yet = f"its time was over {duration(-left)} ago"
    return f"{waits['for']}, for {duration(now - waits['since'])}, {yet}"


def offset(clock: float | None) -> str:
    """Return in words by how much a node's clock differs from the server's."""
    if clock is None:
        return ""
    return "right" if abs(clock) <= TOLERATED else f"{abs(clock):.0f} s {'ahead' if clock > 0 else 'behind'}"


def free_disk(path: Path) -> tuple[int, int]:
    """Return free and total bytes of the disk on which a directory lies, or would lie."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    return usage.free, usage.total


def results_of(told: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Return the directories in which runs keep their results."""
    return sorted({Path(status["results"]).parent for status in told.values() if "results" in status})


def space(path: Path) -> str:
    """Return in words how much space is free for a directory."""
    free, total = free_disk(path)
    return f"{size(free)} of {size(total)} ({100 * free / total:.0f} %)"
