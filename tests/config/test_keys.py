"""Every key is explained, from one text, wherever a user asks."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge, Lt

import otafl
from otafl import complete, registry
from otafl.config.keys import describe, every_key, explained, keys_of, section_keys
from otafl.config.presets import PRESETS
from otafl.config.schema import CHOSEN, SECTIONS
from otafl.errors import ConfigError


@pytest.mark.usefixtures("no_plugins")
def test_every_key_has_a_meaning() -> None:
    assert [key.path for key in every_key() if not key.meaning] == []


@pytest.mark.parametrize("source", ["stationary", "urban", "mixed"])
def test_an_explained_configuration_is_that_configuration(source: str, tmp_path: Path) -> None:
    """What `otafl config` prints is a file that gives the same run, with every key in it."""
    overrides = {"training.lr": 0.03, "algorithm.name": "sca"}
    text = explained(source, overrides)
    file = tmp_path / "my.toml"
    file.write_text(text, encoding="utf-8")
    assert otafl.load_config(file) == otafl.load_config(source, overrides)
    assert "lr = 0.03  # --set; default 0.1" in text
    assert "rounds = 800  # default" in text


def test_where_values_come_from() -> None:
    text = explained("mixed", {"cell.devices": 10})
    assert "moving_fraction = 0.5  # preset mixed; default 1.0" in text
    assert "devices = 10  # --set; default 30" in text
    assert tomllib.loads(text)["mobility"]["name"] == "bounded-waypoint"


def test_a_scaled_gamma_says_so() -> None:
    text = explained("quick", {"algorithm.name": "fedoag", "data.name": "digits"})
    assert "preset quick, scaled; default 1e-09" in text


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_and_part_is_described(section: str) -> None:
    text = describe(section)
    for key in section_keys(section) if section not in CHOSEN else []:
        assert key.path in text
    for name in registry.BUILTIN[CHOSEN[section][0]] if section in CHOSEN else []:
        assert name in text
        part = describe(f"{section}.{name}")
        cls = registry.lookup(CHOSEN[section][0], name)
        assert all(key.path in part for key in keys_of(section, cls))


def test_names_alone_and_mistakes() -> None:
    assert describe("weibull").startswith("fading.weibull")
    assert "preset rician" in describe("rician")
    assert "fading.k_factor" in describe("rician")
    assert "above 0" in describe("training.lr")
    for topic, line in (
        ("lr", "training.lr"),
        ("none", "fading.none"),
        ("fading.ricean", "did you mean 'rician'"),
        ("fadin", "did you mean 'fading'"),
        ("fadin.rician", "did you mean 'fading'"),
    ):
        if topic == "none":
            assert describe(topic).startswith(line)
            continue
        with pytest.raises(ConfigError, match=line):
            describe(topic)


def test_a_plugins_keys_are_read_the_same_way() -> None:
    @dataclass(frozen=True)
    class Mine:
        """A law of my own."""

        depth: Annotated[float, Ge(0), Lt(3)] = 0.5
        """How deep."""
        waves: tuple[int, ...] = (1, 2)

    depth, waves = keys_of("fading", Mine)
    assert (depth.default, depth.allowed, depth.meaning) == ("0.5", "number at least 0 and below 3", "How deep.")
    assert (waves.default, waves.allowed, waves.meaning) == ("[1, 2]", "list of whole numbers", "")


def test_completion() -> None:
    assert complete.configurations("sta") == ["stationary"]
    assert "training." in complete.overrides("tr")
    assert "training.lr=" in complete.overrides("training.l")
    assert complete.overrides("fading.name=ri") == ["fading.name=rician"]
    assert complete.overrides("training.batches=per_r") == ["training.batches=per_round"]
    assert complete.overrides("training.skip_unheard=") == ["training.skip_unheard=true", "training.skip_unheard=false"]
    assert complete.overrides("nothing.x") == []
    assert "fading.rician" in complete.topics("fading.r")
    assert set(PRESETS) <= set(complete.configurations(""))


def test_a_key_without_its_section_is_found() -> None:
    with pytest.raises(ConfigError, match=r"name a key as section.key: training.lr$"):
        otafl.load_config("stationary", {"lr": 0.1})
