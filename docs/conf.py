"""Settings of the documentation site: `make docs` builds it into build/docs."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")  # notebooks

from docutils import nodes
from latex2mathml.converter import convert

from otafl import __version__

project = "otafl"
copyright = "the otafl authors"  # noqa: A001 - Sphinx calls it so
release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["images/*.csv", "*.py"]
html_theme = "furo"
html_title = f"otafl {release}"
html_static_path = ["images"]
html_show_search_summary = False  # a page that is opened from a disk cannot fetch others for their first lines
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = os.environ.get("OTAFL_DOCS_NOTEBOOKS", "force")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
html_math_renderer = "mathml"  # browsers set it themselves, offline
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]


def setup(app: Any) -> None:
    """Formulas as MathML, docstrings as plain text has them."""

    def inline(writer: Any, node: Any) -> None:
        writer.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(writer: Any, node: Any) -> None:
        writer.body.append(convert(node.astext(), display="block"))
        raise nodes.SkipNode

    def bars(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        """A bar is a norm or an absolute value, not docutils' substitution; code stays as it is."""
        code: int | None = None  # how far the line is indented that announced it
        for place, line in enumerate(lines):
            indent = len(line) - len(line.lstrip())
            if line.strip() and code is not None and indent <= code:
                code = None
            if code is None and not line.lstrip().startswith((">>>", "...")):
                lines[place] = line.replace("|", r"\|")
            if line.rstrip().endswith("::"):
                code = indent

    app.connect("autodoc-process-docstring", bars)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
