import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from otafl.random import Streams
from otafl.units import db_to_linear, dbm_to_watt, linear_to_db


@given(st.floats(-200, 200))
def test_db_round_trip(db: float) -> None:
    assert linear_to_db(db_to_linear(db)) == pytest.approx(db, abs=1e-9)


def test_known_powers() -> None:
    """0 dBm is a milliwatt; −173 dBm/Hz is 5.012e-21 J; −inf dBm is nothing."""
    assert dbm_to_watt(0) == 1e-3
    assert dbm_to_watt(-173) == pytest.approx(5.012e-21, rel=1e-4)
    assert dbm_to_watt(-math.inf) == 0


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.text(max_size=12), st.integers(0, 10**6))
def test_streams_are_functions_of_their_address(seed: int, name: str, t: int) -> None:
    first, second = (Streams(seed).at(name, t).random(3) for _ in range(2))
    assert np.array_equal(first, second)
    assert Streams(seed).key(name, t) == Streams(seed).key(name, t) < 2**63


def test_streams_of_different_addresses_differ() -> None:
    addresses = [(s, n, t) for s in (0, 1) for n in ("fading", "noise") for t in (0, 1)]
    draws = {Streams(s).at(n, t).integers(2**62) for s, n, t in addresses}
    keys = {Streams(s).key(n, t) for s, n, t in addresses}
    assert len(draws) == len(keys) == len(addresses)
