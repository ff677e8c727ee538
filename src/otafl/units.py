"""Decibels and SI units, converted here and nowhere else.

Knows: logarithms and powers of ten.
Does not know: what the quantities are used for.
"""

import math

SPEED_OF_LIGHT_MPS = 299_792_458.0


def db_to_linear(db: float) -> float:
    """Power ratio of a value in dB; −inf dB is 0."""
    try:
        return float(10.0 ** (db / 10.0))
    except OverflowError:
        return math.inf


def linear_to_db(ratio: float) -> float:
    """Value in dB of a power ratio; 0 is −inf dB."""
    return 10.0 * math.log10(ratio) if ratio > 0 else -math.inf


def dbm_to_watt(dbm: float) -> float:
    """Power in watts of a value in dBm; equally, energy in joules of a density in dBm/Hz."""
    return 1e-3 * db_to_linear(dbm)
