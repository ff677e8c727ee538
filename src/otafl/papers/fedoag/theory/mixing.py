"""The gossip matrix of FedOAG and how fast it mixes.

With the active set A, devices' models mix as X ← W X̃ with W = 1/|A| on A × A and the identity elsewhere (W = I if A
is empty): symmetric, doubly stochastic, idempotent. The analysis needs M = E[W²] = E[W] and ρ = λ₂(M), or 1 − ρ, the
smallest eigenvalue but one of the Laplacian I − M. For independent activations with probabilities p_i and i ≠ j

    M_ij = p_i p_j E[1/(2 + N_ij)] = ∫₀¹ u g(u) a_i(u) a_j(u) du
    g(u) = Π_k (1 − p_k + p_k u),   a_i(u) = p_i/(1 − p_i + p_i u)

where N_ij counts the active devices besides i and j: a sum of rank-one matrices over the nodes of a quadrature, so that
products with M are cheap and 2^m sets need not be enumerated.

Knows: activation probabilities.
Does not know: channels, methods.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PANELS, NODES = 48, 8  # of the quadrature, in v with u = 1 − e^{−v}
FARTHEST = 40.0  # e^{−v} beyond which nothing is left of [0, 1]
DENSE = 1500  # devices up to which eigenvalues are taken of the matrix itself


def mixing_matrix(active: NDArray[np.bool_]) -> Array:
    """W of an active set [M]."""
    chosen = active.astype(np.float64)
    return np.asarray(np.diag(1 - chosen) + np.outer(chosen, chosen) / max(1.0, chosen.sum()))


def expected_mixing(prob: Array) -> Array:
    """M = E[W²] for independent activations with probabilities p_i [M]."""
    factors, weight = _factors(prob)
    matrix = (factors * weight) @ factors.T
    np.fill_diagonal(matrix, 0.0)
    np.fill_diagonal(matrix, 1 - matrix.sum(1))
    return matrix


def expected_mixing_by_enumeration(prob: Array) -> Array:
    """M by going through all 2^m active sets: for small m, as a check."""
    total = np.zeros((len(prob), len(prob)))
    for chosen in itertools.product((False, True), repeat=len(prob)):
        active = np.array(chosen)
        total += np.prod(np.where(active, prob, 1 - prob)) * mixing_matrix(active)
    return total


def sampled_mixing(active: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Mean of W over active sets [K, M], however these depend on each other, and its standard error if they do not."""
    total, squares = np.zeros((2, active.shape[1], active.shape[1]))
    for chosen in active:
        matrix = mixing_matrix(chosen)
        total += matrix
        squares += matrix**2
    mean = total / len(active)
    return mean, np.sqrt(np.maximum(squares / len(active) - mean**2, 0) / len(active))


def uniform_gap(num_devices: int, prob: float) -> float:
    """1 − ρ where everybody is heard with the same probability: E[(|A| − 1)₊]/(m − 1); 1 for p = 1."""
    if num_devices < 2 or prob >= 1:
        return 1.0
    m = num_devices
    if m * prob < 1e-5:  # the leading terms, which the difference would lose
        return float(m * prob**2 / 2 * (1 - (m - 2) * prob / 3))
    return float((m * prob + np.expm1(m * np.log1p(-prob))) / (m - 1))


def spectral_gap(prob: Array) -> float:
    """1 − ρ for independent activations, with relative accuracy also where it is tiny; 1 for a single device."""
    if len(prob) < 2:
        return 1.0
    factors, weight = _factors(prob)
    squares = (factors**2 * weight).sum(1)
    degree = factors @ (weight * factors.sum(0)) - squares  # Σ_{j≠i} M_ij
    if degree.min() <= 0:  # a device that is never heard mixes with nobody
        return 0.0
    if len(prob) <= DENSE:
        laplacian = -(factors * weight) @ factors.T
        np.fill_diagonal(laplacian, degree)
        return float(max(0.0, np.linalg.eigvalsh(laplacian)[1]))
    return _gap_by_iteration(factors, weight, degree + squares)


def _gap_by_iteration(factors: Array, weight: Array, diagonal: Array) -> float:
    """The largest eigenvalue of the inverse of D − F Fᵀ by Lanczos, D the diagonal and F = b √w (Woodbury's identity).

    The null vector, the constant one, is moved out of the way by adding a multiple of 1 1ᵀ and projected out.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    size = len(diagonal)
    scaled = factors * np.sqrt(weight)
    raised = np.full((size, 1), np.sqrt(diagonal.mean() / size))
    wings, signs = np.hstack([scaled, raised]), np.r_[-np.ones(len(weight)), 1.0]
    inner = np.linalg.inv(np.diag(signs) + wings.T @ (wings / diagonal[:, None]))

    def solve(vector: Array) -> Array:
        vector = vector.ravel() - vector.mean()
        solved = vector / diagonal
        solved = solved - (wings @ (inner @ (wings.T @ solved))) / diagonal
        return np.asarray(solved - solved.mean())

    start = np.where(diagonal == diagonal.min(), 1.0, 0.0) + np.linspace(0, 1e-3, size)
    vectors = eigsh(LinearOperator((size, size), solve), k=2, which="LA", v0=start, ncv=40, tol=1e-10)[1]
    return float(max(0.0, min(np.sum(diagonal * v**2) - np.sum((scaled.T @ v) ** 2) for v in vectors.T)))


def _factors(prob: Array) -> tuple[Array, Array]:
    """b_q [M, Q] and w_q with M_ij = Σ_q w_q b_iq b_jq off the diagonal."""
    edges = np.linspace(0.0, FARTHEST, PANELS + 1) ** 2 / FARTHEST  # finer near u = 0 and, by v, near u = 1
    roots, weights = np.polynomial.legendre.leggauss(NODES)
    half = np.diff(edges)[:, None] / 2
    v = (((edges[:-1] + edges[1:]) / 2)[:, None] + half * roots).ravel()
    u, du = -np.expm1(-v), (half * weights).ravel() * np.exp(-v)
    term = np.log1p(-np.outer(prob, np.exp(-v)))  # ln(1 − p_k + p_k u)
    factors = prob[:, None] / np.exp(term)
    return factors, u * np.exp(term.sum(0)) * du
