"""Checks that a method, built in or a user's own, keeps the rules that hold for every method: `otafl check METHOD`.

Every check runs the method in a small world and looks for something that the equations of a paper do not allow: a
server that knows what it was not told, noise that is drawn again and subtracted, use of the channels of later rounds,
too much energy, hidden state, seeds that influence one another, a resumed run that gives other results.

Knows: simulations, rounds, how to change them without the method noticing.
Does not know: single methods.
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

from otafl.config.schema import PAPER_PARAMS, Config, load_config
from otafl.core.round import MOST_REPORTS, Round
from otafl.core.state import copied, tensors_of
from otafl.errors import ConfigError
from otafl.radio.air import Air, Reception
from otafl.radio.csi import Reports, View
from otafl.radio.digital import Delivered
from otafl.radio.knowledge import OWN, Quantity
from otafl.radio.vectors import Vectors
from otafl.random import Streams
from otafl.registry import in_a_line
from otafl.runs.result import Result
from otafl.simulation.build import Simulation
from otafl.simulation.run import run
from otafl.units import linear_to_db
from otafl.world.channel import Trajectory, combined, trajectory

ROUNDS = 12
WORLD: dict[str, Any] = {
    "experiment.name": "check",
    "experiment.rounds": ROUNDS,
    "experiment.seeds": [0, 1],
    "experiment.eval_every": 5,
    "data.name": "synthetic",
    "data.train_images": 240,
    "data.test_images": 60,
    "data.features": 12,
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
NUM_PARAMS = 12 * 5 + 5 + 5 * 3 + 3
# The energy limit d E_s is the paper's, so that a γ for the paper's network has the same threshold here. The noise is a
# third of the largest update, which is much in so few dimensions.
WORLD["radio.tx_power_dbm"] = linear_to_db(PAPER_PARAMS / NUM_PARAMS)
WORLD["radio.noise_dbm_hz"] = -173.0 + linear_to_db(PAPER_PARAMS / NUM_PARAMS) - 46.0
SILENT = {"pathloss.name": "log-distance", "pathloss.reference_db": 280.0}
IMAGES = {"data.name": "digits", "model.name": "cnn", "model.channels": [3], "training.engine": "auto"}
LATE = 400
MOMENTS = (*range(ROUNDS), 37, 120, LATE - 1)  # rounds that are tried, late ones included
Verdict = Literal["ok", "FAIL", "note"]


class Finding(NamedTuple):
    """What one check found."""

    name: str
    """The check."""
    verdict: Verdict
    """Either "ok"; "FAIL", the method breaks the rule; or "note", nothing could be told, or something to know."""
    text: str
    """One line for the user."""


def check(algorithm: str, overrides: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Run every check on a method, one after the other as the result is read: `list(check(...))` runs all.

    A check that does not concern the method yields nothing. If the method gives no finite models, or if two checks end
    with the same error, the others are not tried.

    Args:
        algorithm: name of a method, built in or registered.
        overrides: keys of the small world or of the method, `{"section.key": value}`.

    Yields:
        What each check found, a line for the user and a verdict; the method passes if none is "FAIL".

    Raises:
        ConfigError: no method has that name, or an override is not valid; when the first finding is read.

    >>> next(check("ota-fedavg")).verdict  # of the first check, energy
    'ok'
    """
    config = world_of(algorithm, overrides)
    crashes: list[str] = []
    for name, examine in CHECKS.items():
        try:
            verdict, text = examine(config)
        except Exception as error:  # the other checks are still made
            verdict, text = "FAIL", in_a_line(error)
            crashes.append(text)
        if name == "finite" and verdict == "FAIL":
            yield Finding(name, verdict, f"{text}; nothing else was tried")
            return
        if len(crashes) == 2 and crashes[0] == crashes[1]:
            yield Finding(name, verdict, "the same; nothing else was tried")
            return
        if text:
            yield Finding(name, verdict, text)


def world_of(algorithm: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The small world with a method."""
    return load_config("stationary", {**WORLD, "algorithm.name": algorithm, **(overrides or {})})


def _simulated(config: Config, **changes: Any) -> Simulation:
    """A simulation on the reference engine, where a step must be pure."""
    return Simulation(config.replace({"training.engine": "reference", **changes}), torch.device("cpu"))


class Listening(Round):
    """A round that remembers what devices said and sent, and what the server was told and heard."""

    reports: list[Reports]
    received: list[Tensor]
    said: list[Tensor]
    sent: list[Tensor]
    delivered: list[Delivered]

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """Report as in any round, and remember it."""
        self.reports.append(super().report(values, who))
        self.said.append(self.reports[-1].values.clone())
        return Reports(self.reports[-1].values.clone(), self.reports[-1].who.clone())

    def uplink(self, signal: Any, tx_scale: Tensor, who: Tensor, reception: Reception | None = None) -> Tensor:
        """Transmit as in any round, and remember it."""
        self.received.append(super().uplink(signal, tx_scale, who, reception))
        self._remember(signal, tx_scale, who)
        return self.received[-1].clone()

    def digital(self, signal: Any, bits: Tensor, who: Tensor, deadline_s: float | Tensor) -> Delivered:
        """Send bits as in any round, and remember it."""
        made = super().digital(signal, bits, who, deadline_s)
        self._remember(signal, torch.ones(who.shape), who)
        self.delivered.append(Delivered(Vectors(signal.dense().clone()), made.who))
        return self.delivered[-1]

    def _remember(self, signal: Any, tx_scale: Tensor, who: Tensor) -> None:
        vectors = signal.dense() * torch.view_as_real(tx_scale.to(torch.complex128)).norm(dim=-1)[..., None]
        self.sent.append(torch.where(who[..., None], vectors, 0.0))


class Replaying(Listening):
    """A round whose server gets the reports and signals of another round; what its own devices send is dropped."""

    left: tuple[list[Reports], list[Tensor], list[Delivered]]

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """The reports of the other round; none if it had no more."""
        self.said.append(torch.where(who, values, 0.0))
        nothing = Reports(torch.zeros_like(values), torch.zeros_like(who))
        old = self.left[0].pop(0) if self.left[0] else nothing
        return Reports(old.values.clone(), old.who.clone())

    def uplink(self, signal: Any, tx_scale: Tensor, who: Tensor, reception: Reception | None = None) -> Tensor:
        """What was heard in the other round; zeros if it had no more."""
        self._remember(signal, tx_scale, who)
        if self.left[1]:
            return self.left[1].pop(0).clone()
        silent = dataclasses.replace(self._air, noise_var_j=0.0) if isinstance(self._air, Air) else self._air
        return silent.uplink(signal, torch.zeros_like(tx_scale), who, self._channel, self.t, 0, reception or "real")[0]

    def digital(self, signal: Any, bits: Tensor, who: Tensor, deadline_s: float | Tensor) -> Delivered:
        """What was delivered in the other round; nothing if it had no more."""
        self._remember(signal, torch.ones(who.shape), who)
        return self.left[2].pop(0) if self.left[2] else Delivered(signal, torch.zeros_like(who))


class Deaf(Round):
    """A round whose server hears random vectors of a thousandth of the true norm."""

    def uplink(self, signal: Any, tx_scale: Tensor, who: Tensor, reception: Reception | None = None) -> Tensor:
        """A random vector instead of what was sent."""
        heard = super().uplink(signal, tx_scale, who, reception)
        drawn = Streams(7).at("rubbish", int(self.t)).standard_normal(tuple(heard.shape))
        rubbish = torch.nn.functional.normalize(torch.from_numpy(drawn), dim=-1).to(heard.dtype)
        return rubbish.mul_(1e-3 * heard.norm(dim=-1, keepdim=True))

    def digital(self, signal: Any, bits: Tensor, who: Tensor, deadline_s: float | Tensor) -> Delivered:
        """Random vectors instead of what was delivered."""
        made = super().digital(signal, bits, who, deadline_s)
        drawn = Streams(7).at("rubbish", int(self.t)).standard_normal((*who.shape, signal.size))
        rubbish = torch.nn.functional.normalize(torch.from_numpy(drawn), dim=-1)
        return Delivered(Vectors(rubbish.mul_(1e-3 * signal.norms(who)[..., None])), made.who)


def _listening(sim: Simulation, t: int, **changes: Any) -> Listening:
    """Round t as a `Listening` round; for the method it is a Round like any other."""
    made: Any = sim.round_at(t, **changes)
    made.__class__ = Listening
    made.reports, made.received, made.said, made.sent, made.delivered = [], [], [], [], []
    return made  # type: ignore[no-any-return]


def _replaying(sim: Simulation, t: int, recorded: Listening, factors: Tensor, **changes: Any) -> Replaying:
    """Round t with the reports and signals of `recorded`; devices know their channels times `factors` [S, M]."""
    made: Any = _listening(sim, t, **changes)
    made.__class__ = Replaying
    made.left = list(recorded.reports), list(recorded.received), list(recorded.delivered)
    view = made.device
    changed = {quantity: _other(quantity, values, factors) for quantity, values in view._values.items()}
    made.device = View(view._owner, "device", view._allowed, changed)
    made.server, made.plan = recorded.server, recorded.plan
    return made  # type: ignore[no-any-return]


def _other(quantity: Quantity, values: Tensor, factors: Tensor) -> Tensor:
    """Multiply what devices know of their channels [..., M] by factors; a phase is rotated, and the server's stay."""
    if quantity not in OWN:
        return values
    return values * (
        torch.polar(torch.ones_like(factors), factors) if quantity == "phase" else factors.to(values.dtype)
    )


class _Elsewhere(Simulation):
    """A simulation with the same positions and mean gains but other fading, so that other devices are heard."""

    def _world(self, seed: int) -> Trajectory:
        mine = super()._world(seed)
        if getattr(self.config.algorithm.spec, "ideal_radio", False):  # an ideal upload names its sender
            return mine
        drawn = Streams(seed + 1_000).at("other fades").standard_normal((2, *mine.each.shape))
        each = np.sqrt(mine.antenna_gain / 2)[..., None] * (drawn[0] + 1j * drawn[1])
        coeff = each[..., 0] if mine.antennas == 1 else combined(mine.antenna_gain, np.moveaxis(each, -1, 0))[1]
        return dataclasses.replace(mine, each=each, coeff=coeff)


class _OtherFuture(Simulation):
    """A simulation whose channels differ from the middle of the run on."""

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
    """The server's models are a function of what it was told and heard, over many rounds."""
    long = config.replace({"experiment.rounds": LATE, "training.engine": "reference"})
    sim, state, recorded = Simulation(long, torch.device("cpu")), None, []
    for t in MOMENTS:
        listening = _listening(sim, t)
        state, _ = sim.algorithm.step(sim.init() if state is None else copied(state), listening)
        recorded.append((t, listening, state.params.clone()))
    if not any(listening.received or listening.delivered for _, listening, _ in recorded):
        return "FAIL", "no uplink() in any round: the server cannot have learnt anything"
    other, state = _Elsewhere(long.replace({}), torch.device("cpu")), None  # a new instance of the method
    other.problem = dataclasses.replace(other.problem, server=sim.problem.server, plan=sim.problem.plan)
    shape = recorded[0][1].device._values["h"].shape
    for t, before, params in recorded:
        drawn = torch.from_numpy(Streams(99).at("other channels", t).standard_normal(tuple(shape))).exp()
        batches = other.sampler.at(t + 10 * LATE)
        replaying = _replaying(other, t, before, drawn, batches=batches)
        if before._active is not None:
            _give_as_many(replaying, before)
        state, _ = other.algorithm.step(other.init() if state is None else copied(state), replaying)
        if not torch.equal(state.params, params):
            return "FAIL", (
                f"the server's model of round {t} is another when only the devices' channels and data are, while what "
                "it was told and heard is the same; use round.server, reports and what uplink() returns"
            )
    return "ok", "its models follow from what it was told and heard"


def _give_as_many(replaying: Replaying, before: Listening) -> None:
    """Let somebody be active in exactly those seeds in which somebody was: the server may notice silence."""
    assert replaying._active is not None
    assert before._active is not None
    somebody = before._active.any(-1, keepdim=True)
    mask = replaying._active & somebody
    mask[:, 0] |= (somebody & ~mask.any(-1, keepdim=True))[:, 0]
    replaying._active, replaying._active_version = mask, mask._version


def _isolation(config: Config) -> tuple[Verdict, str]:
    """What a device reports and sends depends only on its own channel and data, and on what the server told it."""
    sim, odd = _simulated(config, **{"experiment.rounds": LATE}), 2
    state = other = sim.init()
    factors = torch.ones(len(sim.seeds), config.cell.devices, dtype=torch.float64)
    factors[:, odd] = 1.7
    others = [i for i in range(config.cell.devices) if i != odd]
    for t in MOMENTS:
        listening = _listening(sim, t)
        state, _ = sim.algorithm.step(copied(state), listening)
        batches = sim.sampler.at(t).clone()
        batches[:, odd] = sim.sampler.at(t + 10 * LATE)[:, odd]
        alone = _replaying(sim, t, listening, factors, batches=batches)
        other, _ = sim.algorithm.step(copied(other), alone)
        for kind, mine, theirs in (("reports", listening.said, alone.said), ("sends", listening.sent, alone.sent)):
            for one, two in zip(mine, theirs, strict=False):
                if _distance(two[:, others], one[:, others], least=1e-30) > 1e-9:
                    return "FAIL", f"what a device {kind} in round {t} depends on another device's channel or data"
    if hasattr(sim.algorithm, "active"):
        believed = {q: values.cpu() for q, values in sim._channel.items()}
        masks = []
        for scale in (torch.ones_like(factors), factors):
            values = {q: _other(q, known, scale) for q, known in believed.items()}
            view = View("check", "device", sim.algorithm.knowledge.device, values)
            masks.append(sim.algorithm.active(view, sim.problem))
        if masks[0] is not None and not torch.equal(masks[0][..., others], masks[1][..., others]):
            return "FAIL", "whether a device is active depends on another device's channel"
    return "ok", "devices do not know of one another"


def _deaf(config: Config) -> tuple[Verdict, str]:
    """A server that hears random vectors does not learn."""
    rounds = 40
    sim = Simulation(config.replace({"experiment.rounds": rounds}), torch.device("cpu"))
    deaf, hearing = sim.init(), sim.init()

    def loss(state: Any) -> float:
        return float(sim.objective.evaluate(state.params, sim.test).loss.mean())

    first = loss(deaf)
    for t in range(rounds):
        made: Any = sim.round_at(t)
        made.__class__ = Deaf
        deaf, _ = sim.algorithm.step(deaf, made)
        hearing, _ = sim.algorithm.step(hearing, sim.round_at(t))
    lost, learnt = loss(deaf), loss(hearing)
    if math.isnan(learnt):
        return "note", "it diverges in this world, so that nothing can be told: try a smaller training.lr with --set"
    if lost < first - 0.3 * max(0.3 * first, first - learnt):
        return (
            "FAIL",
            f"it learns without hearing anything: test loss {first:.2f} to {lost:.2f} (hearing: {learnt:.2f})",
        )
    if not learnt < 0.9 * first:
        return "note", f"it does not learn here, so that little can be told: test loss {first:.2f} to {learnt:.2f}"
    return "ok", f"test loss {first:.2f} to {learnt:.2f}, and without hearing to {lost:.2f}"


def _noise(config: Config) -> tuple[Verdict, str]:
    """If the receiver adds no noise, the model's steps are not correlated with the noise that it would have added."""
    loud = config.radio.noise_dbm_hz + 30.0  # so that it dominates the step of a method that subtracts it
    sim = _simulated(config, **{"radio.noise_dbm_hz": loud})
    if not isinstance(sim.air, Air):
        return "ok", "no radio, no noise"
    genuine, state, alike, asked = sim.air.noise, sim.init(), [], set[str]()
    for t in range(config.experiment.rounds):
        drawn: list[Tensor] = []

        def silence(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
            if name.startswith("algorithm/"):  # the method's own numbers
                return genuine(seeds, name, t, size)
            asked.add(name)
            drawn.append(genuine(seeds, name, t, size))  # noqa: B023 - called in this round only
            return torch.zeros_like(drawn[-1])  # noqa: B023

        after, _ = sim.algorithm.step(state, sim.round_at(t, air=dataclasses.replace(sim.air, noise=silence)))
        moved = torch.nn.functional.normalize(after.params - state.params, dim=-1)
        for noise in drawn:
            if noise.shape != moved.shape:  # noise of another length cannot be subtracted
                continue
            alike += (moved * torch.nn.functional.normalize(noise, dim=-1)).sum(-1)[moved.norm(dim=-1) > 0].tolist()
        state = after
    if not asked:
        return "ok", "it sends no analog signals, so there is no noise"
    if not alike:
        return "note", "not tried: the model never moved, or signals have another length than the model"
    found, chance = float(np.mean(alike)), 1 / math.sqrt(len(alike) * sim.problem.num_params)
    if abs(found) > 6 * chance:
        return "FAIL", (
            f"the receiver's noise is in the model (correlation {found:+.2f}) though the receiver added none: it is "
            "drawn again, to be taken off"
        )
    return "ok", "the receiver's noise is unknown to it"


def _future(config: Config) -> tuple[Verdict, str]:
    """Models do not depend on channels of later rounds."""
    long = config.replace({"training.engine": "reference", "experiment.rounds": LATE})
    one, other = Simulation(long, torch.device("cpu")), _OtherFuture(long.replace({}), torch.device("cpu"))
    if one._active is not None and other._active is not None:
        masks = [sim._active.masks[: LATE // 2] for sim in (one, other) if sim._active is not None]
        if not torch.equal(*masks):
            return "FAIL", "who is active depends on channels of later rounds"
    state, changed = one.init(), other.init()
    for t in (t for t in (*MOMENTS, LATE // 2 - 1) if t < LATE // 2):
        state, changed = one.step(state, t).state, other.step(changed, t).state
        if _distance(changed.params, state.params) > 1e-9:  # a solver may need another step for other channels
            return "FAIL", f"the model after round {t} depends on channels of later rounds"
    return "ok", "channels of later rounds change nothing"


def _finite(config: Config) -> tuple[Verdict, str]:
    """A few rounds can be done, and give finite models."""
    sim = _simulated(config)
    state = sim.init()
    for t in range(ROUNDS):
        state = sim.step(state, t).state
        if not bool(state.params.isfinite().all()):
            return (
                "FAIL",
                f"step of round {t} gives a model that is not finite; if it diverges, lower training.lr (--set)",
            )
    return "ok", ""


def _energy(config: Config) -> tuple[Verdict, str]:
    """No device exceeds the energy limit in many rounds."""
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
    """How many scalars devices report, and what these reveal of their channels."""
    sim = _simulated(config, **{"experiment.rounds": 3 * ROUNDS})
    state = sim.init()
    factors = torch.full((len(sim.seeds), config.cell.devices), 1.7, dtype=torch.float64)
    pairs: dict[int, list[tuple[float, float]]] = {}  # by the number of the report in its round
    by_data: set[int] = set()
    by_channel: set[int] = set()
    for t in range(3 * ROUNDS):
        plain = _listening(sim, t)
        other = _replaying(sim, t, plain, torch.ones_like(factors), batches=sim.sampler.at(t + 10 * LATE))
        turned = _replaying(sim, t, plain, factors)
        after, _ = sim.algorithm.step(copied(state), plain)
        for changed in (other, turned):
            changed.left = list(plain.reports), list(plain.received), list(plain.delivered)
            sim.algorithm.step(copied(state), changed)
        for k, report in enumerate(plain.reports):
            size = plain._channel.coeff.abs()[report.who]
            pairs.setdefault(k, []).extend(zip(report.values[report.who].tolist(), size.tolist(), strict=True))
            for found, changed in ((by_data, other), (by_channel, turned)):
                mine = changed.said[k] if k < len(changed.said) else torch.zeros_like(report.values)
                both = report.who & (mine != 0)
                if bool((mine[both] != report.values[both]).any()):
                    found.add(k)
        state = after
    if not any(pairs.values()):
        return "ok", "devices report nothing"
    told = {k: _rank_correlation(np.array(found, dtype=np.float64)) for k, found in pairs.items() if found}
    text = f"{len(pairs)} scalar{'s' if len(pairs) > 1 else ''} per device and round of at most {MOST_REPORTS}"
    if "h" in sim.algorithm.knowledge.server or not by_channel:
        return "ok", f"{text}; no channel is in them"
    worst = max(by_channel & told.keys(), key=lambda k: abs(told[k]), default=0)
    text += f"; they depend on the channel (rank correlation with |h| {told.get(worst, 0.0):+.2f})"
    if by_channel - by_data:
        return "FAIL", f"{text} and on nothing else: declare h at the server, or report less"
    return "note", f"{text}: the server can learn of it what it did not declare"


def _rank_correlation(pairs: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    """Spearman's rank correlation; 0 if one side is constant."""
    from scipy.stats import spearmanr

    return 0.0 if (pairs.std(0) == 0).any() else float(spearmanr(*pairs.T).statistic)


def _purity(config: Config) -> tuple[Verdict, str]:
    """A step does not change the state it is given, and gives the same result when repeated."""
    sim = _simulated(config)
    state = sim.init()
    for t in range(4):
        before = {name: value.clone() for name, value in tensors_of(state).items()}
        first = tensors_of(sim.step(state, t).state)
        changed = [name for name, value in tensors_of(state).items() if not _same(value, before[name])]
        if changed:
            return "FAIL", f"step() of round {t} wrote into the state it was given ({changed[0]})"
        again = sim.step(state, t).state
        moved = [name for name, value in tensors_of(again).items() if not _same(value, first[name])]
        if moved:
            return "FAIL", f"step() of round {t} gives another {moved[0]} the second time: state hides outside State"
        state = again
    return "ok", "a step depends on its arguments, and changes none of them"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _seeds(config: Config) -> tuple[Verdict, str]:
    """A seed gives the same models alone and beside others."""
    together = run(config.replace({"experiment.seeds": [0, 1, 2]}), device="cpu")
    alone = run(config.replace({"experiment.seeds": [1]}), device="cpu")
    difference = _distance(together.params[1:2], alone.params)
    if difference > 1e-9:
        return "FAIL", f"seed 1 alone and beside others differ by {difference:.1e}: seeds disturb one another"
    return "ok", f"a seed alone and beside others agree to {difference:.0e}"


def _engines(config: Config) -> tuple[Verdict, str]:
    """Every engine gives the same models as the reference engine."""
    models = {
        engine: run(config.replace({"training.engine": engine}), device="cpu").params
        for engine in ("reference", "batched", "auto")
    }
    worst = max(_distance(models[engine], models["reference"]) for engine in ("batched", "auto"))
    if worst > 1e-9:
        return "FAIL", f"the fast engines' models differ from the readable one's by {worst:.1e}"
    return "ok", f"fast and readable engines agree to {worst:.0e}"


def _distance(one: Tensor, other: Tensor, least: float = 1.0) -> float:
    scale = max(least, float(other.abs().max()))
    difference = float((one - other).abs().max()) / scale
    return math.inf if math.isnan(difference) else difference


def _resume(config: Config) -> tuple[Verdict, str]:
    """A run that is interrupted before and after the first row ends with the same bytes."""

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
    """The method runs without error where hardly anybody is heard, with a CNN, and in single precision."""
    worlds: dict[str, dict[str, Any]] = {
        "a silent world": SILENT,
        "a CNN": IMAGES,
        "a CNN in a silent world": {**SILENT, **IMAGES},
        "single precision": {"training.precision": "float32"},
    }
    for where, keys in worlds.items():
        for skip in (True, False):
            try:
                run(config.replace({**keys, "experiment.rounds": 4, "training.skip_unheard": skip}), device="cpu")
            except Exception as error:
                return "FAIL", f"{where}: {in_a_line(error)}"
    return "ok", "a silent world, a CNN, both; single precision"


def _cohort(config: Config) -> tuple[Verdict, str]:
    """If some devices are drawn for each round, only these take part."""
    try:
        run(config.replace({"cell.cohort": 2}), device="cpu")
    except Exception as error:
        return "note", f"cell.cohort cannot be used with it: {in_a_line(error)}"
    return "ok", "works with some devices drawn for each round"


def _devices(config: Config) -> tuple[Verdict, str]:
    """On a GPU, if there is one, the models are the same as on the CPU."""
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
    "finite": _finite,
    "energy": _energy,
    "server": _server,
    "deaf": _deaf,
    "isolation": _isolation,
    "noise": _noise,
    "future": _future,
    "reports": _reports,
    "purity": _purity,
    "seeds": _seeds,
    "engines": _engines,
    "resume": _resume,
    "silence": _silence,
    "cohort": _cohort,
    "devices": _devices,
}
"""Name of a check to its function, whose docstring says what it demands."""


def knowledge_line(algorithm: str, overrides: Mapping[str, Any] | None = None) -> str:
    """One line about the channel knowledge that a method declares."""
    spec = world_of(algorithm, overrides).algorithm.spec
    knowledge = getattr(spec, "knowledge", None)
    if knowledge is None:
        raise ConfigError(f"algorithm {algorithm}: declares no `knowledge`")
    sides = [f"{side} {', '.join(sorted(getattr(knowledge, side))) or 'nothing'}" for side in ("device", "server")]
    radio = "; its radio is ideal: no fading, noise or energy" if getattr(spec, "ideal_radio", False) else ""
    return f"declares to know of the channel: {'; '.join(sides)}{radio}"
