"""Checks a fading law, a user's own too, against what it says of itself.

    tail       P(|g|² ≥ p) = exceed_prob(p), which is in [0, 1] and falls, within 5 standard errors over devices
    power      E|g|² = 1, by exceed_prob and, likewise, as drawn; only a note where rare large values decide
    mean       E g = 0 where the law says so (`zero_mean`), likewise
    again      the same streams give the same fading: all draws come from them
    beginning  the first rounds do not depend on how many follow

Knows: fading laws, positions.
Does not know: methods, training.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from otafl.config.schema import Config, load_config
from otafl.conformance import Finding, Verdict
from otafl.errors import ConfigError
from otafl.registry import guarded
from otafl.world.channel import trajectory

DEVICES, ROUNDS = 2000, 60
FEWEST = 100  # devices from which a standard error means something
POWERS = (0.05, 0.2, 0.5, 0.95, 2.0, 4.0)
SIGMAS = 5.0
LEAST = 0.02  # by which a law of few independent draws may be off anyway, as Clarke's waves are
SHARE = 0.1  # but no more than this share of a probability
GRID = np.logspace(-12, 12, 20_001)  # powers over which exceed_prob is integrated


def check_fading(name: str, overrides: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Run every check on a fading law, one after the other as the result is read.

    Args:
        name: name of a law, built in or registered.
        overrides: keys of the world or of the law, `{"section.key": value}`.

    Yields:
        What each check found; the law passes if none is "FAIL".

    Raises:
        OtaflError: the law cannot be used at all.

    >>> [finding.verdict for finding in check_fading("rayleigh")]
    ['ok', 'ok', 'ok', 'ok', 'ok']
    """
    world = {"cell.devices": DEVICES, "cell.placement": "uniform", "fading.name": name, **(overrides or {})}
    config = load_config("stationary", world)
    if config.cell.devices < FEWEST:
        raise ConfigError(f"cell.devices = {config.cell.devices}: a law is checked on {FEWEST} devices or more")
    law = config.fading.spec
    drawn = _drawn(config, ROUNDS)
    power = np.abs(drawn) ** 2
    tail, claimed_mean = _tail(name, law, power)
    yield tail
    mean, error = _over_devices(power)
    text = f"E|g|² is {mean:.3f} ± {error:.3f} over {drawn.shape[1]} devices"
    text += f", {claimed_mean:.3f} by exceed_prob" if np.isfinite(claimed_mean) else ""
    if abs(claimed_mean - 1) > LEAST:
        yield Finding("power", "FAIL", f"{text}; it must be 1")
    elif abs(mean - 1) <= SIGMAS * error + LEAST:
        yield Finding("power", "ok", text)
    elif tail.verdict == "ok" and mean < 1:
        yield Finding("power", "note", f"{text}; the tail is right, so that rare large values may be missing")
    else:
        yield Finding("power", "FAIL", f"{text}; it must be 1")
    if getattr(law, "zero_mean", False):
        size = float(abs(drawn.mean()))
        limit = SIGMAS * float(np.sqrt((np.abs(drawn.mean(0)) ** 2).mean() / drawn.shape[1])) + LEAST
        text = f"|E g| is {size:.3f}"
        good = size < limit
        yield Finding("mean", "ok" if good else "FAIL", text if good else f"{text}; `zero_mean` says that it is 0")
    same = np.array_equal(drawn, _drawn(config, ROUNDS))
    yield Finding("again", *_said(same, "the same seed gives the same fading", "draw from `streams.at(name, t)` only"))
    same = np.array_equal(drawn[:20], _drawn(config, 20))
    yield Finding("beginning", *_said(same, "20 rounds are the first 20 of more", "address draws by their round"))


def _tail(name: str, law: Any, power: np.ndarray) -> tuple[Finding, float]:
    """Whether the tail of powers [T, M] is as claimed; and E|g|² = ∫ P(|g|² ≥ p) dp as claimed."""

    def claims(powers: np.ndarray) -> np.ndarray:
        call = partial(law.exceed_prob, powers)
        return np.asarray(guarded(f"fading {name}: exceed_prob", law, call), dtype=np.float64)

    claimed = claims(np.array(POWERS))
    if claimed.shape != (len(POWERS),) or not ((claimed >= 0) & (claimed <= 1)).all() or (np.diff(claimed) > 0).any():
        text = f"exceed_prob of {POWERS} is {claimed.tolist()}; give probabilities that fall"
        return Finding("tail", "FAIL", text), float("nan")
    found = [_over_devices((power >= p).astype(np.float64)) for p in POWERS]
    gaps = [abs(share - p) for (share, _), p in zip(found, claimed, strict=True)]
    allowed = [
        SIGMAS * max(error, np.sqrt(p * (1 - p) / power.size)) + min(LEAST, SHARE * p, SHARE * (1 - p))
        for (_, error), p in zip(found, claimed, strict=True)
    ]
    off = np.array(gaps) - allowed
    worst = int(np.argmax(off if off.max() > 0 else gaps))
    text = f"P(|g|² ≥ {POWERS[worst]:g}) is {found[worst][0]:.3f} drawn, {claimed[worst]:.3f} by exceed_prob"
    text += f"; the farthest of {len(POWERS)} levels"
    return Finding("tail", "ok" if off.max() <= 0 else "FAIL", text), float(np.trapezoid(claims(GRID), GRID))


def _said(good: bool, text: str, remedy: str) -> tuple[Verdict, str]:
    return ("ok", text) if good else ("FAIL", f"not so: {text}; {remedy}")


def _drawn(config: Config, num_rounds: int) -> np.ndarray:
    """Fading of all devices that stand still, [T, M]."""
    parts = config.cell, config.mobility.spec, config.pathloss.spec, config.fading.spec
    found = trajectory.__wrapped__(*parts, num_rounds, 0)  # drawn anew, not the one that is kept
    return np.asarray(found.coeff / np.sqrt(found.mean_gain))


def _over_devices(values: np.ndarray) -> tuple[float, float]:
    """Mean of [T, M], and its standard error if devices are independent and rounds perhaps are not."""
    per_device = values.mean(0)
    return float(per_device.mean()), float(per_device.std(ddof=1) / np.sqrt(len(per_device)))
