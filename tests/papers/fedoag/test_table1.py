"""The paper's Table 1 from the declarations."""

import pytest

from otafl import registry
from otafl.config.schema import load_config
from otafl.papers.fedoag.table1 import NOTES, PRINTED, declared, marks, table1
from otafl.radio.knowledge import Knowledge


@pytest.mark.parametrize("name", sorted(registry.BUILTIN["algorithms"]))
def test_declarations_read_from_the_source_are_those_of_the_class(name: str) -> None:
    assert declared(name) == registry.lookup("algorithms", name).knowledge


def test_marks() -> None:
    assert marks(Knowledge()) == "××××"
    assert marks(Knowledge(device=frozenset({"h"}), server=frozenset({"distance_m"}))) == "×✓✓×"
    assert marks(Knowledge(device=frozenset({"mean_gain"}), server=frozenset({"h"}))) == "✓××✓"


def test_rows_agree_with_the_printed_table_or_say_why() -> None:
    text = table1()
    for _, cells, _, methods in PRINTED:
        for name in methods:
            assert f"| {name} | {' | '.join(marks(declared(name)))} |" in text
            assert (marks(declared(name)) == cells) != (name in NOTES)
            assert name not in NOTES or f"- {name}: {NOTES[name]}" in text


def test_forms_declare_what_they_need() -> None:
    """BB's other forms need more, and say so: the printed row, and the appendix's reading."""
    fading = load_config("stationary", {"algorithm.name": "bb-interior", "algorithm.form": "fading"}).algorithm.spec
    assert marks(fading.knowledge) == "×✓✓✓"
    now = load_config("stationary", {"algorithm.name": "bb-alternative", "algorithm.form": "instantaneous"})
    assert marks(now.algorithm.spec.knowledge) == "✓✓✓×"
