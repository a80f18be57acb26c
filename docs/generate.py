"""Write what the documentation repeats of the code: its settings, methods, networks and data sets.

usage: python docs/generate.py [--check]

In pyproject.toml, README.md and the pages of docs/, whatever stands between ``<!-- generated: NAME -->`` and
``<!-- end -->`` (``# generated: NAME`` and ``# end`` in TOML) is replaced. With --check nothing is written: the files
that are stale are listed, and the exit status is 1.
"""

import json
import re
import sys
import textwrap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from posy.commands.launch import toml
from posy.commands.papers.page import told_of, verdicts
from posy.data.published import describe
from posy.models.catalogue import MODELS
from posy.strategies.methods import METHODS
from posy.strategies.registry import defaults, groups
from posy.yaml12 import read_yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIVE = 5
"""The first methods, which are Posy's own."""
ROUNDING = 2e-7
"""The largest relative difference between models that needs no words."""
COMPARED = {"digits": "digits", "mnist": "MNIST", "agnews": "AG News", "cifar10": "CIFAR-10, Dir(0.1)"}
"""What all methods have been compared on, as it is told."""
MARKED = re.compile(r"(generated: (\w+)(?: -->)?\n).*?((?:<!--|#) end\b)", re.DOTALL)


def config() -> str:
    """Return the table in which Flower looks for the settings that a run may have."""
    return "\n".join(f"{key} = {toml(value)}" for key, value in defaults().items())


def settings() -> str:
    """Return all settings, a table for each group; those that may change when a run is resumed are marked."""
    parts = []
    for title, group in groups(METHODS).items():
        rows = (
            [f"`{key}`" + " ↻" * s.resumable, f"`{toml(s.default)}`", s.allowed(), s.described]
            for key, s in group.items()
        )
        if group:
            parts += [f"## {title}", table(["key", "default", "allowed", "meaning"], rows)]
    return "\n\n".join(parts)


def methods() -> str:
    """Return the methods, as the docstrings of their modules tell of them."""
    columns, *rows = described(METHODS)
    return table(columns, rows)


def overview() -> str:
    """Return the five methods that Posy is about, with what came of their papers' claims here."""
    columns, *rows = described(list(METHODS)[:FIVE])
    return table(
        [*columns, "its paper's claims here; (small): at a laptop's scale"],
        ([*row, claims(row[0].strip("`"))] for row in rows),
    )


def claims(paper: str) -> str:
    """Return how many of a paper's claims came out how, with a link to its page."""
    found = told_of(verdicts(paper, ROOT / "papers" / paper / "results"))
    return f"[{found}](docs/papers/{paper}.md)"


def described(names: Iterable[str]) -> list[list[str]]:
    """Return the columns and rows of a table of some methods."""
    rows = [["`method`", "name", "idea", "paper"]]
    for method in names:
        text = " ".join((import_module(f"posy.strategies.{method.replace('-', '_')}").__doc__ or "").split())
        name, _, idea = re.split(r"\.(?: |$)", text)[0].partition(": ")
        paper = re.search(r'"(.+?)"', text) or re.search(r"\((.+?)\)", name)
        rows.append([f"`{method}`", name.partition(" (")[0], idea, paper[1] if paper else ""])
    return rows


def networks() -> str:
    """Return the networks."""
    rows = ([f"`{name}`", network.about, ", ".join(network.kinds)] for name, network in MODELS.items())
    return table(["`model`", "what it is", "samples"], rows)


def datasets() -> str:
    """Return the data sets that have a name."""
    rows = ([f"`{name}`", *others] for name, *others in describe())
    return table(["`dataset`", "what it holds", "what to put into `data-dir`", "downloads"], rows)


def compared(name: str) -> str:
    """Return a table of all methods that benchmarks/results holds, each at the point where it is to be used."""
    clients, seeds = clients_of(f"compare-{name}"), _read(RESULTS / f"compare-{name}" / "table.csv")
    spread = {(row["variant"], row["method"]): row for row in seeds.to_dict("records")}
    variants = list(clients["variant"].unique())
    columns, rows = ["method", "at"], dict[str, list[str]]()
    for variant in variants:
        columns += [variant or "accuracy", "over Local", "lose"]
        for row in clients[clients["variant"] == variant].to_dict("records"):
            std = spread[variant, row["method"]][f"{row['point']}-last-seeds-std"]
            cells = rows.setdefault(row["method"], [row["method"], row["point"]])
            cells.extend([told_with(row, std), *beside_local(row)])
    parts = [table(columns, rows.values())]
    for variant in variants:
        parts.append(beating(clients[clients["variant"] == variant], f"{variant}: beat" if variant else "Beat"))
    return "\n\n".join(textwrap.fill(part, 120) if number else part for number, part in enumerate(parts))


def told_with(row: Mapping[Hashable, Any], std: float) -> str:
    """Return a mean over the clients with its spread over the seeds, marked where it is like the best."""
    spread = "" if pd.isna(std) else f" ± {100 * std:.1f}"  # of a single seed there is none
    return f"{100 * row['mean']:.1f}{spread}{' ≈' * bool(row['alike'])}"


def beside_local(row: Mapping[Hashable, Any]) -> list[str]:
    """Return what clients gain over local training, and how many lose; nothing in the row of local training."""
    gain = "" if pd.isna(row["gain-local"]) else f"{100 * row['gain-local']:+.1f}"
    return [gain, "" if pd.isna(row["losing-local"]) else row["losing-local"]]


def beating(rows: pd.DataFrame, told: str) -> str:
    """Return which methods gain over local training beyond chance, at each point."""
    beat = {point: ", ".join(rows["method"][rows[f"{point}-beats-local"]]) or "none" for point in ("served", "local")}
    return f"{told} Local, served: {beat['served']}; local: {beat['local']}."


def clients_of(name: str) -> pd.DataFrame:
    """Return what a comparison tells of the clients; a variant that is the only one has no name."""
    return _read(RESULTS / name / "clients.csv")


def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"variant": str}).fillna({"variant": ""})


def headline() -> str:
    """Return how Posy's own methods, Local, FedAvg and the best of the others did on all that has been compared."""
    own = list(METHODS)[:FIVE]
    found: dict[str, pd.DataFrame] = {}
    for name, title in COMPARED.items():
        clients = clients_of(f"compare-{name}")
        for variant, rows in clients.groupby("variant", sort=False):
            found[", ".join(filter(None, (title, variant)))] = rows.set_index("method")
    ranks = pd.DataFrame({title: rows["mean"].rank(ascending=False) for title, rows in found.items()}).mean(axis=1)
    best = [method for method in ranks.sort_values().index if method not in (*own, "local", "fedavg")][:3]
    lines = []
    for method in ["local", "fedavg", *own, *best]:
        cells = []
        for rows in found.values():
            row = rows.loc[method]
            gains = row[f"{row['point']}-beats-local"]
            cells.append(f"{100 * row['mean']:.1f}{' ▲' * bool(gains)}{' ≈' * bool(row['alike'])}")
        lines.append([f"`{method}`", str(rows.loc[method, "point"]), *cells])
    return table(["`method`", "at", *found], lines)


def tuned(name: str, variant: str) -> str:
    """Return how methods did in one variant of a comparison as they are, and tuned, and at which learning rate."""
    plain = clients_of(f"compare-{name}")
    rows, seeds = (
        _read(RESULTS / f"tune-{name}-tuned" / f"{file}.csv").set_index("method") for file in ("clients", "table")
    )
    found = read_yaml(ROOT / "benchmarks" / "tables" / f"tune-{name}-tuned.yaml")["runs"]
    rates = {row["name"]: row["settings"]["lr"] for row in found}
    lines = []
    for before in plain[plain["variant"] == variant].to_dict("records"):
        if (method := before["method"]) not in rates:
            continue
        row, std = rows.loc[method].to_dict(), seeds.loc[method, f"{before['point']}-last-seeds-std"]
        told = [f"{100 * before['mean']:.1f}", told_with(row, std), f"{rates[method]:g}"]
        lines.append([method, before["point"], *told, *beside_local(row)])
    columns = ["method", "at", "not tuned", "tuned", "rate", "over Local", "lose"]
    return f"{table(columns, lines)}\n\n{textwrap.fill(beating(rows.reset_index(), 'Beat'), 120)}"


def newcomers_digits() -> str:
    """Return what clients get that come when training is over."""
    clients = clients_of("newcomers-digits")
    columns, rows = ["method"], dict[str, list[str]]()
    for variant, own in clients.groupby("variant", sort=False):
        columns += [f"{variant}: served", "after one training", "members"]
        for row in own.to_dict("records"):
            values = (row["newcomers-served"], row["newcomers-local"], row["mean"])
            told = ("" if pd.isna(value) else f"{100 * value:.1f}" for value in values)
            rows.setdefault(row["method"], [row["method"]]).extend(told)
    return table(columns, rows.values())


def curves(dataset: str) -> str:
    """Return how far Posy's curves lie from those of the plain programs."""
    found = json.loads((RESULTS / f"curves-{dataset}.json").read_text(encoding="utf-8"))["methods"]
    rows = []
    for method, row in found.items():
        error = f" ± {100 * row['mean_gap_error']:.1f}" if "mean_gap_error" in row else ""
        ends = [f"{100 * row[side][-1]:.1f}" for side in ("plain", "posy")]
        rows.append(
            [method, row["point"], *ends, f"{100 * row['mean_gap']:+.1f}{error}", f"{100 * row['mean_spread']:.1f}"]
        )
    return table(["method", "at", "plain program", "Posy", "mean gap", "mean spread"], rows)


def curves_mnist() -> str:
    """Return the curves on MNIST."""
    return curves("mnist")


def curves_cifar10() -> str:
    """Return the curves on CIFAR-10."""
    return curves("cifar10")


def compare_digits() -> str:
    """Return the table of all methods on digits."""
    return compared("digits")


def compare_mnist() -> str:
    """Return the table of all methods on MNIST."""
    return compared("mnist")


def compare_agnews() -> str:
    """Return the table of all methods on AG News."""
    return compared("agnews")


def compare_cifar10() -> str:
    """Return the table of all methods on CIFAR-10."""
    return compared("cifar10")


def tuned_digits() -> str:
    """Return the table of all methods on digits, tuned."""
    return tuned("digits", "Dir(0.1)")


def tuned_mnist() -> str:
    """Return the table of all methods on MNIST, tuned."""
    return tuned("mnist", "Dir(0.1)")


def tuned_cifar10() -> str:
    """Return the table of the methods that matter most on CIFAR-10, tuned."""
    return tuned("cifar10", "")


def stacking() -> str:
    """Return how far models that train side by side part from those that train one after the other."""
    return parting("stacking.txt")


def stacking_cuda() -> str:
    """Return how far models that train side by side on a GPU part from those that train on a CPU."""
    return parting("stacking-cuda.txt")


def parting(file: str) -> str:
    """Return how far models part, as a run of ``benchmarks.stacking`` has printed it."""
    rows = [row.split() for row in (RESULTS / file).read_text(encoding="utf-8").splitlines()[1:]]
    worst = {method: max(map(float, values)) for method, *values in rows}
    others = sorted((method for method in worst if worst[method] > ROUNDING), key=lambda method: worst[method])
    told = ", ".join(f"{method} {worst[method]:.1e}" for method in others)
    return textwrap.fill(f"{len(worst) - len(others)} methods: within {ROUNDING:.0e}; {told}.", 120)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    escaped = ([re.sub(r"<(?=\w)|\|", r"\\\g<0>", text) for text in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *escaped))


MAKERS = (
    config,
    settings,
    methods,
    overview,
    headline,
    networks,
    datasets,
    compare_digits,
    compare_mnist,
    compare_agnews,
    compare_cifar10,
    tuned_digits,
    tuned_mnist,
    tuned_cifar10,
    newcomers_digits,
    stacking,
    stacking_cuda,
    curves_mnist,
    curves_cifar10,
)
GENERATED = {make.__name__: make for make in MAKERS}


def stale() -> dict[Path, str]:
    """Return the files that are stale, with what they should hold."""
    found = {}
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        wanted = MARKED.sub(lambda mark: f"{mark[1]}{GENERATED[mark[2]]()}\n{mark[3]}", text)
        if wanted != text:
            found[path] = wanted
    return found


if __name__ == "__main__":
    for page, content in (old := stale()).items():
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is stale: run python docs/generate.py")
        else:
            page.write_text(content, encoding="utf-8")
    sys.exit(1 if old and "--check" in sys.argv else 0)
