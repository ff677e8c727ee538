"""Sweep files that come with the library, by name.

Knows: where they lie.
Does not know: what is in them.
"""

from pathlib import Path

EXAMPLES = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.toml"))}
"""Name of a sweep file to its path."""
