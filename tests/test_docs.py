"""The commands and code in the README and in docs/ work as printed."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from posy.strategies.methods import METHODS, settings_class

ROOT = Path(__file__).resolve().parent.parent
NODE_CONFIG = {"partition-id", "num-partitions", "state-dir", "skip-unreadable", "signing-key", "trusted-keys"}
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/results/README.md")
BUILT = ROOT / "docs/_build"
PAGES = [
    *(ROOT / name for name in TEXTS),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.is_relative_to(BUILT)),
]
README = PAGES[0].read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(len(line) for line in lines if not line.startswith(("|", "```"))) <= 120


def words_of(page: Path) -> int:
    """Return the number of words of a page, without code blocks, generated blocks and the targets of links."""
    text = page.read_text(encoding="utf-8")
    for pattern in (r"\A---\n.*?\n---\n", r"<!-- generated: .*?<!-- end -->", r"^(`{3,})(?!\{).*?^\1"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```\{(code-cell|code-block).*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<[^>]+>", " ", re.sub(r"\]\([^)]*\)", "]", text))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_documentation_is_short() -> None:
    """The limit covers all pages except the methods' and the papers' pages, which programs write."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ROOT / "docs/_build")]
    papers = {ROOT / f"docs/papers/{path.name}.md" for path in (ROOT / "papers").iterdir()}
    pages = [page for page in pages if page.parent.name not in ("methods", "api") and page not in papers]
    assert sum(map(words_of, [ROOT / "README.md", *pages])) <= 25_000


def test_counts_of_methods_are_right() -> None:
    cards = [settings_class(method).card for method in METHODS]
    checked = sum(card is not None and card.program is not None for card in cards)
    for text in (f"{len(METHODS)} methods", f"{len(METHODS) - 5} baselines", f"{checked} of the methods"):
        assert text in README
    assert f"{len(METHODS)} methods" in (ROOT / "docs/index.md").read_text(encoding="utf-8")


def test_the_comparison_in_the_readme_has_twelve_cells() -> None:
    from posy.commands.table import plan_of
    from posy.yaml12 import parse

    (example,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    assert len(plan_of(parse(example), Path("compare.yaml"), {}).cells) == 12 and "twelve cells" in README


CUSTOM_PAGE = (ROOT / "docs/how-to/custom-code.md").read_text(encoding="utf-8")
METHOD_PAGE = (ROOT / "docs/develop/method.md").read_text(encoding="utf-8")


def run_from(folder: Path, *words: str) -> dict[str, Any]:
    """Run `posy run` in a folder as a user would, and return the run's summary."""
    small = ["num-server-rounds=2", "num-clients=3", "run-name=readme", "output-dir=runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posy.commands.cli", "run", *words, *small],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((folder / "runs/readme/summary.json").read_text())
    assert (summary["status"], summary["dropped"]) == ("completed", {})
    return summary


@pytest.mark.slow
def test_the_worked_example_of_a_new_method_runs(tmp_path: Path) -> None:
    code = next(block for block in blocks(CUSTOM_PAGE) if "FedMineSettings" in block)
    assert code.count("\n") <= 15
    command = re.search(r"^posy run (method=mine.*)$", CUSTOM_PAGE, flags=re.MULTILINE)
    assert command is not None
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    summary = run_from(tmp_path, *command[1].split())
    assert summary["method"] == "fedmine" and summary["local"]["last"]["mean"] > 0.2
    rounds = [json.loads(row) for row in (tmp_path / "runs/readme/rounds.jsonl").read_text().splitlines()]
    assert rounds[0]["bytes_up"] < rounds[0]["bytes_down"]  # only the base is sent, and evaluation sends it again


@pytest.mark.slow
def test_the_short_examples_of_a_method_run(tmp_path: Path) -> None:
    bytes_up = {}
    for page, name in (("README.md", "mine:FedMine"), ("docs/start/from-flower.md", "fedmom:FedMom")):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"posy run method={name}" in text
        module, _, prefix = name.partition(":")
        (code,) = (block for block in blocks(text) if f"class {prefix}Settings" in block)
        folder = tmp_path / module
        folder.mkdir()
        (folder / f"{module}.py").write_text(code, encoding="utf-8")
        run_from(folder, f"method={name}")
        first, last = map(json.loads, (folder / "runs/readme/rounds.jsonl").read_text().splitlines())
        assert last["served_loss"]["mean"] < first["served_loss"]["mean"]
        bytes_up[prefix] = first["bytes_up"]
    assert bytes_up["FedMine"] < bytes_up["FedMom"]  # FedMine does not send the last layer


def test_the_examples_of_a_method_a_network_and_a_loss_run(tmp_path: Path) -> None:
    for name, mark in (("slow.py", "FedSlowSettings"), ("mynets.py", "# mynets.py"), ("mylosses.py", "# mylosses.py")):
        (code,) = (block for block in blocks(CUSTOM_PAGE + METHOD_PAGE) if mark in block)
        (tmp_path / name).write_text(code, encoding="utf-8")
    words = ["method=slow:FedSlow", "fedslow-step=0.8", "model=mynets:small", "loss=mylosses:focal", "lr=0.1"]
    assert run_from(tmp_path, *words)["served"]["last"]["mean"] > 0.2


@pytest.mark.slow
def test_the_example_of_a_data_set_runs(tmp_path: Path) -> None:
    (code,) = (block for block in blocks(CUSTOM_PAGE) if "# mydata.py" in block)
    (tmp_path / "mydata.py").write_text(code, encoding="utf-8")
    assert run_from(tmp_path, "method=fedrep", "dataset=mydata:moons")["local"]["last"]["mean"] > 0.7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_settings_on_pages_exist(page: Path) -> None:
    from posy.strategies.registry import defaults

    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if name.startswith("https:"):
            continue
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target
    words = re.sub(r"\]\([^)\s]+\)", "]", text)  # without links, which are relative to the page
    for path in re.findall(r"(?<![\w/])(?:benchmarks|papers|docs|tests|commands|strategies|posy)/[\w./-]+\.\w+", words):
        assert (ROOT / path).exists() or "METHOD" in path or "PAPER" in path, path
    for key in re.findall(r"`([a-z]+(?:-[a-z]+)+)=", text):
        assert key in defaults().keys() | NODE_CONFIG, key
    assert "@@" not in text
    assert not re.search(r"^ *%[^%\w]", text, flags=re.MULTILINE), "Sphinx treats lines that start with % as comments"


def test_the_example_of_a_table_describes_sixty_cells() -> None:
    from posy.commands.table import plan_of
    from posy.yaml12 import parse

    text = (ROOT / "docs/how-to/tables-and-tuning.md").read_text(encoding="utf-8")
    (example,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "seeds:" in block)
    plan = plan_of(parse(example), Path("table.yaml"), {})
    assert len({(c.variant, c.row, c.seed, c.fold) for c in plan.cells}) == len(plan.cells) == 60
    assert "= 60 cells" in text


def test_the_schematic_pictures_are_up_to_date() -> None:
    """`python docs/schematics.py` writes the pictures."""
    schematics = runpy.run_path(str(ROOT / "docs/schematics.py"))
    assert schematics["stale"]() == []
    for text in schematics["pictures"]().values():
        ElementTree.fromstring(text)


def test_every_method_has_a_summary() -> None:
    """A name may hold a full stop, as in `pFedMe (T. Dinh et al., 2020)`."""
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None and specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    rows = {row[0]: row[1:] for row in generate.described(METHODS)[1:]}
    assert all(idea and not idea.endswith(".") for _, idea, _ in rows.values())
    name, idea, citation = rows["`pfedme`"]
    assert (name, citation) == ("pFedMe", "T. Dinh et al., 2020")
    assert "Moreau" in idea


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_have_a_header_and_equal_rows(page: Path) -> None:
    """A blank line ends a table, and the rows after it become text."""
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^ *\|.*\n?)+", text, flags=re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in table.splitlines()]
        assert len(rows) > 2 and all(re.fullmatch(r" *:?-+:? *", cell) for cell in rows[1]), rows[0]
        assert [row for row in rows if len(row) != len(rows[0])] == []


def test_the_privacy_page_lists_every_method() -> None:
    text = (ROOT / "docs/deploy/privacy.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\[`([\w-]+)`\]\(\.\./methods/", text)) == sorted(METHODS)


@pytest.mark.parametrize("file", ["stacking.txt", "stacking-cuda.txt"])
def test_stacking_results_cover_all_methods(file: str) -> None:
    from posy.strategies.methods import METHODS

    rows = (ROOT / "benchmarks/results" / file).read_text(encoding="utf-8").splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(METHODS)
