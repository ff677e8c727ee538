"""What a shell may complete at the command line: presets, files, keys, values, topics.

Knows: names that a configuration can choose, its keys.
Does not know: commands.
"""

from collections.abc import Iterator
from pathlib import Path

from otafl import registry


def configurations(incomplete: str) -> list[str]:
    """Presets and TOML files."""
    from otafl.config.presets import PRESETS

    return [word for word in (*PRESETS, *_files(incomplete)) if word.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """`section.key=value`, one part after the other."""
    from otafl.config.keys import section_choices, values_of
    from otafl.config.schema import SECTIONS

    path, equals, begun = incomplete.partition("=")
    section, dot, _ = path.partition(".")
    if not dot:
        return [f"{name}." for name in SECTIONS if name.startswith(incomplete)]
    if section not in SECTIONS:
        return []
    if equals:
        return [f"{path}={value}" for value in values_of(path) if value.startswith(begun)]
    return [f"{key}=" for key in section_choices(section) if key.startswith(incomplete)]


def topics(incomplete: str) -> list[str]:
    """Sections, and what each can choose."""
    from otafl.config.presets import PRESETS
    from otafl.config.schema import CHOSEN, SECTIONS

    parts = [f"{section}.{name}" for section, (kind, _) in CHOSEN.items() for name in registry.names(kind)]
    return [word for word in (*SECTIONS, *PRESETS, *parts) if word.startswith(incomplete)]


def _files(incomplete: str) -> Iterator[str]:
    folder = Path(incomplete).parent if incomplete else Path()
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".toml":
                yield str(path)
    except OSError:
        return
