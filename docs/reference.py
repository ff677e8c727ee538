"""Writes the pages that follow from the code: configuration, command line, metrics.

python docs/reference.py
"""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from otafl import cli, registry
from otafl.config.keys import Key, first_paragraph, keys_of, section_keys
from otafl.config.schema import CHOSEN, PLAIN, SECTIONS
from otafl.core import metrics
from otafl.report.markdown import markdown
from otafl.world.partition import Partition

FOLDER = Path(__file__).parent


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def keys_table(keys: Sequence[Key]) -> str:
    """Keys with default, range and meaning."""
    rows = [(f"`{k.name}`", f"`{k.default}`" if k.default else "–", k.allowed, k.meaning) for k in keys]
    return markdown(("key", "default", "allowed", "meaning"), [[cell(text) for text in row] for row in rows])


def configuration() -> str:
    """Every section, every part that can be chosen, every key."""
    parts = [
        "# Configuration",
        "",
        "Every key of every section, from the docstrings of the classes that have them. The defaults are",
        "the paper's stationary setting. `otafl config PRESET` shows a whole configuration with the origin",
        "of every value, `otafl describe fading.rician` one part of it.",
        "",
    ]
    for section in SECTIONS:
        parts += [f"## [{section}]", ""]
        if section in PLAIN:
            parts += [wrapped(first_paragraph(PLAIN[section])), "", keys_table(section_keys(section)), ""]
            continue
        kind, default = CHOSEN[section]
        parts += [f"`name` chooses one of the {kind}; default `{default}`.", ""]
        if section == "data":
            parts += ["Keys of every data set:", "", keys_table(keys_of(section, Partition)), ""]
        for name in registry.BUILTIN[kind]:
            cls = registry.lookup(kind, name)
            keys = keys_of(section, cls)
            parts += [f"### {section}.{name}", "", wrapped(first_paragraph(cls)), ""]
            parts += [keys_table(keys) if keys else "No keys.", ""]
    return "\n".join(parts)


def wrapped(text: str) -> str:
    """Prose of at most 100 columns."""
    import textwrap

    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def command_line() -> str:
    """Every command with its arguments and options."""
    app: Any = typer.main.get_command(cli.app)
    parts = ["# Command line", "", "Also `otafl --help`, and `otafl COMMAND --help`.", ""]
    for name, command in app.commands.items():
        for title, one in [
            (name, command),
            *((f"{name} {sub}", c) for sub, c in getattr(command, "commands", {}).items()),
        ]:
            parts += [f"## otafl {title}", "", "\n\n".join(map(wrapped, (one.help or "").split("\n\n"))), ""]
            rows = []
            for parameter in one.params:
                argument = parameter.param_type_name == "argument"
                shown = (parameter.metavar or parameter.name.upper()) if argument else ", ".join(parameter.opts)
                if not argument and not parameter.is_flag:
                    shown += f" {parameter.metavar or 'VALUE'}"
                default = parameter.default
                told = "" if default in (None, False, "", ...) or callable(default) else f"`{default}`"
                rows.append((f"`{cell(shown)}`", told, cell(parameter.help or "")))
            parts += [markdown(("argument or option", "default", "meaning"), rows), ""] if rows else []
            if one.epilog:
                example = "\n".join(line.strip() for line in one.epilog.replace("\b", "").strip().splitlines()[1:])
                parts += ["```", example, "```", ""]
    return "\n".join(parts)


def columns() -> str:
    """The columns of metrics.csv."""
    text = inspect.getdoc(metrics) or ""
    head, table, rest = text.split("\n\n")[1:4]
    rows: list[list[str]] = []
    for line in table.splitlines():
        name, meaning = line[4:38].strip(), line[38:].strip()
        if name:
            rows.append([", ".join(f"`{part}`" for part in re.split(r",\s*", name)), meaning])
        else:
            rows[-1][1] += f" {meaning}"
    assert rest.startswith("Knows")
    return "\n".join(
        [
            "# Metrics",
            "",
            wrapped("The columns of `metrics.csv`, and of `result.metrics` in Python. " + " ".join(head.split())),
            "",
            markdown(("column", "what it is"), [[row[0], cell(row[1])] for row in rows]),
            "",
        ]
    )


PAGES = {"configuration.md": configuration, "command-line.md": command_line, "metrics.md": columns}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
