"""The whole wireless trajectory of one seed: positions, distances, gains and coefficients of every round.

It is a pure function of (cell, mobility, path loss, fading, rounds, seed), computed once and shared by all
methods of a process, so that differences between methods are paired.

Knows: geometry, motion, path loss, fading.
Does not know: thresholds, data, who transmits.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from otafl.errors import ConfigError, OtaflError, PluginError
from otafl.random import Streams
from otafl.registry import guarded
from otafl.world.fading import Fading, Rayleigh
from otafl.world.mobility import Mobility
from otafl.world.pathloss import PathLoss
from otafl.world.placement import Cell

KEPT_TRAJECTORIES = 32  # seeds whose trajectories stay in memory


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Positions and channels of every device in every round, for one seed."""

    positions_m: NDArray[np.float64]
    """Positions, [T, M, 2]; the server is at the origin."""
    distance_m: NDArray[np.float64]
    """Distances from the server, [T, M]."""
    mean_gain: NDArray[np.float64]
    """Mean gain Λ_i^t = E|h_i^t|², linear, [T, M]."""
    coeff: NDArray[np.complex128]
    """Channel h_i^t, [T, M]; with several antennas, after combining."""
    each: NDArray[np.complex128]
    """Channel h_{i,n}^t at every antenna, [T, M, N]."""
    antenna_gain: NDArray[np.float64]
    """Mean gain at a single antenna, [T, M]; equal to `mean_gain` if there is only one."""
    antennas: int = 1


@lru_cache(maxsize=KEPT_TRAJECTORIES)
def trajectory(
    cell: Cell, mobility: Mobility, pathloss: PathLoss, fading: Fading, num_rounds: int, seed: int, antennas: int = 1
) -> Trajectory:
    """Positions and channels of every device in every round, h_i^t = √Λ_i^t times fading of unit power, for one seed.

    The result is kept for the next call and shared with it: do not write into its arrays.

    Args:
        cell: radius and first positions.
        mobility: how devices move.
        pathloss: mean gain as a function of the position.
        fading: the law of the small-scale fading.
        num_rounds: number of rounds T.
        seed: seed of the run.
        antennas: number of the server's antennas N; with several, `coeff` and `mean_gain` are after combining.

    Returns:
        A `Trajectory` with `positions_m` [T, M, 2], `distance_m`, `mean_gain` and `coeff` [T, M], and more.

    Raises:
        ConfigError: no channel can be computed with these values.
        PluginError: a law of the user's own gave a wrong shape, or values that are not finite.

    >>> import otafl
    >>> c = otafl.load_config("stationary")
    >>> trajectory(c.cell, c.mobility.spec, c.pathloss.spec, c.fading.spec, 5, seed=0).coeff.shape  # [T, M]
    (5, 30)
    """
    streams = Streams(seed)
    shape = (num_rounds, cell.devices)
    start_m = cell.place(streams)
    positions_m = guarded(
        f"mobility {type(mobility).__name__}: positions",
        mobility,
        lambda: mobility.positions(start_m, cell.radius_m, num_rounds, streams),
    )
    _check("mobility", mobility, positions_m, (*shape, 2))
    distance_m = np.hypot(positions_m[..., 0], positions_m[..., 1])
    in_place = getattr(pathloss, "gains", None)
    mean_gain = guarded(
        f"pathloss {type(pathloss).__name__}: {'mean_gain' if in_place is None else 'gains'}",
        pathloss,
        lambda: pathloss.mean_gain(distance_m) if in_place is None else in_place(positions_m, streams),
    )
    _check("pathloss", pathloss, mean_gain, shape)
    if not (mean_gain > 0).all():
        raise _complaint("pathloss", pathloss, "a mean gain is not positive")
    if not callable(getattr(fading, "exceed_prob", None)):
        raise _complaint("fading", fading, "has no function exceed_prob(power), P(|g|² ≥ power)")
    each = []
    for k in range(antennas):
        mine = streams if k == 0 else Streams(streams.key("antenna", k))
        coefficients = guarded(
            f"fading {type(fading).__name__}: coefficients",
            fading,
            lambda mine=mine: fading.coefficients(positions_m, mine),  # type: ignore[misc]
        )
        _check("fading", fading, coefficients, shape)
        if not np.iscomplexobj(coefficients):
            raise _complaint("fading", fading, "returned real numbers; fading is complex, an amplitude and a phase")
        each.append(np.sqrt(mean_gain) * coefficients)
    if antennas == 1:
        return Trajectory(positions_m, distance_m, mean_gain, each[0], each[0][..., None], mean_gain)
    gain, coeff = combined(mean_gain, np.stack(each))
    return Trajectory(positions_m, distance_m, gain, coeff, np.stack(each, axis=-1), mean_gain, antennas)


def combined(
    mean_gain: NDArray[np.float64], h: NDArray[np.complex128]
) -> tuple[NDArray[np.float64], NDArray[np.complex128]]:
    """Mean gains and channels [T, M] after maximum-ratio combining of several antennas' channels [N, T, M].

    All devices send one pilot at once; the server hears Σ_i h_i at every antenna, combines with c = Σ_i h_i/‖Σ_i h_i‖,
    and so learns nothing about single devices. Device i then has the channel c^H h_i. Under Rayleigh fading its
    mean power is Λ_i (1 + (N − 1) Λ_i/Σ_j Λ_j), which is N Λ_i for a single device. The noise is that of one antenna.
    """
    total = h.sum(-1, keepdims=True)
    size = np.linalg.norm(total, axis=0)
    combiner = np.where(size > 0, total / np.where(size > 0, size, 1.0), len(h) ** -0.5)
    grown = mean_gain * (1 + (len(h) - 1) * mean_gain / mean_gain.sum(-1, keepdims=True))
    return grown, np.asarray((combiner.conj() * h).sum(0))


def _check(kind: str, model: object, values: object, shape: tuple[int, ...]) -> None:
    """Refuse what a plug-in returned if it is not a finite array of the right shape."""
    if not isinstance(values, np.ndarray) or values.shape != shape:
        got = values.shape if isinstance(values, np.ndarray) else type(values).__name__
        raise PluginError(f"{kind} {type(model).__name__}: returned {got}, must be an array of shape {shape}")
    if not np.issubdtype(values.dtype, np.number):
        raise PluginError(f"{kind} {type(model).__name__}: returned an array of {values.dtype}, must be numbers")
    if not np.isfinite(values).all():
        raise _complaint(kind, model, "returned values that are not finite")


def _complaint(kind: str, model: object, text: str) -> OtaflError:
    """The error to raise: a ConfigError about the values of a library class, or a PluginError about a plug-in."""
    if type(model).__module__.startswith("otafl."):
        return ConfigError(
            f"[cell], [mobility], [pathloss] or [fading]: no channel can be computed with these values "
            f"({kind} {type(model).__name__}: {text})"
        )
    return PluginError(f"{kind} {type(model).__name__}: {text}")


def active_prob(
    trajectory: Trajectory, fading: Fading, threshold: float, t: int | slice | NDArray[np.int64] = 0
) -> NDArray[np.float64]:
    """Uplink probability P(|h_i| ≥ threshold) of every device in round t [M], or in several rounds [·, M]."""
    if trajectory.antennas > 1:
        if not isinstance(fading, Rayleigh):
            raise ConfigError("radio.antennas: with several, uplink probabilities are known for rayleigh fading only")
        return combined_prob(trajectory.antenna_gain[t], trajectory.antennas, threshold)
    return np.asarray(fading.exceed_prob(threshold**2 / trajectory.mean_gain[t]), dtype=np.float64)


def combined_prob(gain: NDArray[np.float64], antennas: int, threshold: float, nodes: int = 32) -> NDArray[np.float64]:
    """P(|c^H h_i| ≥ threshold) after combining under Rayleigh fading, from gains [..., M] at one antenna.

    With S = Σ_j h_j, h_i is (Λ_i/Λ) S + d_i, where d_i is independent of S; so c^H h_i is Rician given ‖S‖², which is
    Λ = Σ_j Λ_j times a Gamma variable of shape N. The result is an integral of Marcum's Q. For a dominant device the
    integrand is nearly a step, so the integral is split there.
    """
    from scipy import special, stats  # slow to load, and seldom needed

    rows, back = np.unique(gain.reshape(-1, gain.shape[-1]), axis=0, return_inverse=True)  # most rounds are alike
    share = rows / rows.sum(-1, keepdims=True)
    rest = rows * (1 - share)
    level = threshold**2
    alone = special.gammaincc(antennas, level / (share * rows))
    split = (1 - alone)[..., None]
    node, weight = np.polynomial.legendre.leggauss(nodes)
    low, high = split * (node + 1) / 2, split + (1 - split) * (node + 1) / 2
    quantile = np.clip(np.concatenate([low, high], axis=-1), 1e-300, 1 - 1e-16)
    weights = np.concatenate([split * weight / 2, (1 - split) * weight / 2], axis=-1)
    direct = (share * rows)[..., None] * special.gammaincinv(antennas, quantile)
    tiny = rest < 1e-9 * rows
    width = np.where(tiny, 1.0, rest)[..., None]
    seen = (stats.ncx2.sf(2 * level / width, 2, 2 * direct / width) * weights).sum(-1)
    return np.asarray(np.where(tiny, alone, seen)[back.ravel()].reshape(gain.shape))
