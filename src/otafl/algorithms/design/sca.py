"""Pre-scalers of truncated inversion that trade the bias of unequal channels against noise.

Device i sends with pre-scaler γ_i when |h_i| ≥ γ_i/√(d E_s). Under Rayleigh fading, with its reach S_i = √(d Λ_i E_s),

    q_i = exp(−γ_i²/S_i²)   it transmits with this probability,
    α_i = γ_i q_i           its mean received amplitude;   α = Σ α_i,   p_i = α_i/α its weight in the mean,

and the convergence bound of A. Abrar and N. Michelusi (arXiv 2403.19849, 2503.06078, 2510.26722), up to constants, is

    Ψ(γ) = wb Σ (p_i − 1/m)² + wv [ Σ p_i² (1/q_i − 1) + Σ p_i² σ_i² + ν/α² ],    ν = d σ_z².

Vectors have norm at most 1 here; σ_i² is the variance of device i's vector. Two values of γ_i give the same α_i, and
the smaller one has less variance. So y_i = γ_i²/S_i² lies in (0, ½], and on the channel of the design every device
transmits with probability at least e^{−½}. The optimum is unique: `exact` finds it by nested root finding,
`successive` by successive convex approximation in the log domain, as the papers do; they agree.

Arrays have the devices last; leading axes are independent instances.

Knows: reaches, noise, the weights of bias and variance.
Does not know: instantaneous channels, models, methods.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import lambertw

from otafl.errors import OtaflError

Array = NDArray[np.float64]

LEAST_NOISE = 1e-12  # smallest ν/(median reach)²: below it a design has no finite scale
MOST_STEPS = 500  # most successive approximations
SETTLED = 1e-10  # relative gain at which they stop


def transmit_probability(gamma: Array, reach: Array) -> Array:
    """Probability q_i that device i transmits."""
    return np.exp(-((gamma / reach) ** 2))


def amplitudes(gamma: Array, reach: Array) -> Array:
    """Mean received amplitudes α_i = γ_i q_i."""
    return gamma * transmit_probability(gamma, reach)


def weights(gamma: Array, reach: Array) -> Array:
    """Weights p_i = α_i/α of the devices in the mean."""
    alpha = amplitudes(gamma, reach)
    return np.asarray(alpha / alpha.sum(-1, keepdims=True))


def bound(
    gamma: Array, reach: Array, noise: float, bias_weight: float, variance_weight: float, spread: Array | float = 0.0
) -> Array:
    """Bound Ψ for given pre-scalers, one value per instance; noise is ν, spread is σ_i²."""
    p = weights(gamma, reach)
    alpha = amplitudes(gamma, reach).sum(-1)
    bias = ((p - 1 / reach.shape[-1]) ** 2).sum(-1)
    transmission = (p**2 * (np.expm1((gamma / reach) ** 2) + spread)).sum(-1)
    return np.asarray(bias_weight * bias + variance_weight * (transmission + noise / alpha**2))


def min_noise(reach: Array) -> Array:
    """Every device at its largest mean amplitude, γ_i = S_i/√2: least noise, p_i ∝ √Λ_i."""
    return np.asarray(reach / np.sqrt(2))


def zero_bias(reach: Array) -> Array:
    """All α_i equal and as large as the weakest device allows: p_i = 1/m with least noise."""
    ratio = (reach.min(-1, keepdims=True) / reach) ** 2
    y = np.where(ratio < 1, -0.5 * lambertw(-np.minimum(ratio, 1 - 1e-15) / np.e).real, 0.5)
    return np.asarray(reach * np.sqrt(y))


def exact(reach: Array, noise: float, bias_weight: float, variance_weight: float, spread: Array | float = 0.0) -> Array:
    """The minimiser of Ψ.

    For fixed α the problem separates into Σ φ_i(α_i), φ_i = α_i² [wb + wv σ_i² + wv (e^{y_i} − 1)], each convex, so
    at the optimum all φ_i' equal one θ. Optimality in α then means H(θ) = θ α/2 − Σ φ_i = wv ν, and H rises from 0.
    """
    unit = np.median(reach, axis=-1, keepdims=True)
    s = reach / unit
    scale = max(bias_weight, variance_weight)
    wb, wv = bias_weight / scale, variance_weight / scale
    target = wv * np.maximum(noise / unit[..., 0] ** 2, LEAST_NOISE)
    base = wb + wv * np.broadcast_to(np.asarray(spread, dtype=np.float64), s.shape)

    low, high = np.full(target.shape, -90.0), np.full(target.shape, 90.0)
    place = np.zeros_like(s)
    for _ in range(80):
        middle = (low + high) / 2
        place = _where_slopes_are(middle[..., None], s, base, wv, place)
        y = 0.5 * _sigmoid(place)
        alpha = s * np.sqrt(y) * np.exp(-y)
        phi = alpha**2 * (base + wv * np.expm1(y))
        reached = np.exp(middle) * alpha.sum(-1) / 2 - phi.sum(-1)
        low, high = np.where(reached < target, middle, low), np.where(reached < target, high, middle)
    y = 0.5 * _sigmoid(_where_slopes_are(((low + high) / 2)[..., None], s, base, wv, place))
    return np.asarray(unit * s * np.sqrt(y))


def successive(
    reach: Array, noise: float, bias_weight: float, variance_weight: float, spread: Array | float = 0.0
) -> Array:
    """The minimiser of Ψ by successive convex approximation, one instance [M].

    With a_i = ln p_i, b = ln α, c_i = ln γ_i only the terms −e^{a_i} and −e^{2 a_i} of Ψ are not convex. Constraints
    a_i + b ≤ c_i − e^{2 c_i}/S_i² are convex, Σ e^{a_i} ≥ 1 is not. Tangents at the last iterate replace what is not.
    """
    unit = float(np.median(reach))
    s, scale, num_devices = reach / unit, max(bias_weight, variance_weight), len(reach)
    wb, wv, nu = bias_weight / scale, variance_weight / scale, max(noise / unit**2, LEAST_NOISE)
    fixed = (s, nu, wb, wv, spread)

    def value(gamma: Array) -> float:
        return float(bound(gamma, *fixed))

    most = s / np.sqrt(2)
    gamma = min((s / 2, zero_bias(s), most), key=value)
    for _ in range(MOST_STEPS):
        best, here = value(gamma), np.log(gamma)
        way = _convex_step(gamma, s, nu, wb / best, wv / best, np.broadcast_to(spread, num_devices)) - here

        def at(share: float, here: Array = here, way: Array = way) -> Array:
            return np.asarray(np.minimum(np.exp(here + share * way), most))

        share = 1.0
        while value(at(share)) > best and share > 1e-9:
            share /= 2
        while value(at(2 * share)) < value(at(share)):  # majorisation steps are short: double while Ψ falls
            share *= 2
        gain = best - value(at(share))
        gamma = at(share) if gain > 0 else gamma
        if gain <= SETTLED * best:
            return np.asarray(unit * gamma)
    raise OtaflError(
        f'the successive approximation did not settle in {MOST_STEPS} steps; use algorithm.solver = "exact"'
    )


def _convex_step(gamma: Array, s: Array, nu: float, wb: float, wv: float, spread: Array) -> Array:
    """Logarithms ln γ that solve the convex problem around an iterate."""
    m = len(s)
    p0 = weights(gamma, s)
    a0, b0, c0 = np.log(p0), float(np.log(amplitudes(gamma, s).sum())), np.log(gamma)

    def surrogate(x: Array) -> tuple[float, Array]:
        a, b, c = x[:m], x[m], x[m + 1 :]
        squares, sent, heard = np.exp(2 * a), np.exp(a + c - b), np.exp(-2 * b)
        value = ((wb + wv * spread) * squares + wv * sent).sum() + wv * nu * heard
        value -= (2 * wb / m * p0 * (1 + a - a0) + wv * p0**2 * (1 + 2 * (a - a0))).sum()
        by_a = 2 * (wb + wv * spread) * squares + wv * sent - 2 * wb / m * p0 - 2 * wv * p0**2
        by_b = -wv * sent.sum() - 2 * wv * nu * heard
        return float(value), np.concatenate([by_a, [by_b], wv * sent])

    def amplitude_left(x: Array) -> Array:
        return np.asarray(x[m + 1 :] - np.exp(2 * x[m + 1 :]) / s**2 - x[:m] - x[m])

    def amplitude_slopes(x: Array) -> Array:
        by_c = np.diag(1 - 2 * np.exp(2 * x[m + 1 :]) / s**2)
        return np.hstack([-np.eye(m), -np.ones((m, 1)), by_c])

    share_slopes = np.concatenate([p0, np.zeros(m + 1)])
    start = np.concatenate([a0, [b0], c0])
    found = minimize(
        surrogate,
        start,
        jac=True,
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": amplitude_left, "jac": amplitude_slopes},
            {"type": "ineq", "fun": lambda x: (p0 * (1 + x[:m] - a0)).sum() - 1, "jac": lambda x: share_slopes},
        ],
        options={"maxiter": 200, "ftol": 1e-14},
    )
    return np.asarray(found.x[m + 1 :])


def _where_slopes_are(log_theta: Array, s: Array, base: Array, wv: float, start: Array) -> Array:
    """Values u with φ'(y) = θ at y = σ(u)/2, by Newton's method: in u, ln φ' has a slope between ½ and 3/2."""
    u = start
    for _ in range(60):
        y, rest = 0.5 * _sigmoid(u), _sigmoid(-u)  # rest is 1 − 2y, to full precision near ½
        bracket = base + wv * ((1 - y) * np.expm1(y) + y) / rest
        value = np.log(2 * s) + 0.5 * np.log(y) - y + np.log(bracket)
        growth = wv * np.exp(y) * (2 - 3 * y + 2 * y**2) / rest**2  # d bracket/dy
        change = (log_theta - value) / ((0.5 / y - 1 + growth / bracket) * y * rest)
        u = u + np.clip(change, -20.0, 20.0)
        if np.max(np.abs(change)) < 1e-12:
            break
    return u


def _sigmoid(u: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-u)))
