import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from otafl.config.presets import PRESETS
from otafl.config.schema import SECTIONS, Config, load_config, parse_override, resolve
from otafl.errors import ConfigError


def test_an_empty_file_is_the_papers_stationary_setting(tmp_path: Path) -> None:
    """The numbers of the paper's experiment section and appendix."""
    (tmp_path / "empty.toml").write_text("")
    config = load_config(tmp_path / "empty.toml")
    assert config == load_config("stationary")
    assert (config.cell.devices, config.experiment.rounds, config.training.local_steps) == (30, 800, 10)
    assert (config.training.batch_size, config.model.spec.hidden, config.data.name) == (32, (1024,), "mnist")
    assert (config.cell.radius_m, config.radio.tx_power_dbm, config.radio.noise_dbm_hz) == (1500, 0, -173)
    assert (config.radio.bandwidth_hz, config.pathloss.spec.carrier_hz) == (1e6, 2.4e9)
    assert (config.pathloss.spec.reference_db, config.pathloss.spec.exponent) == (50, 3.5)
    assert (config.algorithm.name, config.algorithm.spec.gamma, config.training.lr) == ("fedoag", 1e-9, 0.1)
    assert config.partition.dirichlet_alpha == 0.1


def test_moving_presets() -> None:
    for name, fraction in (("nonstationary", 1.0), ("mixed", 0.5)):
        mobility = load_config(name).mobility.spec
        assert (mobility.speed_mps, mobility.territory_m, mobility.round_s) == ((0, 2.5), 50, 8)
        assert mobility.moving_fraction == fraction


@pytest.mark.parametrize("preset", PRESETS)
def test_resolved_file_gives_the_same_run(preset: str) -> None:
    config = load_config(preset)
    again = resolve(tomllib.loads(config.to_toml()), {})
    assert again == config
    assert again.digest == config.digest
    assert set(config.to_dict()) == set(SECTIONS)


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(1e-6, 10, allow_nan=False),
    hidden=st.lists(st.integers(1, 4000), max_size=4),
    seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5, unique=True),
    speeds=st.tuples(st.floats(1e-100, 2), st.floats(2, 9)),
    name=st.sampled_from(["fedoag", "ota-fedavg"]),
)
def test_round_trip_through_toml(lr: float, hidden: list[int], seeds: list[int], speeds: Any, name: str) -> None:
    config = load_config(
        "mixed",
        {
            "training.lr": lr,
            "model.hidden": hidden,
            "experiment.seeds": seeds,
            "mobility.speed_mps": list(speeds),
            "algorithm.name": name,
            "radio.noise_dbm_hz": -math.inf,
        },
    )
    assert resolve(tomllib.loads(config.to_toml()), {}) == config


def test_quick_scales_gamma_so_that_the_same_devices_are_heard() -> None:
    """γ ∝ √d: the threshold γ/√(d E_s) is the paper's."""
    for algorithm in ("fedoag", "ota-fedavg"):
        config = load_config("quick", {"data.name": "digits", "algorithm.name": algorithm})
        num_params = 64 * 256 + 256 + 256 * 10 + 10
        assert config.algorithm.spec.gamma == pytest.approx(1e-9 * math.sqrt(num_params / 814_090), rel=1e-3)
    assert load_config("quick", {"algorithm.name": "fedoag", "algorithm.gamma": 2e-9}).algorithm.spec.gamma == 2e-9


def test_choosing_another_name_drops_the_presets_keys_but_not_the_users() -> None:
    config = load_config("mixed", {"mobility.name": "static"})
    assert config.to_dict()["mobility"] == {"name": "static"}
    with pytest.raises(ConfigError, match=r"mobility\.territory_m: unknown key"):
        load_config("mixed", {"mobility.name": "static", "mobility.territory_m": 3.0})
    kept = load_config("mixed", {"mobility.territory_m": 3.0}).mobility.spec
    assert (kept.moving_fraction, kept.territory_m) == (0.5, 3.0)
    assert load_config("stationary", {"data.name": "digits"}).partition == load_config("stationary").partition


def test_a_files_keys_stay_where_they_fit(tmp_path: Path) -> None:
    """Another method chosen over a file: γ stays where the method has one, and goes where it has not."""
    (tmp_path / "my.toml").write_text("[algorithm]\nname = 'fedoag'\ngamma = 5e-10\nanchors = 'float16'\n")
    chosen = load_config(tmp_path / "my.toml", {"algorithm.name": "ota-fedavg"})
    assert chosen.to_dict()["algorithm"] == {"name": "ota-fedavg", "gamma": 5e-10}
    ideal = load_config(tmp_path / "my.toml", {"algorithm.name": "fedavg"})
    assert ideal.to_dict()["algorithm"] == {"name": "fedavg"}
    with pytest.raises(ConfigError, match=r"algorithm\.gamma: unknown key"):
        load_config(tmp_path / "my.toml", {"algorithm.name": "fedavg", "algorithm.gamma": 1e-9})


def test_keys_that_older_files_have_are_passed_over(tmp_path: Path) -> None:
    """They changed nothing but a simulated server's memory; what did change results is refused."""
    (tmp_path / "old.toml").write_text("[algorithm]\nname = 'fedoag'\npruning = 'paper'\nrefresh = 10\n")
    assert load_config(tmp_path / "old.toml").to_dict() == load_config("stationary").to_dict()
    (tmp_path / "other.toml").write_text("[algorithm]\nname = 'fedoag'\nanchors = 'common'\nrefresh = 10\n")
    with pytest.raises(ConfigError, match=r"algorithm\.anchors"):
        load_config(tmp_path / "other.toml")


def test_any_changed_value_changes_the_digest() -> None:
    base = load_config("stationary")
    changes: list[dict[str, Any]] = [{"training.lr": 0.03}, {"experiment.seeds": [0]}, {"algorithm.gamma": 2e-9}]
    assert len({base.digest, *(base.replace(change).digest for change in changes)}) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr=0.03", ("training.lr", 0.03)),
        ("algorithm.name=ota-fedavg", ("algorithm.name", "ota-fedavg")),
        ('algorithm.name="fedavg"', ("algorithm.name", "fedavg")),
        ("experiment.seeds=[0, 1]", ("experiment.seeds", [0, 1])),
        ("radio.noise_dbm_hz=-inf", ("radio.noise_dbm_hz", -math.inf)),
        ("radio.noise_convention=n0/2", ("radio.noise_convention", "n0/2")),
    ],
)
def test_overrides_are_toml_or_bare_words(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


def test_configurations_are_values() -> None:
    config = load_config("stationary")
    assert isinstance(config, Config)
    assert hash(config) == hash(load_config("stationary"))
