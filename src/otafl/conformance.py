"""What a method must keep, checked on any method, a user's own too: `otafl check METHOD`.

Every check runs the method in a small world and tries to catch it at something that the equations of a paper do not
allow: a server that knows what it was not told, noise that is drawn again and subtracted, a look at channels of later
rounds, too much energy, hidden state, seeds that disturb one another, a run that does not continue as it was.

Knows: simulations, rounds, how to disturb them behind a method's back.
Does not know: methods.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otafl.algorithms.base import MOST_REPORTS, Round
from otafl.config import PAPER_PARAMS, Config, load_config
from otafl.errors import ConfigError
from otafl.fold import flatten_state, run
from otafl.radio.air import Air
from otafl.radio.csi import Reports, View
from otafl.random import Streams
from otafl.registry import in_a_line
from otafl.result import Result
from otafl.simulation import Simulation
from otafl.units import linear_to_db
from otafl.world.channel import Trajectory, trajectory

ROUNDS = 12
WORLD: dict[str, Any] = {
    "experiment.name": "check",
    "experiment.rounds": ROUNDS,
    "experiment.seeds": [0, 1],
    "experiment.eval_every": 5,
    "data.name": "synthetic",
    "data.train_images": 240,
    "data.test_images": 60,
    "data.features": 6,
    "data.classes": 3,
    "model.name": "mlp",
    "model.hidden": [5],
    "training.local_steps": 3,
    "training.batch_size": 4,
    "training.precision": "float64",
    "training.skip_unheard": False,
    "cell.devices": 6,
    "cell.radius_m": 900.0,
}
NUM_PARAMS = 6 * 5 + 5 + 5 * 3 + 3
# The energy limit d E_s is the paper's, so that a γ for the paper's network lets the same devices be heard here; noise
# is a third of the largest update, which in so few dimensions is much.
WORLD["radio.tx_power_dbm"] = linear_to_db(PAPER_PARAMS / NUM_PARAMS)
WORLD["radio.noise_dbm_hz"] = -173.0 + linear_to_db(PAPER_PARAMS / NUM_PARAMS) - 46.0
SILENT = {"pathloss.name": "log-distance", "pathloss.reference_db": 280.0}
IMAGES = {"data.name": "digits", "model.name": "cnn", "model.channels": [3], "training.engine": "auto"}
TOLD = 0.7  # rank correlation with |h| from which reports are said to tell the channel
Verdict = Literal["ok", "FAIL", "note"]


class Finding(NamedTuple):
    """What one check found."""

    name: str
    verdict: Verdict
    text: str


def check(algorithm: str, overrides: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Run every check on a method; `overrides` are keys of the small world, and the method's own.

    >>> [finding.name for finding in check("fedavg") if finding.verdict == "FAIL"]
    []
    """
    config = world_of(algorithm, overrides)
    for name, examine in CHECKS.items():
        try:
            verdict, text = examine(config)
        except Exception as error:  # whatever a method does must not end the other checks
            verdict, text = "FAIL", in_a_line(error)
        if text:
            yield Finding(name, verdict, text)


def world_of(algorithm: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The small world with a method."""
    return load_config("stationary", {**WORLD, "algorithm.name": algorithm, **(overrides or {})})


def _simulated(config: Config, **changes: Any) -> Simulation:
    """On the readable engine, where a step must be pure."""
    return Simulation(config.replace({"training.engine": "reference", **changes}), torch.device("cpu"))


class Recorder:
    """A Round that remembers what the server was told and heard."""

    def __init__(self, inner: Round) -> None:
        self._round = inner
        self.reports: list[Reports] = []
        self.received: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """As the round does it."""
        self.reports.append(self._round.report(values, who))
        return self.reports[-1]

    def uplink(self, signal: Any, tx_scale: Tensor, who: Tensor) -> Tensor:
        """As the round does it."""
        self.received.append(self._round.uplink(signal, tx_scale, who))
        return self.received[-1].clone()


class Replay:
    """A Round in which devices have other channels and other data, while the server is told and hears the same."""

    def __init__(self, sim: Simulation, t: int, recorded: Recorder) -> None:
        self._round = sim.round_at(t, batches=sim.sampler.at(t + sim.config.experiment.rounds))
        self._reports, self._received = list(recorded.reports), list(recorded.received)
        genuine = self._round.device
        shape = genuine._values["h"].shape
        drawn = torch.from_numpy(Streams(99).at("other channels", t).standard_normal((3, *shape)))
        values = {quantity: known * drawn[0].exp() for quantity, known in genuine._values.items()}
        values["h"] = genuine._values["h"].abs().mean() * torch.complex(drawn[1], drawn[2])
        self.device = View("replay", "device", genuine._allowed, values)
        self._flips = not getattr(sim.algorithm, "ideal_radio", False)  # uploads without a radio carry their sender

    @property
    def active(self) -> Tensor:
        """The others: the server is not told who is active, unless by a report."""
        return ~self._round.active if self._flips else self._round.active

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """What was reported before."""
        return self._reports.pop(0)

    def uplink(self, signal: Any, tx_scale: Tensor, who: Tensor) -> Tensor:
        """What was heard before."""
        return self._received.pop(0).clone()


class _OtherFuture(Simulation):
    """Channels that are others from the middle of the run on."""

    def _world(self, seed: int) -> Trajectory:
        config = self.config
        parts = (config.cell, config.mobility.spec, config.pathloss.spec, config.fading.spec)
        other = trajectory(*parts, config.experiment.rounds, seed + 1_000, config.radio.antennas)
        mine, half = super()._world(seed), config.experiment.rounds // 2
        mixed: dict[str, Any] = {
            field.name: np.concatenate([getattr(mine, field.name)[:half], getattr(other, field.name)[half:]])
            for field in dataclasses.fields(Trajectory)
            if field.name != "antennas"
        }
        return dataclasses.replace(mine, **mixed)


def _server(config: Config) -> tuple[Verdict, str]:
    """The server's models are a function of what it was told and heard, over all rounds."""
    sim = _simulated(config)
    state = other = sim.init()
    heard = False
    for t in range(config.experiment.rounds):
        recorder = Recorder(sim.round_at(t))
        state, _ = sim.algorithm.step(state, recorder)
        other, _ = sim.algorithm.step(other, Replay(sim, t, recorder))
        if not torch.equal(state.params, other.params):
            return "FAIL", (
                f"the server's model of round {t} moves when only the devices' channels and data change, while what it "
                "was told and heard is the same; use round.server, reports and what uplink() returns"
            )
        heard |= bool(recorder.received)
    if not heard:
        return "FAIL", "no uplink() in any round: the server cannot have learnt anything"
    return "ok", "its models follow from what it was told and heard"


def _noise(config: Config) -> tuple[Verdict, str]:
    """With a receiver that adds none, the addressed noise is not in what the server makes of what it heard."""
    loud = config.radio.noise_dbm_hz + 30.0  # so that whoever takes it off moves by nothing else
    sim = _simulated(config, **{"radio.noise_dbm_hz": loud})
    if not isinstance(sim.air, Air):
        return "ok", "no radio, no noise"
    genuine, state, alike = sim.air.noise, sim.init(), []
    for t in range(config.experiment.rounds):
        drawn: list[Tensor] = []

        def silence(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
            drawn.append(genuine(seeds, name, t, size))  # noqa: B023 - called in this round only
            return torch.zeros_like(drawn[-1])  # noqa: B023

        after, _ = sim.algorithm.step(state, sim.round_at(t, air=dataclasses.replace(sim.air, noise=silence)))
        moved = torch.nn.functional.normalize(after.params - state.params, dim=-1)
        for noise in drawn:
            alike += (moved * torch.nn.functional.normalize(noise, dim=-1)).sum(-1)[moved.norm(dim=-1) > 0].tolist()
        state = after
    if not alike:
        return "note", "the model never moved"
    found, chance = float(np.mean(alike)), 1 / math.sqrt(len(alike) * sim.problem.num_params)
    if abs(found) > 6 * chance:
        return "FAIL", (
            f"the receiver's noise is in the model (correlation {found:+.2f}) though the receiver added none: it is "
            "drawn again, to be taken off"
        )
    return "ok", "the receiver's noise is unknown to it"


def _future(config: Config) -> tuple[Verdict, str]:
    """Models do not depend on channels of later rounds."""
    one, other = _simulated(config), _OtherFuture(config.replace({"training.engine": "reference"}), torch.device("cpu"))
    state, changed = one.init(), other.init()
    for t in range(config.experiment.rounds // 2):
        state, changed = one.step(state, t).state, other.step(changed, t).state
        if _distance(changed.params, state.params) > 1e-9:  # a solver may stop a step later for other channels' sake
            return "FAIL", f"the model after round {t} depends on channels of later rounds"
    return "ok", "channels of later rounds change nothing"


def _energy(config: Config) -> tuple[Verdict, str]:
    """Nobody exceeds the limit, over many rounds."""
    result = run(config.replace({"experiment.rounds": 5 * ROUNDS, "cell.devices": 10}), device="cpu")
    ratios = result.metrics["energy_ratio_max"]
    largest = float(np.nanmax(ratios)) if np.isfinite(ratios).any() else 0.0
    sent = float(np.nansum(result.metrics["num_active"]))
    if getattr(config.algorithm.spec, "ideal_radio", False):
        return "ok", "an ideal radio: uploads cost nothing"
    if sent == 0:
        return "FAIL", "nobody transmitted in this world, so that nothing can be checked; choose keys with --set"
    return "ok", f"at most {100 * largest:.3g} % of the limit in {5 * ROUNDS} rounds"


def _reports(config: Config) -> tuple[Verdict, str]:
    """How much devices tell by scalars, and what that says of their channels."""
    sim = _simulated(config, **{"experiment.rounds": 3 * ROUNDS})
    state = sim.init()
    pairs: dict[int, list[tuple[float, float]]] = {}  # by the number of the report in its round
    fixed: dict[int, bool] = {}
    for t in range(sim.config.experiment.rounds):
        recorder, other = Recorder(sim.round_at(t)), Recorder(sim.round_at(t, batches=sim.sampler.at(t + 10_000)))
        sim.algorithm.step(state, other)
        state, _ = sim.algorithm.step(state, recorder)
        for k, (mine, theirs) in enumerate(zip(recorder.reports, other.reports, strict=False)):
            size = recorder._round._coeff.abs()[mine.who]
            pairs.setdefault(k, []).extend(zip(mine.values[mine.who].tolist(), size.tolist(), strict=True))
            fixed[k] = fixed.get(k, True) and torch.equal(mine.values, theirs.values)
    told = {k: _rank_correlation(np.array(found, dtype=np.float64)) for k, found in pairs.items() if found}
    if not told:
        return "ok", "devices report nothing"
    worst = max(told, key=lambda k: abs(told[k]))
    text = f"{len(pairs)} scalar{'s' if len(pairs) > 1 else ''} per device and round of at most {MOST_REPORTS}; rank "
    text += f"correlation with |h| {told[worst]:+.2f}"
    if "h" not in sim.algorithm.knowledge.server and abs(told[worst]) > TOLD:
        if any(fixed[k] and abs(told[k]) > TOLD for k in told):
            return "FAIL", f"{text}: devices tell the server their channels; declare h at the server, or report less"
        return "note", f"{text}: reports tell the server much of the channels"
    return "ok", text


def _rank_correlation(pairs: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    """Spearman's, 0 where one side is constant."""
    ranks = [np.unique(column, return_inverse=True)[1].astype(np.float64) for column in pairs.T]
    if any(rank.std() == 0 for rank in ranks):
        return 0.0
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def _purity(config: Config) -> tuple[Verdict, str]:
    """A step changes no state but its own result, and gives the same result again."""
    sim = _simulated(config)
    state = sim.init()
    for t in range(4):
        before = {name: value.clone() for name, value in flatten_state(state).items()}
        first = flatten_state(sim.step(state, t).state)
        changed = [name for name, value in flatten_state(state).items() if not _same(value, before[name])]
        if changed:
            return "FAIL", f"step() of round {t} wrote into the state it was given ({changed[0]})"
        again = sim.step(state, t).state
        moved = [name for name, value in flatten_state(again).items() if not _same(value, first[name])]
        if moved:
            return "FAIL", f"step() of round {t} gives another {moved[0]} the second time: state hides outside State"
        state = again
    return "ok", "a step depends on its arguments, and changes none of them"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _seeds(config: Config) -> tuple[Verdict, str]:
    """A seed alone is the seed in a batch."""
    together = run(config.replace({"experiment.seeds": [0, 1, 2]}), device="cpu")
    alone = run(config.replace({"experiment.seeds": [1]}), device="cpu")
    difference = _distance(together.params[1:2], alone.params)
    if difference > 1e-9:
        return "FAIL", f"seed 1 alone and beside others differ by {difference:.1e}: seeds disturb one another"
    return "ok", f"a seed alone and beside others agree to {difference:.0e}"


def _engines(config: Config) -> tuple[Verdict, str]:
    """Every engine gives the readable one's models."""
    models = {
        engine: run(config.replace({"training.engine": engine}), device="cpu").params
        for engine in ("reference", "batched", "auto")
    }
    worst = max(_distance(models[engine], models["reference"]) for engine in ("batched", "auto"))
    if worst > 1e-9:
        return "FAIL", f"the fast engines' models differ from the readable one's by {worst:.1e}"
    return "ok", f"fast and readable engines agree to {worst:.0e}"


def _distance(one: Tensor, other: Tensor) -> float:
    scale = max(1.0, float(other.abs().max()))
    difference = float((one - other).abs().max()) / scale
    return math.inf if math.isnan(difference) else difference


def _resume(config: Config) -> tuple[Verdict, str]:
    """Interrupted before the first row and after it, a run ends with the same bytes."""

    class Stop(Exception):
        pass

    def until(last: int) -> Callable[[int, Any], None]:
        def observer(done: int, row: Any) -> None:
            if done > last:
                raise Stop

        return observer

    eager = config.replace({"experiment.checkpoint_s": 1e-9})
    with tempfile.TemporaryDirectory() as scratch:
        whole, parts = Path(scratch) / "whole", Path(scratch) / "parts"
        run(eager, out=whole, device="cpu")
        for last in (2, 6):
            try:
                run(eager, out=parts, device="cpu", observer=until(last))
            except Stop:
                continue
        run(eager, out=parts, device="cpu")
        for name in ("metrics.csv", "devices.csv", "model.safetensors"):
            if (whole / name).read_bytes() != (parts / name).read_bytes():
                return "FAIL", f"{name} of an interrupted run is another than that of one without interruption"
    return "ok", "interrupted before and after the first row: the same bytes"


def _silence(config: Config) -> tuple[Verdict, str]:
    """Rounds in which hardly anybody can be heard, and a convolutional network, end as others do."""
    worlds: dict[str, dict[str, Any]] = {
        "a silent world": SILENT,
        "a CNN": IMAGES,
        "a CNN in a silent world": {**SILENT, **IMAGES},
    }
    for where, keys in worlds.items():
        for skip in (True, False):
            try:
                run(config.replace({**keys, "experiment.rounds": 4, "training.skip_unheard": skip}), device="cpu")
            except Exception as error:
                return "FAIL", f"{where}: {in_a_line(error)}"
    return "ok", "a silent world, a CNN, both"


def _devices(config: Config) -> tuple[Verdict, str]:
    """On a GPU, where there is one, the models are the CPU's."""
    if not torch.cuda.is_available():
        return "ok", ""

    def results(noise: Callable[..., Tensor]) -> list[Result]:
        return [run(config, device=device, noise=_on(noise, device)) for device in ("cpu", "cuda")]

    def drawn(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
        return torch.from_numpy(np.stack([Streams(seed).at(name, t).standard_normal(size) for seed in seeds]))

    cpu, gpu = results(drawn)
    difference = _distance(gpu.params.cpu(), cpu.params)
    if difference > 1e-6:
        return "FAIL", f"models on the GPU differ from the CPU's by {difference:.1e}"
    return "ok", f"CPU and GPU agree to {difference:.0e}"


def _on(noise: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    return lambda seeds, name, t, size: noise(seeds, name, int(t), size).to(device)


CHECKS: dict[str, Callable[[Config], tuple[Verdict, str]]] = {
    "energy": _energy,
    "server": _server,
    "noise": _noise,
    "future": _future,
    "reports": _reports,
    "purity": _purity,
    "seeds": _seeds,
    "engines": _engines,
    "resume": _resume,
    "silence": _silence,
    "devices": _devices,
}
"""Name of a check to what does it; the docstrings say what each demands."""


def knowledge_line(algorithm: str, overrides: Mapping[str, Any] | None = None) -> str:
    """What a method declares to know of the channel."""
    spec = world_of(algorithm, overrides).algorithm.spec
    knowledge = getattr(spec, "knowledge", None)
    if knowledge is None:
        raise ConfigError(f"algorithm {algorithm}: declares no `knowledge`")
    sides = [f"{side} {', '.join(sorted(getattr(knowledge, side))) or 'nothing'}" for side in ("device", "server")]
    return f"declares to know of the channel: {'; '.join(sides)}"
