"""Write the parts of the documentation that repeat the code: settings, methods, networks and data sets.

usage: python docs/generate.py [--check]

In pyproject.toml, README.md and the pages of docs/, the program replaces the text between ``<!-- generated: NAME -->``
and ``<!-- end -->`` (in TOML between ``# generated: NAME`` and ``# end``). It generates the pages in docs/methods as a
whole, and deletes the pages of methods that no longer exist. With --check it writes nothing. It then lists the stale
files, and exits with status 1 if there are any.

The verdicts on the papers' claims come from the pages in docs/papers. ``posy paper PAPER`` updates a page.
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

from posy.accounting import MODES
from posy.commands.launch import toml
from posy.commands.papers.claims import counts_in, read_box
from posy.data.policy import Policy
from posy.data.published import describe
from posy.data.task import CLASSIFICATION, TARGETS
from posy.metrics import METRICS
from posy.models.catalogue import MODELS
from posy.settings import MOST, settings_of
from posy.strategies.arrays import Refused
from posy.strategies.card import MethodCard, Program
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import defaults, groups
from posy.strategies.settings import MethodSettings
from posy.words import capitalised
from posy.yaml12 import read_yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "methods"
PAPERS = ROOT / "docs" / "papers"
PLACES = r"Eqs?\.|Algorithm|Section|Appendix|Theorem|Lemma|Remark|Table|Figure|Fig\.|footnote|line"
"""Pattern of the words that begin a reference to an equation, a section or another part of a paper."""
FIVE = 5
"""Number of methods that Posy is mainly about. They are the first ones in the list of methods."""
ROUNDING = 2e-7
"""Relative difference between models that is explained by rounding. Methods below it are counted, but not listed."""
COMPARED = {"digits": "digits", "mnist": "MNIST", "agnews": "AG News", "cifar10": "CIFAR-10, Dir(0.1)"}
"""Titles of the comparisons of all methods, keyed by data set."""
MARKED = re.compile(r"(generated: (\w+)(?: -->)?\n).*?((?:<!--|#) end\b)", re.DOTALL)


def config() -> str:
    """Return the lines of the TOML table that lists for Flower the allowed settings of a run, with their defaults."""
    return "\n".join(f"{key} = {toml(value)}" for key, value in defaults().items())


def settings() -> str:
    """Return a table of settings for each group; ↻ marks the settings that may change when a run is resumed."""
    parts = []
    for title, group in groups(METHODS).items():
        rows = (
            [f"`{key}`" + " ↻" * s.resumable, f"`{toml(s.default)}`", s.allowed(), s.described]
            for key, s in group.items()
        )
        if group:
            parts += [f"## {title}", table(["key", "default", "allowed", "meaning"], rows)]
    return "\n\n".join(parts)


def policy() -> str:
    """Return the rules of a site's policy with their defaults."""
    rows = [[f"`{key}`", f"`{toml(s.default)}`", s.described] for key, s in settings_of(Policy).items()]
    return table(["rule", "default", "meaning"], rows)


def methods() -> str:
    """Return the methods with the first sentence of their modules' docstrings, and links to their pages."""
    columns, *rows = described(METHODS)
    for method, row in zip(METHODS, rows, strict=True):
        if card_of(method):
            row[1] = f"[{row[1]}](../methods/{method}.md)"
        row.append(", ".join(supported_tasks(settings_class(method))))
    columns.append("tasks")
    return (
        f"{table(columns, rows)}\n\nA method's page states its equations, messages, state, settings with their "
        "sources, and deviations from the paper.\n[Checks against published programs](../benchmarks/agreement.md) "
        "lists the programs and the largest differences from Posy."
    )


def supported_tasks(cls: type[MethodSettings]) -> list[str]:
    """Return the values of the setting ``task`` that a method supports."""
    return [CLASSIFICATION] if cls.needs_classes else list(TARGETS)


def overview() -> str:
    """Return a table of the five main methods, with the verdicts on their papers' main claims."""
    columns, *rows = described(list(METHODS)[:FIVE])
    return table(
        [*columns, "[main claims](docs/papers/index.md), (reduced): in smaller runs than the paper's"],
        (
            [*row, f"[{counts_in(main_claims(method))}](docs/papers/{method}.md)"]
            for row, method in zip(rows, METHODS, strict=False)
        ),
    )


def main_claims(paper: str) -> list[list[str]]:
    """Return the main claims of a paper with their verdicts, from the box on its page."""
    return read_box((PAPERS / f"{paper}.md").read_text(encoding="utf-8"))


def papers_claims() -> str:
    """Return a table of the five papers' main claims with their verdicts."""
    _, *rows = described(list(METHODS)[:FIVE])
    lines = []
    for (_, name, _, title), method in zip(rows, METHODS, strict=False):
        for number, (claim, verdict, _, runs) in enumerate(main_claims(method)):
            paper = "" if number else f"[{name}]({method}.md): {title}"
            lines.append([paper, claim, verdict, runs.replace("(#", f"({method}.md#")])
    return table(["paper", "main claim", "verdict", "runs"], lines)


def described(names: Iterable[str]) -> list[list[str]]:
    """Return the header and the rows of a table of some methods."""
    rows = [["`method`", "name", "idea", "paper"]]
    for method in names:
        text = " ".join((import_module(f"posy.strategies.{method.replace('-', '_')}").__doc__ or "").split())
        name, _, rest = text.partition(": ")  # a name may contain an initial with a full stop, as in T. Dinh
        idea = re.split(r"\.(?: |$)", rest)[0]
        paper = re.search(r'"(.+?)"', text) or re.search(r"\((.+?)\)", name)
        rows.append([f"`{method}`", name.partition(" (")[0], idea, paper[1] if paper else ""])
    return rows


def card_of(method: str) -> MethodCard | None:
    """Return the card that a method's settings class declares, or None if the class only inherits a card."""
    card: MethodCard | None = vars(settings_class(method)).get("card")
    return card


def method_pages() -> dict[Path, str]:
    """Return the contents of the pages in docs/methods: the checks, and a page for each method with a card."""
    cards = {method: card for method in METHODS if (card := card_of(method))}
    pages = {PAGES / f"{method}.md": method_page(method, card) for method, card in cards.items()}
    return {ROOT / "docs" / "benchmarks" / "agreement.md": program_checks(cards), **pages}


def program_checks(cards: Mapping[str, MethodCard]) -> str:
    """Return the page with the largest difference between each method and its published program."""
    rows, missing = [], []
    for method, card in cards.items():
        link = f"[`{method}`](../methods/{method}.md)"
        if (program := card.program) is None:
            missing.append([link, card.no_program])
            continue
        publisher = "the paper's authors" if program.by_authors else "others"
        rows.append(
            [link, f"[{program.repository}]({address(program)})", publisher, program.commit[:10], exponent(program)]
        )
    parts = [
        "<!-- Written by `python docs/generate.py`. -->",
        "# Checks against published programs",
        "Published programs and Posy solve the same tiny problem, with three clients, two rounds, fixed initial "
        "weights and full batches ([problem.py](../../tests/programs/problem.py)). The programs ran outside this "
        "repository, and the tests contain their results as constants. The table lists the largest difference that "
        "each test tolerates in the server's arrays and the clients' models after the last round.",
        table(["`method`", "program", "published by", "commit", "largest difference"], rows),
        "## Methods without a check",
        table(["`method`", "reason"], missing),
    ]
    return "\n\n".join(parts) + "\n"


def method_page(method: str, card: MethodCard) -> str:
    """Return the page of a method, from its card, the docstring of its module and its settings class."""
    cls: type[MethodSettings] = settings_class(method)
    name = method.replace("-", "_")
    docstring = import_module(f"posy.strategies.{name}").__doc__ or ""
    _, (_, title, _, _) = described([method])
    idea, *paragraphs = map(unwrapped, markdown(docstring).split("\n\n"))
    idea = idea.partition(": ")[2] if ": " in idea else idea
    files = [f"strategies/{name}.py", *(f for f in [f"client_app/{name}.py"] if (ROOT / f).is_file())]
    code = " and ".join(f"[{file}](../../{file})" for file in files)
    sections = {
        "Paper": cited(card),
        "Equations": equations(card),
        "Messages": messages(card, cls),
        "State": state(card),
        "Settings": own_settings(method, cls),
        "Model scored": f"{card.scored}\n\nTables and `posy tune` use the *{cls.point}* models "
        "([two accuracies](../reference/methods.md#two-accuracies)).",
        "Deviations": bullets(card.deviations) or "There are no known deviations.",
        "Unsupported settings": refused(cls),
        "Check against the published program": checked_with(method, card),
    }
    if warned := warns(cls):
        sections["Unsupported settings"] += f"\n\n{warned}"
    parts = ["<!-- Written by `python docs/generate.py`. -->", f"# {title}", idea[:1].upper() + idea[1:], *paragraphs]
    parts.append(f"Select this method with `method={method}`. The code is in {code}.")
    parts[-1] += " [All methods](../reference/methods.md)"
    if (ROOT / "docs" / "papers" / f"{method}.md").is_file():
        parts[-1] += f" · [the paper's experiments](../papers/{method}.md)"
    for heading, text in sections.items():
        parts += [f"## {heading}", re.sub(r"(?<!/)\bdocs/([\w/-]+)\.md", linked, text)]
    return "\n\n".join(filter(None, parts)) + "\n"


def linked(mention: re.Match[str]) -> str:
    """Return a link to a page of docs/, with the title of the page."""
    title = (ROOT / "docs" / f"{mention[1]}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}](../{mention[1]}.md)"


def markdown(docstring: str) -> str:
    """Convert a docstring to Markdown; a Sphinx role becomes a literal with the last part of the name."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", docstring.strip())
    return text.replace("``", "`")


def unwrapped(paragraph: str) -> str:
    """Return a paragraph as one line, or a list with one line for each item."""
    items = re.split(r"\n\s*[*-] ", f"\n{paragraph.strip()}")
    lines = [" ".join(item.split()) for item in items]
    return "\n".join([line for line in lines[:1] if line] + [f"- {line}" for line in lines[1:]])


def address(program: Program) -> str:
    """Return the address at which GitHub shows a published program at its commit."""
    return f"https://github.com/{program.repository}/tree/{program.commit}"


def exponent(program: Program) -> str:
    """Format the largest difference from a program, as in 3e-7."""
    return f"{program.difference:.0e}".replace("e-0", "e-")


def cited(card: MethodCard) -> str:
    """Return the citation of a method's paper with its link."""
    if (paper := card.paper) is None:
        return "The method does not come from a single paper."
    dot = "" if paper.authors.endswith(".") else "."
    return f"{paper.authors}{dot} [{paper.title}]({paper.url}). {paper.venue}, {paper.year}."


def equations(card: MethodCard) -> str:
    """Return a table of the equations with their numbers in the paper, or a list if the card gives no numbers."""
    rows = []
    for equation in card.equations:
        parts = re.fullmatch(rf"(.*\S) \(([^()]*(?:{PLACES})[^()]*(?:\([^()]*\)[^()]*)*)\)", equation)
        rows.append([parts[1], parts[2]] if parts else [equation, ""])
    if not any(number for _, number in rows):
        return bullets(card.equations)
    return table(["equation", "in the paper"], rows)


def messages(card: MethodCard, cls: type[MethodSettings]) -> str:
    """Return tables of the arrays in both messages, and the protections that the messages support."""
    parts = []
    for direction, arrays in (
        ("Before training and before an evaluation, the server sends each client", card.sent),
        ("After training, each client returns", card.returned),
    ):
        rows = ([*array_and_shape(key), meaning] for key, meaning in arrays.items())
        parts.append(
            f"{direction}:\n\n{table(['array', 'shape', 'meaning'], rows)}" if arrays else f"{direction} no arrays."
        )
    supported = {f"`dp={mode}`": cls.refused_privacy(mode) for mode in MODES} | {"`secure-aggregation`": cls.sums}
    if card.sent or card.returned:
        parts.append(
            "d is the number of parameters, M the number of clients, and C the number of classes. "
            "[Privacy](../deploy/privacy.md) lists the values that every reply contains."
        )
    if names := [name for name, refusal in supported.items() if refusal is None]:
        parts.append(f"The messages support {_listed(names)}.")
    if cls.robust is None:
        page = "../how-to/runs.md#clients-that-send-wrong-models"
        parts.append(f"A [robust rule]({page}) (`robust`) can replace the server's mean.")
    return "\n\n".join(parts)


def array_and_shape(key: str) -> tuple[str, str]:
    """Split a card's key, such as ``model (d,)``, into the name and the shape of an array."""
    name, _, shape = key.partition(" (")
    return name, f"`({shape}`" if shape else ""


def state(card: MethodCard) -> str:
    """Return tables of the arrays that the server and the clients store between rounds."""
    parts = []
    for side, arrays in (("The server stores", card.server_state), ("A client stores", card.client_state)):
        rows = ([f"`{name}`", meaning] for name, meaning in arrays.items())
        parts.append(f"{side}:\n\n{table(['name', 'meaning'], rows)}" if arrays else f"{side} nothing between rounds.")
    parts.append("With `optimizer-state=kept`, a client also stores the moments of its optimiser.")
    return "\n\n".join(parts)


def own_settings(method: str, cls: type[MethodSettings]) -> str:
    """Return a table of a method's settings, with their defaults, allowed values, meanings and sources."""
    rows = []
    for key, declared in settings_of(cls, method).items():
        meaning = f"{declared.help} (needs {declared.needs})" if declared.needs else declared.help
        allowed = declared.allowed().replace(f" and <= {MOST}", "")
        rows.append([f"`{key}`", f"`{toml(declared.default)}`", allowed, meaning, declared.source])
    if not rows:
        return "The method has only the [shared settings](../reference/settings.md)."
    return table(["key", "default", "allowed", "meaning", "source of the default"], rows)


def refused(cls: type[MethodSettings]) -> str:
    """Return a table of the shared settings that a method does not support, with the reasons."""
    reasons = dict(cls().refusals())
    if cls.needs_classes:
        reasons |= {f"task={task}": cls.needs_classes for task in TARGETS if task not in supported_tasks(cls)}
    refused_features: dict[str, Refused | None] = {f"dp={mode}": cls.refused_privacy(mode) for mode in MODES}
    refused_features |= {"secure-aggregation": cls.sums, "robust": cls.robust}
    for key, verdict in refused_features.items():
        if verdict is not None:
            reasons.setdefault(key, verdict.why)
    if not reasons:
        return "The method supports all shared settings."
    return table(["setting", "reason"], ([f"`{key}`", reason] for key, reason in reasons.items()))


def warns(cls: type[MethodSettings]) -> str:
    """Return a sentence from the docstring of a method's ``notices``, on the warnings before round 1."""
    text = cls.notices.__doc__ or ""
    if cls.notices is MethodSettings.notices or not text.startswith("Warn "):
        return ""
    words = " ".join(markdown(text).partition("\n\n")[0].split()).removeprefix("Warn ")
    return f"Before round 1 Posy warns {words}"


def checked_with(method: str, card: MethodCard) -> str:
    """Describe the program with which a test compares the method, or return the reason for having no test."""
    if (program := card.program) is None:
        return card.no_program
    publisher = "by the paper's authors" if program.by_authors else "not by the paper's authors"
    test = f"tests/programs/test_program_{method.replace('-', '_')}.py"
    return (
        f"Program: [{program.repository}]({address(program)}) ({publisher}, commit {program.commit[:10]}). Code "
        f"compared: {program.entry}.\n\nOn the [tiny problem](../../tests/programs/problem.py), the program's arrays "
        f"and Posy's arrays differ by at most {exponent(program)} ([test](../../{test}))."
    )


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def networks() -> str:
    """Return the table of Posy's networks."""
    rows = ([f"`{name}`", network.about, ", ".join(network.kinds)] for name, network in MODELS.items())
    return table(["`model`", "network", "samples"], rows)


def metrics() -> str:
    """Return the table of all metrics."""
    rows = [
        [f"`{m.name}`", ", ".join("two classes" if m.binary_only else target for target in m.targets), m.about]
        for m in METRICS.values()
    ]
    return table(["metric", "target", "meaning"], rows)


def datasets() -> str:
    """Return the table of the data sets that users select by name."""
    rows = ([f"`{name}`", *cells] for name, *cells in describe())
    return table(["`dataset`", "content", "files in `data-dir`", "downloads"], rows)


def compared(name: str) -> str:
    """Return the table of all methods on a data set, with each method at the point at which it is scored."""
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
        parts.append(beating(clients[clients["variant"] == variant], variant))
    return "\n\n".join(textwrap.fill(part, 120) if number else part for number, part in enumerate(parts))


def told_with(row: Mapping[Hashable, Any], std: float) -> str:
    """Format a mean over the clients and its spread over the seeds, with ≈ if it does not differ from the best mean."""
    spread = "" if pd.isna(std) else f" ± {100 * std:.1f}"  # a single seed has no spread
    return f"{100 * row['mean']:.1f}{spread}{' ≈' * bool(row['alike'])}"


def beside_local(row: Mapping[Hashable, Any]) -> list[str]:
    """Format the clients' gain over local training and the number of clients that lose; empty for local training."""
    gain = "" if pd.isna(row["gain-local"]) else f"{100 * row['gain-local']:+.1f}"
    return [gain, "" if pd.isna(row["losing-local"]) else row["losing-local"]]


def beating(rows: pd.DataFrame, variant: str = "") -> str:
    """Return a sentence that names the models with a significant gain over local training."""
    methods = {point: list(rows["method"][rows[f"{point}-beats-local"]]) for point in ("served", "local")}
    parts = [f"the {point} models of {_listed(names)}" for point, names in methods.items() if names]
    opening = f"With {variant}, " if variant else ""
    better = "significantly better than local training"
    if len(parts) > 1:
        return capitalised(f"{opening}these models are {better}: {', and '.join(parts)}.")
    return capitalised(f"{opening}{parts[0]} are {better}." if parts else f"{opening}no model is {better}.")


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def clients_of(name: str) -> pd.DataFrame:
    """Return the clients' table of a comparison; the name of a single variant is empty."""
    return _read(RESULTS / name / "clients.csv")


def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"variant": str}).fillna({"variant": ""})


def headline() -> str:
    """Return the table of Local, FedAvg, the five main methods and the three best other methods."""
    five = list(METHODS)[:FIVE]
    results: dict[str, pd.DataFrame] = {}
    for name, title in COMPARED.items():
        clients = clients_of(f"compare-{name}")
        for variant, rows in clients.groupby("variant", sort=False):
            results[", ".join(filter(None, (title, variant)))] = rows.set_index("method")
    ranks = pd.DataFrame({title: rows["mean"].rank(ascending=False) for title, rows in results.items()}).mean(axis=1)
    best = [method for method in ranks.sort_values().index if method not in (*five, "local", "fedavg")][:3]
    lines = []
    for method in ["local", "fedavg", *five, *best]:
        cells = []
        for rows in results.values():
            row = rows.loc[method]
            gains = row[f"{row['point']}-beats-local"]
            cells.append(f"{100 * row['mean']:.1f}{' ▲' * bool(gains)}{' ≈' * bool(row['alike'])}")
        lines.append([f"`{method}`", str(rows.loc[method, "point"]), *cells])
    return table(["`method`", "at", *results], lines)


def tuned(name: str, variant: str) -> str:
    """Return a table of one variant's results with the default and with the tuned settings, and the tuned rates."""
    plain = clients_of(f"compare-{name}")
    rows, seeds = (
        _read(RESULTS / f"tune-{name}-tuned" / f"{file}.csv").set_index("method") for file in ("clients", "table")
    )
    runs = read_yaml(ROOT / "benchmarks" / "tables" / f"tune-{name}-tuned.yaml")["runs"]
    rates = {row["name"]: row["settings"]["lr"] for row in runs}
    lines = []
    for before in plain[plain["variant"] == variant].to_dict("records"):
        if (method := before["method"]) not in rates:
            continue
        row, std = rows.loc[method].to_dict(), seeds.loc[method, f"{before['point']}-last-seeds-std"]
        cells = [f"{100 * before['mean']:.1f}", told_with(row, std), f"{rates[method]:g}"]
        lines.append([method, before["point"], *cells, *beside_local(row)])
    columns = ["method", "at", "not tuned", "tuned", "rate", "over Local", "lose"]
    return f"{table(columns, lines)}\n\n{textwrap.fill(beating(rows.reset_index()), 120)}"


def newcomers_digits() -> str:
    """Return the table of clients that join after training."""
    clients = clients_of("newcomers-digits")
    columns, rows = ["method"], dict[str, list[str]]()
    for variant, records in clients.groupby("variant", sort=False):
        columns += [f"{variant}: served", "after one training", "members"]
        for row in records.to_dict("records"):
            values = (row["newcomers-served"], row["newcomers-local"], row["mean"])
            cells = ("" if pd.isna(value) else f"{100 * value:.1f}" for value in values)
            rows.setdefault(row["method"], [row["method"]]).extend(cells)
    return table(columns, rows.values())


def curves(dataset: str) -> str:
    """Return a table of the gaps between Posy's learning curves and the plain programs' curves."""
    measured = json.loads((RESULTS / f"curves-{dataset}.json").read_text(encoding="utf-8"))["methods"]
    rows = []
    for method, row in measured.items():
        error = f" ± {100 * row['mean_gap_error']:.1f}" if "mean_gap_error" in row else ""
        ends = [f"{100 * row[side][-1]:.1f}" for side in ("plain", "posy")]
        rows.append(
            [method, row["point"], *ends, f"{100 * row['mean_gap']:+.1f}{error}", f"{100 * row['mean_spread']:.1f}"]
        )
    return table(["method", "at", "plain program", "Posy", "mean gap", "mean spread"], rows)


def curves_mnist() -> str:
    """Return the table of gaps on MNIST."""
    return curves("mnist")


def curves_cifar10() -> str:
    """Return the table of gaps on CIFAR-10."""
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


def compare_heart() -> str:
    """Return the table of all methods on the four hospitals, with raw tables and cross-validation."""
    return hospitals("compare-heart")


def compare_flamby() -> str:
    """Return the table of all methods on the four hospitals, with FLamby's preparation and test split."""
    return hospitals("compare-flamby")


def hospitals(name: str) -> str:
    """Return a table with the mean AUROC of each method, its gain over local training, and its AUROC in each client."""
    columns, _, *lines = (RESULTS / name / "table.md").read_text().partition("## Each client\n\n")[2].splitlines()
    of_clients = {cells[0]: cells[2:] for line in lines if (cells := line.strip("| ").split(" | ")) and len(cells) > 2}
    rows = clients_of(name).sort_values("mean", ascending=False)
    body = []
    for row in rows.to_dict("records"):
        gain, _ = beside_local(row)
        beats = row[f"{row['point']}-beats-local"]
        means = [f"{100 * row['mean']:.1f}{' ▲' * bool(beats)}{' ≈' * bool(row['alike'])}", gain]
        body.append([row["method"], row["point"], *means, *of_clients[row["method"]]])
    head = ["method", "at", "mean AUROC", "over Local", *columns.strip("| ").split(" | ")[2:]]
    return f"{table(head, body)}\n\n{textwrap.fill(beating(rows), 120)}"


def tuned_digits() -> str:
    """Return the table of all tuned methods on digits."""
    return tuned("digits", "Dir(0.1)")


def tuned_mnist() -> str:
    """Return the table of all tuned methods on MNIST."""
    return tuned("mnist", "Dir(0.1)")


def tuned_cifar10() -> str:
    """Return the table of the most important methods on CIFAR-10, tuned."""
    return tuned("cifar10", "")


def stacking() -> str:
    """Return the differences between models trained as one stacked computation and one after the other."""
    return parting("stacking.txt")


def stacking_cuda() -> str:
    """Return the differences between models stacked on a GPU and models trained on a CPU."""
    return parting("stacking-cuda.txt")


def parting(file: str) -> str:
    """Return a list of the methods whose models differ, from the output of ``benchmarks.stacking``."""
    rows = [row.split() for row in (RESULTS / file).read_text(encoding="utf-8").splitlines()[1:]]
    worst = {method: max(map(float, values)) for method, *values in rows}
    apparent = sorted((method for method in worst if worst[method] > ROUNDING), key=lambda method: worst[method])
    listed = _listed([f"{worst[method]:.1e} ({method})" for method in apparent])
    equal = f"The models of {len(worst) - len(apparent)} methods differ by at most {ROUNDING:.0e}."
    return textwrap.fill(f"{equal} The other differences are {listed}.", 120)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    escaped = ([re.sub(r"<(?=\w)|\|", r"\\\g<0>", text) for text in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *escaped))


MAKERS = (
    config,
    settings,
    policy,
    methods,
    overview,
    papers_claims,
    headline,
    networks,
    datasets,
    metrics,
    compare_digits,
    compare_mnist,
    compare_agnews,
    compare_cifar10,
    compare_heart,
    compare_flamby,
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


def stale() -> dict[Path, str | None]:
    """Return the stale files, each with its new content, or with None if the file should not exist."""
    contents: dict[Path, str | None] = {}
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        wanted = MARKED.sub(lambda mark: f"{mark[1]}{GENERATED[mark[2]]()}\n{mark[3]}", text)
        if wanted != text:
            contents[path] = wanted
    pages = method_pages()
    for path, content in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            contents[path] = content
    return contents | {path: None for path in sorted(PAGES.glob("*.md")) if path not in pages}


if __name__ == "__main__":
    for page, content in (old := stale()).items():
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)} is stale: run python docs/generate.py")
        elif content is None:
            page.unlink()
        else:
            page.parent.mkdir(exist_ok=True)
            page.write_text(content, encoding="utf-8")
    sys.exit(1 if old and "--check" in sys.argv else 0)
