"""The errors a user can cause, each shown as one line that says what to do; and `say`, which prints such lines.

Knows: exit statuses, the standard error stream.
Does not know: where the errors are raised.
"""

import contextlib
import sys


def say(line: str) -> None:
    """Print a line on the standard error stream; if that is not possible, go on without it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)


class OtaflError(Exception):
    """A mistake in what the library was given, the base of all its errors; the command line shows it as one line."""

    exit_status = 2
    """Exit status of the command line."""


class ConfigError(OtaflError):
    """A configuration key, value or combination that cannot be run."""


class TooLargeError(ConfigError):
    """A configuration that does not fit into the free memory."""


class DataError(OtaflError):
    """A data file that is missing, damaged or of the wrong kind."""


class RunDirectoryError(OtaflError):
    """An output directory that cannot be written, continued or read."""


class PluginError(OtaflError):
    """An algorithm, model, dataset, fading or mobility class that breaks its contract."""


class InformationError(PluginError):
    """A read of channel knowledge that the algorithm did not declare."""


class EnergyError(PluginError):
    """A transmission above the energy limit d E_s."""


class RunBusyError(RunDirectoryError):
    """Another process is working in the run directory."""


FULL = ("allocate", "out of memory", "ALLOC_FAILED")  # what torch, CUDA and its libraries say


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch means that there is no memory left."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(words in said for words in FULL)
