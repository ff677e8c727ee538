"""Random configurations: one line for what cannot be run, honest numbers for what can, never another exception.

`OTAFL_FUZZ` is the number of configurations, 5,000 by default; the seed is fixed, so that a failure comes again.
"""

import dataclasses
import os
import random
import warnings
from collections.abc import Iterator
from datetime import date
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import otafl
from otafl import registry
from otafl.config.schema import CHOSEN, PARTITION_KEYS, PLAIN, Config, load_config
from otafl.errors import OtaflError
from otafl.simulation.memory import estimate
from otafl.world.partition import Partition
from tests.conftest import TINY, TINY_GAMMA

COUNT = int(os.environ.get("OTAFL_FUZZ", "5000"))
PARTS = 4  # of the work, for several processes
NASTY: list[Any] = [
    0, 1, -1, 2, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e-300, 5e-324, 1e30, 1e31, 1e155, 1e300, -1e300, 1e308,
    float("inf"), float("-inf"), float("nan"), 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**5000,
    True, False, "", " ", "abc", "\0", "a\nb", "\ud800", "x" * 5000, "../..", "/", "é", b"bytes", None,
    date(2026, 1, 1), [], [[]], [1], [1, 2], [0.5, 1.5], ["a"], [[1, 2], [3, 4]], [1e300], [None], [True],
    {}, {"a": 1}, [{}], (1,), {1, 2},
    list(range(50)), [[[[[[[[[[1]]]]]]]]]],
]  # fmt: skip
SLOW = {"sionna-tdl", "sionna-cdl", "sionna-38901", "mnist", "fashion-mnist"}  # to import, to load


def fields_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True) | {} if dataclasses.is_dataclass(cls) else {}


def sections() -> dict[str, list[tuple[str | None, dict[str, Any]]]]:
    """Section to its choices, each a name and the types of its keys."""
    found: dict[str, list[tuple[str | None, dict[str, Any]]]] = {
        section: [(None, fields_of(cls))] for section, cls in PLAIN.items()
    }
    for section, (kind, _) in CHOSEN.items():
        names = [
            name for name in registry.BUILTIN[kind] if name not in SLOW and name != "mnist" and "fashion" not in name
        ]
        found[section] = [(name, fields_of(registry.lookup(kind, name))) for name in names]
    found["data"] = [(name, {**keys, **fields_of(Partition)}) for name, keys in found["data"]]
    return found


SECTIONS = sections()


def fitting(kind: Any, draw: random.Random) -> Any:
    """A value of a type, at or near the ends of what it allows."""
    if get_origin(kind) is Annotated:
        base, *limits = get_args(kind)
        ends = [getattr(limit, end) for limit in limits for end in ("ge", "gt", "le", "lt") if hasattr(limit, end)]
        if ends and base in (int, float) and draw.random() < 0.6:
            end = draw.choice(ends)
            return base(end) if base is int else float(end) * draw.choice([1.0, 1.0 + 1e-9, 1.0 - 1e-9])
        return fitting(base, draw)
    if get_origin(kind) is Literal:
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.random() < 0.5
    if kind is int:
        return draw.choice([0, 1, 2, 3, 7, 100])
    if kind is float:
        return draw.choice([0.0, 1.0, 10 ** draw.uniform(-12, 12), -(10 ** draw.uniform(-3, 3)), draw.uniform(0, 1)])
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        size = draw.choice([0, 1, 2, 3]) if inner[-1] is ... else len(inner)
        return [fitting(inner[0 if inner[-1] is ... else i], draw) for i in range(size)]
    options = get_args(kind)
    return fitting(draw.choice(options), draw) if options else draw.choice(NASTY)


def overrides(draw: random.Random) -> dict[str, Any]:
    """The tiny world with a few keys changed, by values that fit or by values that do not."""
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA, "experiment.rounds": 2}
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        section = draw.choice(list(SECTIONS))
        name, types = draw.choice(SECTIONS[section])
        if name is not None and draw.random() < 0.5:
            partition = {f"data.{key}" for key in PARTITION_KEYS}
            keys = {k: v for k, v in keys.items() if not k.startswith(f"{section}.") or k in partition}
            keys[f"{section}.name"] = name
        if types:
            key = draw.choice(list(types))
            nasty = draw.random() < 0.45
            keys[f"{section}.{key}"] = draw.choice(NASTY) if nasty else fitting(types[key], draw)
    return keys


def affordable(config: Config) -> bool:
    """Whether two rounds of it are done in a moment."""
    work = config.training.local_steps * config.training.batch_size * config.cell.devices * len(config.experiment.seeds)
    return (
        config.experiment.rounds <= 20
        and work <= 20_000
        and config.radio.antennas <= 8
        and sum(part.size for part in estimate(config)) < 1e8
    )


def cases(part: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for number in range(part, COUNT, PARTS):
        yield number, overrides(random.Random(number))


@pytest.mark.parametrize("part", range(PARTS))
def test_every_configuration_is_refused_in_a_line_or_runs(part: int) -> None:
    ran = refused = 0
    for number, keys in cases(part):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's: what comes of it must be noticed otherwise
            try:
                config = load_config("stationary", keys)
                assert Config.from_toml(config.to_toml()) == config, number
                if not affordable(config):
                    continue
                result = otafl.run(config, device="cpu")
            except OtaflError:
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"configuration {number}: {keys}") from error
        ran += 1
        alive = [s for s, seed in enumerate(config.experiment.seeds) if seed not in result.diverged]
        assert np.isfinite(result.metrics["test_loss"][alive, -1]).all(), number
        assert bool(result.params[alive].isfinite().all()), number
        assert result.status == ("failed" if result.diverged else "complete"), number
    assert ran > COUNT / PARTS / 20  # both happen
    assert refused > COUNT / PARTS / 4
