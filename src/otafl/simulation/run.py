"""Runs a configuration: the loop over rounds, with recorded rows, checkpoints and resuming.

Knows: simulations, metrics, the run directory.
Does not know: methods, how a result is shown.
"""

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otafl.config.schema import PAPER_PARAMS, Config, load_config, loaded, num_params, scaled_gamma
from otafl.core.metrics import Ledger, Rows, consensus, on_host
from otafl.core.state import continued, rebuilt, tensors_of
from otafl.engine import models
from otafl.engine.fast import kernels
from otafl.errors import ConfigError, OtaflError, PluginError, RunDirectoryError, TooLargeError, is_out_of_memory
from otafl.radio.noise import NoiseSource
from otafl.runs.directory import Checkpoint, RunDirectory
from otafl.runs.identity import data_digest, is_plugin, module_digest, name_hash, sources
from otafl.runs.result import Result, failures, finished_on, overlong, read_run, versions
from otafl.runs.table import Recorder
from otafl.signals import caught_signals
from otafl.simulation.build import Simulation, choose_device, own_models
from otafl.simulation.graph import Rounds
from otafl.simulation.outcome import describe_device, devices_csv, summarise
from otafl.world import own_data
from otafl.world.data import load_dataset
from otafl.world.own_data import dataset_of

log = logging.getLogger(__name__)

Observer = Callable[[int, Rows | None], None]
"""Called before the first and after every round, with the rounds done and the row just recorded, or None.

A row is a dict of column name to one value per seed.
"""
UnderWay = Generator[None, None, Result]
"""A run that pauses when it is set up, and after every round."""


class Interrupted(OtaflError):
    """A signal stopped the run after a checkpoint; the same command continues it."""

    def __init__(self, number: int, round_: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after round {round_}; the same command continues from there")
        self.round, self.exit_status = round_, 128 + number


LARGEST_FEATURE = 16.0  # values of one's own above it are hardly standardised
_alone = threading.RLock()  # building models and reading their layers change things that belong to the whole process


def run(
    config: Config | str | Path,
    out: str | Path | None = None,
    device: str = "auto",
    *,
    data: Any = None,
    model: nn.Module | None = None,
    noise: NoiseSource | None = None,
    observer: Observer | None = None,
    fresh: bool = False,
) -> Result:
    """Run all rounds of a configuration, for all its seeds at once, and return the result.

    Args:
        config: what to run: a configuration, a preset's name or the path of a TOML file.
        out: a run directory to write, to continue if it was interrupted, or to read if it is complete; None
            writes nothing.
        device: compute device, "auto" (a GPU if there is one), "cpu" or "cuda".
        data: (X, y, X_test, y_test) to use instead of `[data]`, arrays or tensors, or an `otafl.Dataset`. X is [N, ...]
            or images [N, channels, height, width], of which bytes are divided by 255; y is whole numbers from 0, [N].
        model: a module to use instead of `[model]`; every seed starts from its present weights. A γ that is the
            default, which the paper chose for its own network, is scaled with √d.
        noise: a source of unit-variance receiver noise that replaces the seeded one; not with `out`.
        observer: called before the first and after every round; see `Observer`.
        fresh: run again in `out-2` (or `-3` …) if `out` already exists.

    Returns:
        Rows, last models and summary of all seeds. A seed whose model explodes is no error: `diverged` names it.

    Raises:
        OtaflError: whatever was wrong with what was given, as one line: a ConfigError, DataError, PluginError,
            EnergyError or RunDirectoryError. With `out`, SIGINT and SIGTERM raise one, too, after a checkpoint.

    >>> small = load_config("quick", {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2})
    >>> run(small, device="cpu").metrics["test_accuracy"].shape  # [seeds, recorded rounds]
    (2, 2)

    Runs of several threads of one process wait for each other; use processes for several at a time (`otafl sweep`).
    """
    with _alone:
        if not isinstance(config, Config | str | Path):
            raise ConfigError(
                f"run() takes a Config, a preset's name or the path of a TOML file, not a {type(config).__name__}"
            )
        if not isinstance(out, str | Path | None):
            raise ConfigError(f"run(out=...) takes the path of a directory, not a {type(out).__name__}")
        config = loaded(config) if isinstance(config, Config) else load_config(config)
        config, notes = with_objects(config, data, model)
        if out is not None and noise is not None:
            raise ConfigError("run(out=...) cannot record a source of noise that is given as an object")
        place = None if out is None else fresh_directory(Path(out)) if fresh else Path(out)
        stop: list[int] = []
        with closing(_under_way(config, place, choose_device(device), observer, stop, noise, notes)) as rounds:
            result = _next(rounds)  # set-up, which a signal ends at once
            with nullcontext() if place is None else caught_signals(stop):
                while result is None:
                    result = _next(rounds)
        return dataclasses.replace(result, notes=(*notes, *result.notes))


@dataclasses.dataclass
class Turn:
    """A run that goes on by a round whenever it is its turn."""

    config: Config
    out: Path
    observer: Observer | None = None
    outcome: Result | Exception | None = None
    """Its result, or what ended it; None while it goes on."""


def run_in_turns(turns: Sequence[Turn], device: str) -> int:
    """Carry out several runs in one process, a round of each in turn; on a GPU, where each has a stream, they overlap.

    Each gets the bytes that it has alone. An error ends its own run only, a signal all of them, after a checkpoint; its
    number is returned, 0 if there was none.
    """
    stop: list[int] = []
    with _alone, caught_signals(stop), kernels.shared_by(len(turns)), ExitStack() as stack:
        compute, going, set_up = choose_device(device), [], False
        for turn in turns:
            rounds = _under_way(turn.config, turn.out, compute, turn.observer, stop)
            stream = torch.cuda.Stream(compute) if compute.type == "cuda" else None  # type: ignore[no-untyped-call]
            going.append((turn, stack.enter_context(closing(rounds)), stream))
        while going:
            for turn, rounds, stream in going:
                if stop and not set_up:
                    turn.outcome = Interrupted(stop[0], 0)
                    continue
                try:
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        turn.outcome = _next(rounds)
                    if stream is not None and not set_up:
                        stream.synchronize()  # others may read what it has made
                except Exception as error:
                    turn.outcome = error
                    if cramped(error):  # without what would hold its memory
                        turn.outcome = error.with_traceback(None)
                        error.__cause__ = error.__context__ = None
            set_up = True
            going = [(turn, rounds, stream) for turn, rounds, stream in going if turn.outcome is None]
    return stop[0] if stop else 0


def cramped(outcome: object) -> bool:
    """Whether a run ended for want of memory or of room on the GPU, which it may find alone."""
    return isinstance(outcome, TooLargeError) or (isinstance(outcome, Exception) and is_out_of_memory(outcome))


def _next(rounds: UnderWay) -> Result | None:
    """Go on to the next pause; the result if there was none."""
    try:
        return next(rounds)
    except StopIteration as end:
        result: Result = end.value
        return result


def _under_way(
    config: Config,
    place: Path | None,
    device: torch.device,
    observer: Observer | None,
    stop: Sequence[int],
    noise: NoiseSource | None = None,
    notes: Sequence[str] = (),
) -> UnderWay:
    """A run that pauses when it is set up and after every round; `stop` gets the number of a signal."""
    if place is None:
        return (yield from _fold(Simulation(config, device, noise=noise), None, observer, stop))
    dataset = None
    if is_plugin(config.data.spec):  # its arrays are part of the run's identity
        dataset = load_dataset(config.data.name, config.data.spec, config.cell.devices)
    with RunDirectory.open(place, config, sources(config, dataset)) as directory:
        if directory.finished() is not None:
            return _already_complete(place)
        with _heard_log() as messages:
            sim = Simulation(config, device, dataset=dataset)
        directory.create()  # only now, so that a failed start leaves nothing behind
        if directory.finished() is not None:  # another process has finished it meanwhile
            return _already_complete(place)
        for message in (*notes, *messages):
            directory.log(message)
        return (yield from _fold(sim, directory, observer, stop))


def with_objects(config: Config, data: Any, model: nn.Module | None) -> tuple[Config, tuple[str, ...]]:
    """A configuration that names the data and the model given as objects by their digests; and notes on changes."""
    notes: tuple[str, ...] = ()
    if data is not None:
        dataset = dataset_of(data)
        features = dataset.train.features
        if features.size and features.min() >= 0 and features.max() > LARGEST_FEATURE:
            notes = (
                f"X ranges over {features.min():g} … {features.max():g} and is not divided: only bytes are; if these "
                "are pixels, give X.astype('uint8') or X / 255",
            )
        labels = np.unique(dataset.train.targets)
        if 1 < dataset.num_classes != len(labels):
            first = next((k for k, label in enumerate(labels) if k != label), len(labels))
            notes += (f"no training example has label {first}: labels are counted from 0",)
        digest = data_digest(dataset)
        own_data.remember(digest, dataset)
        config = config.replace({"data.name": "arrays", "data.digest": digest})
    if model is not None:
        if not isinstance(model, nn.Module):
            what = f"the class {model.__name__}; give {model.__name__}()" if isinstance(model, type) else None
            raise ConfigError(f"run(model=...) takes an nn.Module, not {what or f'a {type(model).__name__}'}")
        if any(isinstance(value, nn.parameter.UninitializedParameter) for value in model.parameters()):
            raise PluginError("model: has lazy layers without weights; call it once on a batch of your data first")
        if not all(bool(value.isfinite().all()) for value in model.parameters()):
            raise PluginError("model: has weights that are not finite")
        digest = module_digest(model)
        models.remember(digest, model)
        config = config.replace({"model.name": "module", "model.digest": digest})
        gamma = getattr(config.algorithm.spec, "gamma", None)
        if isinstance(gamma, float) and gamma == getattr(type(config.algorithm.spec), "gamma", None):
            size, scaled = num_params(config), scaled_gamma(gamma, config)
            config = config.replace({"algorithm.gamma": scaled})
            change = f"for the paper's {PAPER_PARAMS:,} parameters; for this module's {size:,} it is {scaled:g}"
            notes += (f"algorithm.gamma = {gamma:g} is {change}, so that the same devices are heard",)
    return config, notes


def _already_complete(place: Path) -> Result:
    """The stored result, with a note that nothing was run."""
    result = read_run(place)
    done = f"already complete ({finished_on(place, result.summary)}), nothing was run"
    return dataclasses.replace(result, notes=(done, *result.notes))


def fresh_directory(place: Path) -> Path:
    """The directory itself if it does not exist yet, else the first free one of `place-2`, `place-3` and so on."""
    if not place.name or place.name == "..":
        place = place.absolute().resolve()
        if not place.name:
            raise ConfigError(f"--fresh: nothing can be beside {place}; name a directory with --out")
    number, free = 2, place
    while free.exists() or free.is_symlink():
        number, free = number + 1, place.with_name(f"{place.name}-{number}")
    return free


def _fold(sim: Simulation, directory: RunDirectory | None, observer: Observer | None, stop: Sequence[int]) -> UnderWay:
    """Run all rounds of a simulation, from the start or from a checkpoint."""
    config = sim.config
    num_rounds, eval_every = config.experiment.rounds, config.experiment.eval_every
    state = sim.init()
    tensors_of(state)  # a state that cannot be saved is refused now, not at the first checkpoint
    ledger = Ledger.empty(len(sim.seeds), config.cell.devices, sim.device)
    recorder = Recorder(sim.seeds, directory)
    first, earlier_s = 0, 0.0
    checkpoint = directory.load_checkpoint() if directory is not None else None
    if checkpoint is None or not checkpoint.metrics:  # row 0 is written with the first row after it
        recorder.add(0, on_host(_columns(sim, state, ledger, 0)), [True] * len(sim.seeds))
    if checkpoint is not None:
        sim.use_engine(checkpoint.made_with.get("engine", sim.engine_name))
    made_with = {**versions(), "device": describe_device(sim.device), "engine": sim.engine_name}
    continued = () if checkpoint is None else _changes(checkpoint, made_with)
    if checkpoint is not None:
        first, earlier_s = checkpoint.round, checkpoint.elapsed_s
        state = _restore(state, checkpoint.tensors, sim.device)
        ledger = Ledger.from_tensors(_part(checkpoint.tensors, "ledger", sim.device))
        if checkpoint.metrics:
            recorder.restore(checkpoint.metrics)
        checkpoint.tensors.clear()  # to free their memory
    rounds = Rounds(sim, state, ledger)
    started = last_saved = time.monotonic()
    if directory is not None:
        directory.begin()
        directory.write("metrics.csv", recorder.text)
        directory.log(f"engine {sim.engine_name}")
        directory.log(f"continues from round {first}" if checkpoint else f"starts on {describe_device(sim.device)}")
    if observer is not None:
        observer(first, None)
    for t in range(first, num_rounds):
        paused = time.monotonic()
        yield
        started += time.monotonic() - paused  # others' turns are not its time
        rounds.advance(t)
        state = rounds.state
        done = t + 1
        recorded = done % eval_every == 0 or done == num_rounds
        row = None
        columns = _columns(sim, state, ledger, done) if recorded else {}  # queued while rounds still run
        if recorded or sim.device.type == "cpu":
            sim.check()
        if recorded:
            alive = (ledger.diverged_at < 0).tolist()
            if not any(alive):
                break
            row = on_host(columns)
            recorder.add(done, row, alive)
        if observer is not None:
            observer(done, row)
        now = time.monotonic()
        due = now - last_saved >= config.experiment.checkpoint_s and done < num_rounds
        if directory is not None and (due or stop):
            sim.check()
            elapsed_s, tensors = earlier_s + now - started, _tensors(state, ledger)
            directory.save_checkpoint(Checkpoint(done, elapsed_s, tensors, recorder.text, made_with, continued))
            last_saved = time.monotonic()
            directory.log(f"checkpoint after round {done}")
            if stop:
                directory.log(f"stopped by {signal.Signals(stop[0]).name} after round {done}")
                raise Interrupted(stop[0], done)
    wall_s = earlier_s + time.monotonic() - started
    if directory is not None and rounds.how is not None:
        directory.log(rounds.how)
    return _finish(sim, state.params, ledger, recorder, wall_s, continued, directory)


def _changes(checkpoint: Checkpoint, made_with: Mapping[str, str]) -> tuple[str, ...]:
    """Notes on rounds from which a run continued with other versions or threads; warns that digits may differ."""
    before = checkpoint.made_with
    changed = [f"{name} {before[name]} → {now}" for name, now in made_with.items() if before.get(name, now) != now]
    if not changed:
        return checkpoint.continued
    text = f"continued from round {checkpoint.round} with other versions or threads ({', '.join(changed)})"
    log.warning("%s: its last digits may not be those of a run without that", text)
    return (*checkpoint.continued, text)


def _columns(sim: Simulation, state: Any, ledger: Ledger, r: int) -> dict[str, Tensor]:
    """All columns of x^r, each [S]."""
    record = sim.config.experiment.record
    columns: dict[str, Tensor] = {}

    def score(prefix: str, params: Tensor, examples: Any) -> None:
        scores = sim.objective.evaluate(params, examples)
        if scores.accuracy is not None:
            columns[f"{prefix}_accuracy"] = scores.accuracy
        columns[f"{prefix}_loss"] = scores.loss

    score("test", state.params, sim.test)
    if sim.validation is not None:
        score("validation", state.params, sim.validation)
    mean = sim.mean_params(state) if "mean" in record else None
    if mean is not None:
        score("mean", mean, sim.test)
    if "consensus" in record:
        models = own_models(state)
        columns["consensus"] = torch.zeros_like(ledger.active) if models is None else consensus(models)
    if "gradient" in record:
        weights = sim.sampler.image_weights(len(sim.objective.train.targets)).to(sim.device, sim.dtype)
        columns["grad_norm_sq"] = sim.objective.grad_norm_sq(state.params, weights)
        if mean is not None:
            columns["mean_grad_norm_sq"] = sim.objective.grad_norm_sq(mean, weights)
    return columns | ledger.row(r, sim.config.radio.bandwidth_hz)


def _finish(
    sim: Simulation,
    params: Tensor,
    ledger: Ledger,
    recorder: Recorder,
    wall_s: float,
    continued: tuple[str, ...],
    directory: RunDirectory | None,
) -> Result:
    """Build the result and write what a finished run leaves."""
    recorder.write_first()  # still unwritten if every seed diverged before the next row
    rounds, metrics = recorder.arrays()
    diverged = {seed: r for seed, r in zip(sim.seeds, ledger.diverged_at.tolist(), strict=True) if r >= 0}
    diverged = failures(sim.config, rounds, metrics, params, diverged)
    summary = summarise(sim, rounds, metrics, diverged, wall_s)
    active = metrics["num_active"][:, 1:]
    notes: tuple[str, ...] = (_unheard(sim),) if np.isfinite(active).any() and not np.nansum(active) else ()
    notes += overlong(sim.config, rounds, metrics)
    if continued:
        summary["continued"] = list(continued)
    if directory is not None:
        directory.write("metrics.csv", recorder.text)
        model = {f"seed_{seed}": row.cpu().clone() for seed, row in zip(sim.seeds, params, strict=True)}
        directory.write_model(model)
        directory.write("devices.csv", devices_csv(sim, ledger))
        directory.log(f"{summary['status']} after {wall_s:.1f} s")
        for note in notes:
            directory.log(note)
        directory.finish(summary)
    return Result(sim.config, rounds, metrics, params, diverged, summary, notes)


def _unheard(sim: Simulation) -> str:
    """What to do where no device took part in any round."""
    said, gamma = "no device took part in any round, so nothing was learnt", getattr(sim.algorithm, "gamma", None)
    if isinstance(gamma, float):
        scaled = scaled_gamma(float(getattr(type(sim.algorithm), "gamma", gamma)), sim.config)
        said += f": algorithm.gamma = {gamma:g} is too high; the paper's, for this model's size, is {scaled:g}"
    return said


def _tensors(state: Any, ledger: Ledger) -> dict[str, Tensor]:
    """State and ledger as named host tensors that share no memory."""
    named = {f"state.{name}": value for name, value in tensors_of(state).items()}
    named |= {f"ledger.{name}": value for name, value in ledger.tensors().items()}
    host = {}
    seen: set[int] = set()
    for name, value in named.items():
        value = value.detach().cpu().contiguous()
        host[name] = value.clone() if value.untyped_storage().data_ptr() in seen else value
        seen.add(value.untyped_storage().data_ptr())
    return host


def _part(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    """The tensors under a prefix, on the compute device."""
    return {
        name.removeprefix(f"{prefix}."): value.to(device)
        for name, value in tensors.items()
        if name.startswith(f"{prefix}.")
    }


def _restore(template: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """A state like the template with the tensors of a checkpoint."""
    named = _part(tensors, "state", device)

    filled: set[int] = set()

    def fill(name: str, value: Tensor) -> Tensor:
        """Copy the saved tensor into the template's memory, to keep the layout, unless that memory does not fit."""
        saved, place = named.pop(name), value.untyped_storage().data_ptr()
        if value.shape != saved.shape or 0 in value.stride() or place in filled:
            return saved
        filled.add(place)
        return value.copy_(saved)

    try:
        return continued(template, rebuilt(template, fill))
    except KeyError as error:
        raise RunDirectoryError(
            f"the checkpoint lacks {error}: it was made by another version of this algorithm; start anew with --out"
        ) from error


@contextmanager
def _heard_log() -> Iterator[list[str]]:
    """Collect what the library logs inside the `with` block, for log.txt."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("otafl")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def default_directory(config: Config) -> Path:
    """The directory `runs/<name>-<hash>` of a configuration and its plug-ins; the same command finds it again."""
    return Path("runs") / f"{config.experiment.name}-{name_hash(config)}"
