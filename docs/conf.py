"""Configure the documentation site. `make -C docs html` writes it to docs/_build/html."""

import os
import re
import sys
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from click import Context
from jupyter_cache.executors import utils as executors
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "Posy"
author = "The authors of Posy"
version = release = installed_version("posy")

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
    "sphinx_design",
]
exclude_patterns = ["_build", "**/.*"]
templates_path = ["_templates"]

# -- Markdown and notebooks -------------------------------------------------------------------------------------------
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = os.environ.get("POSY_DOCS_EXECUTE", "off")
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_render_markdown_format = "gfm"
# IPython prints the output of a shell cell in pieces of 100 characters, which nbclient joins.
executors.executenb = partial(executors.executenb, coalesce_streams=True)
# Shell cells run the `posy` of this environment, which need not be activated.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

# -- Python interface -------------------------------------------------------------------------------------------------
autosummary_generate = True
autodoc_typehints = "none"  # the types are in the docstrings
numpydoc_show_class_members = False

# -- Appearance -------------------------------------------------------------------------------------------------------
html_theme = "pydata_sphinx_theme"
html_title = "Posy"
html_static_path = ["_static"]
html_css_files = ["posy.css"]
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
html_copy_source = False

# -- Links ------------------------------------------------------------------------------------------------------------
linkcheck_timeout = 10
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)"]


def link_to_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to Markdown files outside docs/ into links to copies of these files."""
    above = re.escape("../" * (page.count("/") + 1))
    source[0] = re.sub(rf"\]\(({above}[^)#]*\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def show_examples(app: Sphinx, context: Context, lines: list[str]) -> None:
    """Show the examples of a command as code."""
    examples = [line.removeprefix("| ") for line in lines if line.strip("| ") not in ("", "examples:")]
    lines[:] = ["Examples::", "", *(f"   {line.strip()}" for line in examples), ""] if examples else []


def omit_defaults_of_flags(app: Sphinx, context: Context, lines: list[str]) -> None:
    """Omit the default of options without a value, which is always False, and click's text for optional arguments."""
    lines[:] = [line for line in lines if not line.strip().startswith((":default: ``False``", "Optional argument"))]


def add_sorting(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Let readers sort the tables of the benchmarks."""
    if page.startswith("benchmarks/"):
        app.add_js_file("sort.js", loading_method="defer")


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", link_to_files)
    app.connect("html-page-context", add_sorting)
    app.connect("sphinx-click-process-epilog", show_examples)
    app.connect("sphinx-click-process-options", omit_defaults_of_flags)
    app.connect("sphinx-click-process-arguments", omit_defaults_of_flags)
