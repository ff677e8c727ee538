"""Verdicts on the paper's claims: only what intervals allow."""

import math

from otafl.report.claims import FAILS, HOLDS, OPEN, _over_gamma, above, claims, together, within
from otafl.report.statistics import Estimate
from otafl.result import Result
from tests.experiments.test_studies import made_up

REGIMES = ("stationary", "nonstationary", "mixed")


def test_verdicts_follow_intervals() -> None:
    sure, unsure = Estimate(2.0, 1.0, 0.5, 5), Estimate(2.0, 9.0, 8.0, 5)
    assert (above(sure, 1.0), above(sure, 3.0), above(sure, 2.1)) == (HOLDS, FAILS, OPEN)
    assert above(unsure, 0.0) == OPEN
    assert above(Estimate(2.0, math.nan, math.nan, 1), 0.0) == OPEN
    assert (within(sure, 1.0, 3.0), within(sure, 3.0, 4.0), within(sure, 0.0, 1.0)) == (HOLDS, FAILS, FAILS)
    assert within(unsure, 1.0, 3.0) == OPEN
    assert together([HOLDS, HOLDS]) == HOLDS
    assert together([HOLDS, FAILS]) == "in part"
    assert together([OPEN, FAILS]) == FAILS
    assert together([OPEN, HOLDS]) == OPEN


def level(mean: float, spread: float = 0.001) -> Result:
    """Five seeds around an accuracy."""
    return made_up([[0.1, mean + spread * (i - 2)] for i in range(5)])


def verdicts(fedoag: float, sca: float, spread: float) -> dict[str, str]:
    results = {}
    for regime in REGIMES:
        results[regime, "FedOAG"] = level(fedoag)
        results[regime, "SCA"] = level(sca, -spread)  # other seeds do better there: the difference is uncertain
        results[regime, "FedAvg"] = level(0.97)
        for name in ("BB-interior", "BB-alternative", "vanilla"):
            results[regime, name] = level(0.5)
    gammas = {1e-10: level(0.6), 3e-10: level(0.9), 1e-9: level(0.8), 1e-8: level(0.3)}
    return {claim: verdict for claim, _, _, verdict in claims(results, gammas)}


def test_claims_hold_fail_or_stay_open() -> None:
    found = verdicts(fedoag=0.83, sca=0.81, spread=0.001)
    assert found["FedOAG reaches about 83 % in all regimes"] == HOLDS
    assert found["FedOAG is better than SCA"] == HOLDS
    assert found["FedOAG does not suffer from motion"] == HOLDS
    assert found["Ideal FedAvg is on top"] == HOLDS
    assert found["Accuracy over γ is an inverted U"] == HOLDS
    assert found["Its peak is at γ = 1e-9"] == FAILS
    found = verdicts(fedoag=0.90, sca=0.92, spread=0.001)
    assert found["FedOAG reaches about 83 % in all regimes"] == "exceeded"
    assert found["FedOAG is better than SCA"] == FAILS
    assert verdicts(fedoag=0.83, sca=0.82, spread=0.1)["FedOAG is better than SCA"] == OPEN


def over_gamma(*means: float, spread: float = 0.001) -> dict[str, str]:
    gammas = dict(zip((1e-10, 3e-10, 1e-9, 1e-8), (level(mean, spread) for mean in means), strict=True))
    results = {(regime, label): level(0.9) for regime in REGIMES for label in ("FedOAG", "SCA", "FedAvg")}
    results |= {
        (regime, label): level(0.5) for regime in REGIMES for label in ("BB-interior", "BB-alternative", "vanilla")
    }
    return {claim: verdict for claim, _, _, verdict in claims(results, gammas)}


def test_claims_over_gamma() -> None:
    shape, peak = "Accuracy over γ is an inverted U", "Its peak is at γ = 1e-9"
    assert over_gamma(0.93, 0.9, 0.8, 0.1)[shape] == FAILS  # falls from its end
    assert over_gamma(math.nan, 0.9, 0.8, 0.1)[shape] == HOLDS  # diverged is lower
    assert over_gamma(math.nan, 0.9, 0.8, 0.1)[peak] == FAILS
    assert over_gamma(0.5, 0.8, 0.9, 0.1)[peak] == HOLDS
    unsure = {1e-10: level(0.5), 3e-10: level(0.8, 0.05), 1e-9: level(0.801, -0.05), 1e-8: level(0.1)}
    found = {claim: verdict for claim, _, _, verdict in _over_gamma(unsure)}
    assert found[peak] == OPEN
    assert _over_gamma({1e-9: level(math.nan)})[0][3] == OPEN
