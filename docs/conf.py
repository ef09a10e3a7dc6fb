"""The site. Sphinx reads docs/, benchmarks/results and a few pages beside them: ``make site``, offline."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "tools"))

project = "mcore_bridge"
author = "The mcore_bridge contributors"
copyright = "2026, The mcore_bridge contributors"
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "public_types"]
include_patterns = ["docs/**.md", "benchmarks/**.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "demo", "dist", "mcore_bridge", "mutants", "**/__pycache__"]

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
]

smartquotes = False  # options begin with two hyphens

html_theme = "furo"
html_title = "mcore_bridge"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}


def _plural(*arguments: Any) -> None:
    """Lets docstrings say ``GPTModel``s: reStructuredText wants a backslash after the literal."""
    lines: list[str] = arguments[-1]
    lines[:] = [re.sub(r"(``[\w.]+``)(?=\w)", r"\1\\ ", line) for line in lines]


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("autodoc-process-docstring", _plural)
