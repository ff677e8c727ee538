"""The paper's Table 1 from the declarations."""

import pytest

from otafl import registry
from otafl.config.schema import load_config
from otafl.papers.fedoag.table1 import NOTES, PRINTED, declared, marks, table1
from otafl.radio.knowledge import Knowledge


@pytest.mark.parametrize("name", sorted(registry.BUILTIN["algorithms"]))
def test_what_the_list_says_of_a_method_is_what_it_declares(name: str) -> None:
    assert registry.channel(name) == (marks(declared(name)), declared(name).fading)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in registry.BUILTIN.items() for name in names])
def test_what_the_list_says_is_the_first_line_of_the_docstring(kind: str, name: str) -> None:
    assert registry.summary(kind, name) == registry.lookup(kind, name).__doc__.splitlines()[0]


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
