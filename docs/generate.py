"""Write the parts of the documentation that repeat the code or the results in benchmarks/results.

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
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from posy.accounting import MODES
from posy.commands.launch import toml
from posy.commands.papers.claims import LINE, counts_in, read_box
from posy.data.policy import Policy
from posy.data.published import describe
from posy.data.task import CLASSIFICATION, TARGETS
from posy.metrics import METRICS
from posy.models.catalogue import MODELS
from posy.settings import settings_of
from posy.strategies.arrays import Refused
from posy.strategies.card import MethodCard, Program
from posy.strategies.methods import METHODS, paper_name, settings_class
from posy.strategies.registry import defaults, groups
from posy.strategies.settings import MethodSettings
from posy.words import capitalised, joined
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
"""Titles of the comparisons of all methods by accuracy, keyed by data set."""
HOSPITALS = {"heart": "heart disease, AUROC"}
"""Title of the comparison of all methods on four hospitals."""
TUNED = {"digits": "Dir(0.1)", "mnist": "Dir(0.1)", "cifar10": ""}
"""The variants of the comparisons with tuned settings, keyed by data set."""
DISTANCES = {
    "Mahalanobis, client branch or first blocks": "**client branch or first blocks, by client and class**",
    "Mahalanobis, client branch, by client and class": "client branch, by client and class",
    "nearest neighbours, client branch": "nearest neighbours, client branch",
    "largest density ratio": "largest density ratio",
    "energy of the classes": "energy of the class logits",
    "largest class probability": "largest class probability",
}
"""The scores of queries that the documentation lists, with their titles. The first one is Posy's."""
FOREIGN = {"noise": "noise", "inverted": "inverted", "held-out class": "class", "cifar10": "CIFAR-10", "mnist": "MNIST"}
"""Titles of foreign queries."""
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
        "sources, and deviations from the paper.\n[Agreement with other programs](../benchmarks/agreement.md) lists "
        "the programs and the largest differences from Posy."
    )


def supported_tasks(cls: type[MethodSettings]) -> list[str]:
    """Return the values of the setting ``task`` that a method supports."""
    return [CLASSIFICATION] if cls.needs_classes else list(TARGETS)


def overview() -> str:
    """Return a table of the five main methods, with the verdicts on their papers' main claims."""
    columns, *rows = described(list(METHODS)[:FIVE])
    return table(
        [*columns, "[main claims](docs/papers/index.md)"],
        (
            [*row, f"[{counts_in(main_claims(method))}](docs/papers/{method}.md)."]
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
            coverage = re.sub(f"{LINE}(?:also )?reduced: .*", "", runs)  # the paper's page names the reductions
            cells = (cell.replace(LINE, "; ") for cell in (verdict, coverage.replace("(#", f"({method}.md#")))
            lines.append([paper, claim, *cells])
    return table(["paper", "main claim", "verdict", "runs"], lines)


def described(names: Iterable[str]) -> list[list[str]]:
    """Return the header and the rows of a table of some methods."""
    rows = [["`method`", "name", "idea", "paper"]]
    for method in names:
        text = " ".join((import_module(f"posy.strategies.{method.replace('-', '_')}").__doc__ or "").split())
        name, _, rest = text.partition(": ")  # a name may contain an initial with a full stop, as in T. Dinh
        idea = re.split(r"\.(?: |$)", rest)[0]
        paper = re.search(r'"(.+?)"', text) or re.search(r"\((.+?)\)", name)
        rows.append([f"`{method}`", paper_name(method), idea, paper[1] if paper else ""])
    return rows


def card_of(method: str) -> MethodCard | None:
    """Return the card that a method's settings class declares, or None if the class only inherits a card."""
    card: MethodCard | None = vars(settings_class(method)).get("card")
    return card


def method_pages() -> dict[Path, str]:
    """Return the contents of the pages in docs/methods, one for each method with a card."""
    return {PAGES / f"{method}.md": method_page(method, card) for method, card in cards().items()}


def cards() -> dict[str, MethodCard]:
    """Return the cards of all methods that declare one."""
    return {method: card for method in METHODS if (card := card_of(method))}


def program_checks() -> str:
    """Return the largest difference between each method and its published program, and the methods without a check."""
    rows, missing = [], []
    for method, card in cards().items():
        link = f"[`{method}`](../methods/{method}.md)"
        if (program := card.program) is None:
            missing.append([link, card.no_program])
            continue
        publisher = "the paper's authors" if program.by_authors else "others"
        rows.append(
            [link, f"[{program.repository}]({address(program)})", publisher, program.commit[:10], exponent(program)]
        )
    columns = ["`method`", "program", "published by", "commit", "largest difference"]
    return f"{table(columns, rows)}\n\nThese methods have no check:\n\n{table(['`method`', 'reason'], missing)}"


def revealed() -> str:
    """Return the values that each method reveals to the server, with the protections that the method supports."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for method, card in cards().items():
        cls = settings_class(method)
        modes = ", ".join(mode for mode in MODES if cls.refused_privacy(mode) is None)
        row = card.reveals, modes or "none", "no" if cls.sums else "yes"
        names[row].append(f"[`{method}`](../methods/{method}.md)")
    rows = ([", ".join(links), *row] for row, links in names.items())
    return table(["method", "the server learns", "modes of `dp`", "`secure-aggregation`"], rows)


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
    if (ROOT / "docs" / "pictures" / f"{method}.svg").is_file():
        parts.append(f"![A round of {title}](../pictures/{method}.svg)")
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


def bibliography() -> str:
    """Return the papers of all methods in alphabetical order, each with links to its methods."""
    methods: dict[str, list[str]] = defaultdict(list)
    for method, card in cards().items():
        if card.paper:
            methods[cited(card)].append(f"[`{method}`](../methods/{method}.md)")
    return bullets(f"{citation} {joined(links)}" for citation, links in sorted(methods.items()))


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
    if card.returned:
        parts.append(f"From a reply, the server learns {card.reveals}.")
    if card.sent or card.returned:
        parts.append(
            "d is the number of parameters, M the number of clients, and C the number of classes. "
            "[Privacy](../deploy/privacy.md) lists the values that every reply contains."
        )
    if names := [name for name, refusal in supported.items() if refusal is None]:
        parts.append(f"The messages support {joined(names)}.")
    if cls.robust is None:
        parts.append("A [robust rule](../how-to/robust.md) (`robust`) can replace the server's mean.")
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
        rows.append([f"`{key}`", f"`{toml(declared.default)}`", declared.allowed(), meaning, declared.source])
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
    parts = [f"the {point} models of {joined(names)}" for point, names in methods.items() if names]
    opening = f"With {variant}, " if variant else ""
    better = "significantly better than local training"
    if len(parts) > 1:
        return capitalised(f"{opening}these models are {better}: {', and '.join(parts)}.")
    return capitalised(f"{opening}{parts[0]} are {better}." if parts else f"{opening}no model is {better}.")


def clients_of(name: str) -> pd.DataFrame:
    """Return the clients' table of a comparison; the name of a single variant is empty."""
    return _read(RESULTS / name / "clients.csv")


def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"variant": str}).fillna({"variant": ""})


def leaderboard() -> str:
    """Return the results of all methods with their default settings on all data sets, best mean rank first."""
    results = comparisons(COMPARED)
    ranks = mean_ranks(results).sort_values()
    return leader_table(ranks.index, results | comparisons(HOSPITALS), ranks, pages="../methods/")


def leaderboard_tuned() -> str:
    """Return the results of all methods with tuned settings, best mean rank first."""
    results = {
        ", ".join(filter(None, (COMPARED[name], variant))): clients_of(f"tune-{name}-tuned").set_index("method")
        for name, variant in TUNED.items()
    }
    ranks = mean_ranks({title: rows for title, rows in results.items() if len(rows) == len(METHODS)}).sort_values()
    return leader_table(ranks.index, results, ranks, pages="../methods/")


def comparisons(titles: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """Return the rows of each variant of some comparisons, indexed by method and keyed by the variant's title."""
    results: dict[str, pd.DataFrame] = {}
    for name, title in titles.items():
        for variant, rows in clients_of(f"compare-{name}").groupby("variant", sort=False):
            results[", ".join(filter(None, (title, variant)))] = rows.set_index("method")
    return results


def mean_ranks(results: Mapping[str, pd.DataFrame]) -> pd.Series:
    """Return each method's mean rank over some comparisons."""
    return pd.DataFrame({title: rows["mean"].rank(ascending=False) for title, rows in results.items()}).mean(axis=1)


def leader_table(
    methods: Iterable[str], results: Mapping[str, pd.DataFrame], ranks: pd.Series | None = None, pages: str = ""
) -> str:
    """Return a table of methods and comparisons. ``pages`` is the path to the methods' pages, or empty for no links."""
    lines = []
    for method in methods:
        rows = [rows.loc[method] if method in rows.index else None for rows in results.values()]
        name = f"[`{method}`]({pages}{method}.md)" if pages else f"`{method}`"
        rank = [] if ranks is None else [f"{ranks[method]:.1f}"]
        cells = [leader_cell(row, of["clients"].max()) for row, of in zip(rows, results.values(), strict=True)]
        lines.append([name, str(next(row["point"] for row in rows if row is not None)), *rank, *cells])
    return table(["`method`", "at", *([] if ranks is None else ["mean rank"]), *results], lines)


def leader_cell(row: "pd.Series | None", clients: int) -> str:
    """Format a mean in percent with its marks, which the leaderboard explains."""
    if row is None:
        return ""
    better, equal, fewer = row[f"{row['point']}-beats-local"], row["alike"], row["clients"] < clients
    return f"{100 * row['mean']:.1f}{' ▲' * bool(better)}{' ≈' * bool(equal)}{' †' * bool(fewer)}"


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


def measured(name: str) -> Any:
    """Return the content of a JSON file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def over_seeds(values: Sequence[float]) -> str:
    """Format the mean and the standard deviation of some fractions in percent."""
    of = pd.Series(values)
    return f"{100 * of.mean():.1f} ± {100 * of.std():.1f}"


def pretrained() -> str:
    """Return the table of clients that start from a pretrained network."""
    titles = {"fedavg": "FedAvg", "fedrep": "FedRep"}
    rows = (
        [
            *(titles[row["method"]], row["start"], over_seeds(row["served"]), over_seeds(row["local"])),
            f"{row['bytes-up'] / 1e6:.0f} MB",
        ]
        for row in measured("pretrained")["rows"]
    )
    return table(["method", "start", "served", "local", "sent by the clients"], rows)


def poisoning() -> str:
    """Return the accuracy of honest clients with each defence and attack, as ``benchmarks.poisoning`` prints it."""
    runs = pd.read_json(RESULTS / "poisoning-digits.jsonl", lines=True)
    of = 100 * runs.groupby(["defence", "attack"], sort=False)["accuracy"].agg(
        ["mean", lambda values: values.std(ddof=0)]
    )
    text = of.apply(lambda row: f"{row.iloc[0]:.1f} ± {row.iloc[1]:.1f}", axis=1).unstack(sort=False)
    attacks = list(text.columns)
    rows = ([str(defence), *row[attacks]] for defence, row in text.iterrows())
    return table(["defence", *(f"attack: {attack}" for attack in attacks)], rows)


def far_queries() -> str:
    """Return the AUROC of each score for test samples against foreign queries."""
    kinds = [(data, kind) for data, scores in measured("none-fits").items() for kind in next(iter(scores.values()))]
    kinds = [(data, kind) for data, kind in kinds if kind != "false alarms" and not kind.startswith("alarms")]
    rows = []
    for score, title in DISTANCES.items():
        values = [measured("none-fits")[data][score][kind] for data, kind in kinds]
        rows.append([title, *("–" if None in of else f"{100 * pd.Series(of).mean():.1f}" for of in values)])
    return table(["score", *(f"{COMPARED[data].split(',')[0]}: {FOREIGN.get(k, k)}" for data, k in kinds)], rows)


def far_alarms() -> str:
    """Return the shares of queries that Posy's score marks at the threshold for 5 %."""
    single = ("false alarms", "alarms, noise", "alarms, inverted", "alarms, held-out class")
    rows = []
    for data, scores in measured("none-fits").items():
        of = scores[next(iter(DISTANCES))]
        foreign = {
            kind.removeprefix("alarms, "): of[kind] for kind in of if kind.startswith("alarms") and kind not in single
        }
        named = ", ".join(f"{FOREIGN.get(kind, kind)} {over_seeds(values)}" for kind, values in foreign.items())
        rows.append([COMPARED[data].split(",")[0], *(over_seeds(of[kind]) for kind in single), named])
    columns = ["data", "test samples (false alarms)", "noise", "inverted", "class that no client has"]
    return table([*columns, "other data sets"], rows)


def routed() -> str:
    """Return the accuracy of each way to answer queries of unknown origin."""
    of = measured("routing")["over the runs"]["accuracy"]
    texts = {name: f"{100 * value['mean']:.1f} ± {100 * value['std']:.1f}" for name, value in of.items()}
    ways = {
        "system": "the client that the router chooses (system accuracy)",
        "system, right client": f"the same, if it chooses the true client ({texts['routing']} % of the samples)",
        "system, wrong client": "the same, if it chooses another client",
        "system, 8-bit pixels": "the same as the first row, with 8-bit pixels",
        "majority vote": "the majority of the clients' served models",
        "true client": "the true client's model (oracle)",
        "best single client": "the best single client's model, for all samples",
        "mean single client": "a single client's model, for all samples (mean over the clients)",
        "any client": "any client's model (share of samples that at least one model classifies correctly)",
    }
    return table(["the sample is classified by", "accuracy (%)"], ([way, texts[key]] for key, way in ways.items()))


def confused() -> str:
    """Return the chosen clients in percent of the true client's samples, over all runs."""
    counts = sum(pd.DataFrame(run["true x chosen client"]) for run in measured("routing")["runs"])
    shares = 100 * counts.div(counts.sum(axis=1), axis=0)
    rows = (
        [str(true), *(f"**{share:.1f}**" if chosen == true else f"{share:.1f}" for chosen, share in row.items())]
        for true, row in shares.iterrows()
    )
    return table(["true client", *map(str, shares.columns)], rows)


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


def parting(file: str) -> str:
    """Return a list of the methods whose models differ, from the output of ``benchmarks.stacking``."""
    rows = [row.split() for row in (RESULTS / file).read_text(encoding="utf-8").splitlines()[1:]]
    worst = {method: max(map(float, values)) for method, *values in rows}
    apparent = sorted((method for method in worst if worst[method] > ROUNDING), key=lambda method: worst[method])
    listed = joined([f"{worst[method]:.1e} ({method})" for method in apparent])
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
    networks,
    datasets,
    metrics,
    bibliography,
    program_checks,
    revealed,
    leaderboard,
    leaderboard_tuned,
    newcomers_digits,
    pretrained,
    poisoning,
    far_queries,
    far_alarms,
    routed,
    confused,
)
GENERATED: dict[str, Callable[[], str]] = {
    **{make.__name__: make for make in MAKERS},
    **{f"compare_{name}": partial(compared, name) for name in COMPARED},
    **{f"compare_{name}": partial(hospitals, f"compare-{name}") for name in ("heart", "flamby")},
    **{f"tuned_{name}": partial(tuned, name, variant) for name, variant in TUNED.items()},
    **{f"curves_{name}": partial(curves, name) for name in ("mnist", "cifar10")},
    "stacking": partial(parting, "stacking.txt"),
    "stacking_cuda": partial(parting, "stacking-cuda.txt"),
}
"""The functions that write the marked parts of the pages, keyed by the name in the mark."""


def stale() -> dict[Path, str | None]:
    """Return the stale files, each with its new content, or with None if the file should not exist."""
    contents: dict[Path, str | None] = {}
    for path in (ROOT / "pyproject.toml", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if "_build" in path.parts:
            continue
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
