"""Methods that cheat: which are stopped while they run, and which `otafl check` finds.

What Python cannot stop cheaply (a server that reads what devices know, noise drawn again, channels of later rounds)
is found by the check; what can be stopped is an error in the round in which it happens.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import otafl
from otafl import registry
from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.truncated import above_threshold, heard_mean
from otafl.conformance import check, world_of
from otafl.engine.updates import Updates
from otafl.errors import EnergyError, PluginError
from otafl.radio.noise import addressed_noise
from otafl.registry import lookup
from tests.test_bad_input import Shell, shell  # noqa: F401 - a fixture

OTAFedAvg: Any = lookup("algorithms", "ota-fedavg")
FedOAG: Any = lookup("algorithms", "fedoag")


@pytest.fixture
def known(request: pytest.FixtureRequest) -> Iterator[str]:
    """A class as a registered method."""
    registry._registered["algorithms"]["cheat"] = request.param
    yield "cheat"
    del registry._registered["algorithms"]["cheat"]


class Quiet(Updates):
    """Vectors that say they have no length."""

    def norms(self, who: Tensor) -> Tensor:
        return torch.zeros(who.shape, dtype=torch.float64)

    measured_norms = norms


@dataclasses.dataclass(frozen=True)
class Subclass(OTAFedAvg):
    """Sends a million times what it may, under a class of its own."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        updates = round.train(state.params)
        start = state.params[:, None].expand(-1, round.problem.num_devices, -1)
        quiet = Quiet(updates.end, start, torch.arange(start.shape[1]).expand(start.shape[:2]), round.lr)
        round.uplink(quiet, 1e6 / round.device.h, round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class Shadowed(OTAFedAvg):
    """Hangs another `norms` onto an honest object."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        updates = round.train(state.params)
        updates.measured_norms = lambda who: torch.zeros(who.shape, dtype=torch.float64)
        round.uplink(updates, 1e6 / round.device.h, round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class Grown(FedOAG):
    """Lets its vectors grow once their norms are known."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        innovation = round.train(state.devices)
        norms = innovation.norms(round.active)
        largest = round.report(norms, round.active).max()
        innovation.end.data.add_(1e3)
        scale = self.gamma / largest.clamp(min=1e-9)[:, None] / torch.where(round.active, round.device.h, 1.0)
        round.uplink(innovation, scale, round.active)
        devices = round.broadcast(state.params, round.active, state.devices, innovation)
        return dataclasses.replace(state, devices=devices), otafl.Info(active=round.active)


@dataclasses.dataclass(frozen=True)
class GrownMask(OTAFedAvg):
    """Adds devices to its mask once their norms are known to be 0."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        updates = round.train(state.params)
        who = torch.zeros_like(round.active)
        updates.norms(who)
        who.data.fill_(True)
        round.uplink(updates, 1e6 / round.device.h, who)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class Talkative(OTAFedAvg):
    """Reports its whole update, number by number."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        updates = round.train(state.params).dense()
        for k in range(updates.shape[-1]):
            round.report(updates[..., k], round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class LastWord(OTAFedAvg):
    """Sends too much in the round in which its model ceases to be one."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        if round.t < 3:
            return super().step(state, round)
        updates = round.train(state.params, round.active)
        round.uplink(updates, 1.0 / torch.where(round.active, round.device.h, 1.0), round.active)
        return State(state.params * torch.nan), otafl.Info(active=round.active)


@dataclasses.dataclass(frozen=True)
class SeesSeeds(OTAFedAvg):
    """Asks which seeds are running."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        assert round.seeds
        return super().step(state, round)


class OddNumber:
    """A learning rate by which nothing has a length."""

    def __rtruediv__(self, other: Any) -> Any:
        return other * 0.0


@dataclasses.dataclass(frozen=True)
class OddLr(OTAFedAvg):
    """Hands the radio a learning rate with arithmetic of its own."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        end = round.train(state.params).end
        slot = torch.zeros(end.shape[:2], dtype=torch.int64)
        round.uplink(Updates(end, state.params[:, None], slot, OddNumber()), 1e6 / round.device.h, round.active)
        return super().step(state, round)


class Soft(Tensor):
    """A tensor that could do anything."""


@dataclasses.dataclass(frozen=True)
class SoftTensor(OTAFedAvg):
    """Sends with amplitudes that only look like a tensor."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        round.uplink(round.train(state.params), (1e-12 / round.device.h).as_subclass(Soft), round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class ForcesMask(OTAFedAvg):
    """Writes into the mask of who is active, past its version."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        round.active.data.fill_(True)
        round.report(round.device.h.abs(), round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class SelfClose(OTAFedAvg):
    """Ends the round itself, to get hold of the books."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        round.close().energy_j.zero_()
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class InfoLies(OTAFedAvg):
    """Claims that everybody took part."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return after, dataclasses.replace(info, active=torch.ones_like(info.active))


@dataclasses.dataclass(frozen=True)
class IdealLater(OTAFedAvg):
    """Its radio is ideal when nobody looks."""

    @property
    def ideal_radio(self) -> bool:  # type: ignore[override]
        return True


STOPPED = [
    (OddLr, PluginError, "plain tensors and a plain learning rate"),
    (SoftTensor, PluginError, "needs plain tensors, got a Soft"),
    (ForcesMask, PluginError, "that `active` or the cohort keeps silent"),
    (SelfClose, PluginError, "no attribute 'close'"),
    (InfoLies, PluginError, "Info.active names a device that neither reported nor transmitted"),
    (IdealLater, PluginError, "`ideal_radio` must be True or False in the class"),
    (Subclass, PluginError, r"uplink\(\) sends what train\(\) returned or otafl.Vectors, not a Quiet"),
    (Shadowed, PluginError, r"uplink\(\) sends what train\(\) returned"),
    (Grown, EnergyError, "times the energy limit"),
    (GrownMask, PluginError, "that `active` or the cohort keeps silent|times the energy limit"),
    (Talkative, PluginError, "reports more than 8 scalars in a round"),
    (LastWord, EnergyError, r"round 3, device \d sent .* times the energy limit"),
    (SeesSeeds, PluginError, "no attribute 'seeds'"),
]


@pytest.mark.parametrize(("known", "error", "text"), STOPPED, indirect=["known"], ids=[c[0].__name__ for c in STOPPED])
@pytest.mark.parametrize("engine", ["auto", "batched", "reference"])
def test_stopped_while_it_runs(known: str, error: type[Exception], text: str, engine: str) -> None:
    with pytest.raises(error, match=text):
        otafl.run(world_of(known, {"training.engine": engine}))


def test_a_generator_does_not_tell_its_seed() -> None:
    """The method's own random numbers are those of its address, from a generator that keeps the address to itself."""
    from otafl.random import Streams
    from tests.conftest import make_config, simulate

    sim = simulate(make_config(overrides={"experiment.seeds": [123_456, 5]}))
    generator = sim.round_at(2).draw("mine")[0]
    assert "123456" not in repr(vars(generator.bit_generator.seed_seq) if hasattr(generator, "__dict__") else "")
    assert (
        generator.bit_generator.seed_seq.entropy
        != Streams(123_456).at("algorithm/mine", 2).bit_generator.seed_seq.entropy
    )
    assert generator.random() == Streams(123_456).at("algorithm/mine", 2).random()


@dataclasses.dataclass(frozen=True)
class Telepathic(OTAFedAvg):
    """Averages the devices' models without any uplink."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        return State(round.train(state.params).end.mean(1)), otafl.Info(active=round.active)


@dataclasses.dataclass(frozen=True)
class Mixed(OTAFedAvg):
    """Adds a little of what was not sent to what was."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return State(0.999 * after.params + 0.001 * round.train(state.params).end.mean(1)), info


@dataclasses.dataclass(frozen=True)
class LaterState(FedOAG):
    """Keeps what it has not been sent until the next round."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        unsent = state.devices.models.mean(1)
        after, info = super().step(state, round)
        return dataclasses.replace(after, params=0.999 * after.params + 0.001 * unsent), info


@dataclasses.dataclass(frozen=True)
class Peeking(OTAFedAvg):
    """A server that reads what the devices know."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return State(after.params * (1 + 1e-3 * round.device.h.abs().mean(-1, keepdim=True))), info


@dataclasses.dataclass(frozen=True)
class Counting(OTAFedAvg):
    """A server that counts silent devices."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return State(after.params * (1 + 1e-3 * round.active.sum(-1, keepdim=True))), info


@dataclasses.dataclass(frozen=True)
class PeekingThreshold(FedOAG):
    """A server that moves γ by the devices' own channels."""

    gamma: Any = "adaptive"

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        size = round.device.h.abs().mean(-1) / 1e-7
        return dataclasses.replace(after, gamma=after.gamma * (1 + 1e-2 * size)), info


@dataclasses.dataclass(frozen=True)
class NoiseTwice(OTAFedAvg):
    """Draws the receiver's noise again and takes it off; the seeds are easily guessed."""

    share: float = 1.0

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        heard = heard_mean(round, round.train(state.params, round.active), self.gamma, round.active)
        draw = addressed_noise(state.params.device, state.params.dtype)
        noise = draw(range(len(state.params)), "noise", round.t, round.problem.num_params)
        mean = heard.mean - self.share * heard.noise_std[:, None] * noise
        params = torch.where(heard.who.any(-1, keepdim=True), state.params + round.lr * mean, state.params)
        return State(params), otafl.Info(active=heard.who)


@dataclasses.dataclass(frozen=True)
class Prophet(OTAFedAvg):
    """Keeps all channels from `active`, and waits for better ones."""

    def active(self, device: Any, problem: Any) -> Tensor:
        object.__setattr__(self, "kept", device.h.abs())
        return super().active(device, problem)

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        later = self.kept[round.t + 1 :].sum() if round.t + 1 < len(self.kept) else 0.0
        return State(after.params * (1 + 1e-3 * later)), info


@dataclasses.dataclass(frozen=True)
class ProphetPlan(OTAFedAvg):
    """A device is active where its channel is better than it will be next."""

    def active(self, device: Any, problem: Any) -> Tensor:
        size = device.h.abs()
        return super().active(device, problem) & (size >= torch.roll(size, -1, 0))


@dataclasses.dataclass(frozen=True)
class TellsChannels(OTAFedAvg):
    """Reports |h|."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        round.report(round.device.h.abs(), round.active)
        return super().step(state, round)


HIDDEN: list[float] = []


@dataclasses.dataclass(frozen=True)
class Remembers(OTAFedAvg):
    """State outside its State."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        HIDDEN.append(1.0)
        after, info = super().step(state, round)
        return State(after.params * (1 + 1e-6 * len(HIDDEN))), info


@dataclasses.dataclass(frozen=True)
class MixesSeeds(OTAFedAvg):
    """Seeds that disturb one another."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return State(after.params + 1e-3 * (after.params.mean(0) - after.params)), info


@dataclasses.dataclass(frozen=True)
class Overwrites(OTAFedAvg):
    """Writes into the state it was given."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        state.params.add_(after.params - state.params)
        return State(state.params), info


@dataclasses.dataclass(frozen=True)
class Fragile(OTAFedAvg):
    """Cannot do with nobody."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        if not round.active.any():
            raise ValueError("nobody there")
        return super().step(state, round)


BOX: dict[Any, Tensor] = {}


@dataclasses.dataclass(frozen=True)
class RealRoundOnly(OTAFedAvg):
    """Cheats only where it is given a real Round."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        return Telepathic.step(self, state, round) if isinstance(round, otafl.Round) else super().step(state, round)


@dataclasses.dataclass(frozen=True)
class LateRounds(OTAFedAvg):
    """Cheats when nobody looks any more."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        return Telepathic.step(self, state, round) if round.t > 100 else super().step(state, round)


@dataclasses.dataclass(frozen=True)
class Mailbox(OTAFedAvg):
    """Leaves the devices' mean where the server finds it, and nobody else."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        _, info = super().step(state, round)
        key = (tuple(state.params.shape), round.t)
        return State(BOX.setdefault(key, round.train(state.params).end.mean(1)).clone()), info


@dataclasses.dataclass(frozen=True)
class KeepsActive(OTAFedAvg):
    """A server that knows who is active from what `active` was given."""

    def active(self, device: Any, problem: Any) -> Tensor:
        mask = super().active(device, problem)
        object.__setattr__(self, "kept", mask)
        return mask

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        weights = torch.arange(round.problem.num_devices, dtype=torch.float64)
        return State(after.params + 1e-3 * (self.kept[round.t] * weights).sum(-1, keepdim=True)), info


@dataclasses.dataclass(frozen=True)
class Relay(OTAFedAvg):
    """Every active device sends the mean over all devices."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        end = round.train(state.params).end
        slot = torch.zeros(end.shape[:2], dtype=torch.int64)
        mean = Updates(end.mean(1, keepdim=True).expand_as(end).contiguous(), state.params[:, None], slot, round.lr)
        heard = heard_mean(round, mean, self.gamma, round.active)
        params = torch.where(heard.who.any(-1, keepdim=True), state.params + round.lr * heard.mean, state.params)
        return State(params), otafl.Info(active=heard.who)


@dataclasses.dataclass(frozen=True)
class FreeGossip(FedOAG):
    """Devices average their models without a radio."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        mixed = after.devices.models.mean(1, keepdim=True).expand_as(after.devices.models).contiguous()
        return dataclasses.replace(after, devices=dataclasses.replace(after.devices, models=mixed)), info


@dataclasses.dataclass(frozen=True)
class GenieThreshold(OTAFedAvg):
    """The three best devices of a round are active, which no device can know."""

    def active(self, device: Any, problem: Any) -> Tensor:
        size = device.h.abs()
        return size >= size.topk(3, dim=-1).values[..., -1:]


@dataclasses.dataclass(frozen=True)
class FarProphet(OTAFedAvg):
    """Looks ahead late."""

    def active(self, device: Any, problem: Any) -> Tensor:
        size, mask = device.h.abs(), super().active(device, problem)
        ahead = mask & (size >= torch.roll(size, -1, 0))
        return torch.where((torch.arange(len(mask)) >= 100)[:, None, None], ahead, mask)


@dataclasses.dataclass(frozen=True)
class ScrambledChannels(OTAFedAvg):
    """Reports |h| with a sign that only the server can take off."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        signs = torch.tensor([1.0, -1.0]).repeat(round.problem.num_devices // 2).roll(int(round.t))
        round.report(round.device.h.abs() * signs, round.active)
        return super().step(state, round)


FOUND = {
    RealRoundOnly: {"server"},
    LateRounds: {"server"},
    Mailbox: {"deaf"},
    KeepsActive: {"server"},
    Relay: {"isolation"},
    FreeGossip: {"isolation"},
    GenieThreshold: {"isolation"},
    FarProphet: {"future"},
    ScrambledChannels: {"reports"},
    Telepathic: {"server"},
    Mixed: {"server"},
    LaterState: {"server"},
    Peeking: {"server"},
    Counting: {"server"},
    PeekingThreshold: {"server"},
    NoiseTwice: {"noise"},
    Prophet: {"future"},
    ProphetPlan: {"future"},
    TellsChannels: {"reports"},
    Remembers: {"purity", "server"},
    MixesSeeds: {"seeds"},
    Overwrites: {"purity"},
    Fragile: {"silence"},
}


@pytest.mark.parametrize("known", FOUND, indirect=True, ids=[cls.__name__ for cls in FOUND])
def test_found_by_the_check(known: str, request: pytest.FixtureRequest) -> None:
    cls = registry._registered["algorithms"]["cheat"]
    failed = {finding.name: finding.text for finding in check(known) if finding.verdict == "FAIL"}
    assert FOUND[cls] <= set(failed), failed


@pytest.mark.parametrize("known", [NoiseTwice], indirect=True)
def test_a_tenth_of_the_noise_is_noticed_too(known: str) -> None:
    failed = [finding.name for finding in check(known, {"algorithm.share": 0.1}) if finding.verdict == "FAIL"]
    assert "noise" in failed


@dataclasses.dataclass(frozen=True)
class NobodySkip(OTAFedAvg):
    """Leaves the round where nobody is active: an honest way to write it."""

    gamma: Any = 1e-8

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        if not round.active.any():
            return State(state.params), otafl.Info(round.active)
        return super().step(state, round)


@dataclasses.dataclass(frozen=True)
class Momentum(OTAFedAvg):
    """A server with a memory of its own."""

    def init(self, problem: Any) -> Any:
        return WithVelocity(problem.initial, torch.zeros_like(problem.initial))

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        velocity = 0.5 * state.velocity + (after.params - state.params)
        return WithVelocity(state.params + velocity, velocity), info


@dataclasses.dataclass(frozen=True)
class WithVelocity:
    params: Tensor
    velocity: Tensor


@dataclasses.dataclass(frozen=True)
class RandomTurns(OTAFedAvg):
    """Devices toss a coin of their own before they transmit."""

    def active(self, device: Any, problem: Any) -> None:
        return None

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        coins = torch.stack([torch.from_numpy(rng.random(round.problem.num_devices)) for rng in round.draw("coin")])
        who = round.everyone & (coins < 0.7) & above_threshold(round.device, round.problem, self.gamma)
        heard = heard_mean(round, round.train(state.params, who), self.gamma, who)
        params = torch.where(heard.who.any(-1, keepdim=True), state.params + round.lr * heard.mean, state.params)
        return State(params), otafl.Info(active=heard.who)


@pytest.mark.parametrize("known", [NobodySkip, Momentum, RandomTurns], indirect=True)
def test_honest_methods_are_not_accused(known: str) -> None:
    assert not [finding for finding in check(known) if finding.verdict == "FAIL"]


def test_an_honest_method_passes_and_is_told_what_it_reveals(shell: Shell) -> None:  # noqa: F811
    status, out, err = shell("check", "fedoag-plus")
    assert status == 0, out
    assert not err
    assert "note  reports" in out
    assert "FAIL" not in out
    assert out.splitlines()[-1] == "fedoag-plus: passed, 1 note"


def test_the_check_takes_a_file_of_the_users_own(shell: Shell) -> None:  # noqa: F811
    source = """
import dataclasses, otafl
from otafl.algorithms.ota_fedavg import OTAFedAvg

@otafl.register_algorithm("of-my-own")
@dataclasses.dataclass(frozen=True)
class Mine(OTAFedAvg):
    def step(self, state, round):
        after, info = super().step(state, round)
        return dataclasses.replace(after, params=after.params + round.device.h.abs().mean(-1, keepdim=True)), info
"""
    Path("mine.py").write_text(source)
    status, out, _ = shell("check", "of-my-own", "--plugin", "mine.py")
    del registry._registered["algorithms"]["of-my-own"]
    assert status == 1
    assert "FAIL  server" in out
    assert out.splitlines()[-1].startswith("of-my-own: ")
    assert out.splitlines()[-1].endswith("failed")
    assert "nothing is named 'fedog' (did you mean 'fedoag'?)" in shell("check", "fedog")[2]
    assert "--plugin none.py: no such file" in shell("check", "fedoag", "--plugin", "none.py")[2]
    Path("broken.py").write_text("def f(:\n")
    assert "--plugin broken.py: cannot be loaded: SyntaxError" in shell("check", "fedoag", "--plugin", "broken.py")[2]
