"""The site. Sphinx reads docs/, benchmarks/results and a few pages beside them: ``make site``, offline."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT)]

import mcore_bridge  # noqa: E402

metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
project = "mcore_bridge"
author = metadata["authors"][0]["name"]
copyright = f"2026, {author}"
version = release = mcore_bridge.__version__
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "public_types"]
include_patterns = ["docs/**.md", "docs/**.ipynb", "benchmarks/**.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "demo", "dist", "mcore_bridge", "mutants", "**/__pycache__"]

nb_execution_mode = "off"  # a test runs the notebook, whose results are kept in it
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page of results may begin with a second-level heading

autodoc_member_order = "bysource"
autodoc_typehints = "signature"  # Args has the meaning
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100

nitpicky = True  # a signature names no type that no page describes, but for types of other libraries
nitpick_ignore_regex = [
    ("py:.*", r"(torch|transformers|megatron|collections|pathlib|os|datetime)\..*"),
    ("py:.*", "GPTModel|PackedSeqParams|Path|PretrainedConfig|ProcessGroup|Tensor|TransformerConfig"),
    ("py:.*", "TransformerBlockSubmodules|nn.Module|timedelta"),
    ("py:class", r"mcore_bridge\..*\.T"),  # a type variable
]

smartquotes = False  # options begin with two hyphens

html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = "docs/static/scorer.js"
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor results of examples
repository: str = metadata["urls"]["Repository"]
if "/OWNER/" not in repository:  # a placeholder, until the project has an address
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": ""}
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}


def _without_overloads(analyzer: ModuleAnalyzer, analyze: Callable[..., None] = ModuleAnalyzer.analyze) -> None:
    """Let functions have the signatures of their definitions, with all arguments, and not those of overloads."""
    analyze(analyzer)
    analyzer.overloads.clear()


ModuleAnalyzer.analyze = _without_overloads  # type: ignore[method-assign]


def _plural(*arguments: Any) -> None:
    """Lets docstrings say ``GPTModel``s: reStructuredText wants a backslash after the literal."""
    lines: list[str] = arguments[-1]
    lines[:] = [re.sub(r"(``[\w.]+``)(?=\w)", r"\1\\ ", line) for line in lines]


def _leave_out_of_search(app: Any, doctree: Any) -> None:
    """Records of measurements: a search for a subject shows its guide, not days on which it was measured."""
    if app.env.docname.startswith("benchmarks/results/"):
        app.env.metadata[app.env.docname]["nosearch"] = True


def _with_unreleased(app: Any, page: str, text: list[str]) -> None:
    """The changelog begins with the changes that no release has yet."""
    if page == "CHANGELOG":
        draft = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "Not released yet", "--date", ""]
        finished = subprocess.run(draft, cwd=ROOT, check=True, capture_output=True, text=True)
        text[0] += finished.stdout.replace("Not released yet, ", "Not released yet", 1)


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", _with_unreleased)
    app.connect("doctree-read", _leave_out_of_search)
    app.connect("autodoc-process-docstring", _plural)
