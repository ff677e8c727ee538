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
from otafl.algorithms.memoryless import State
from otafl.algorithms.uplink import heard_mean
from otafl.conformance import check, world_of
from otafl.engine.updates import Updates
from otafl.errors import EnergyError, PluginError
from otafl.radio.air import addressed_noise
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
        innovation = round.train(state.local_params, reference=(state.anchors.pool, state.anchors.slot))
        norms = innovation.norms(round.active)
        largest = round.report(norms, round.active).max()
        innovation.end.data.add_(1e3)
        scale = self.gamma / largest.clamp(min=1e-9)[:, None] / torch.where(round.active, round.device.h, 1.0)
        round.uplink(innovation, scale, round.active)
        return super().step(state, round)


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


STOPPED = [
    (Subclass, PluginError, r"uplink\(\) sends what train\(\) returned, not a Quiet"),
    (Shadowed, PluginError, r"uplink\(\) sends what train\(\) returned"),
    (Grown, EnergyError, "times the energy limit"),
    (GrownMask, PluginError, "that `active` says is silent|times the energy limit"),
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
        unsent = state.local_params.mean(1)
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
        heard = heard_mean(round, round.train(state.params, round.active), self.gamma)
        draw = addressed_noise(state.params.device, state.params.dtype)
        noise = draw(range(len(state.params)), "noise", round.t, round.problem.num_params)
        mean = heard.mean - self.share * heard.noise_std[:, None] * noise
        params = torch.where(heard.any, state.params + round.lr * mean, state.params)
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


FOUND = {
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


def test_an_honest_method_passes_and_is_told_what_it_reveals(shell: Shell) -> None:  # noqa: F811
    status, out, err = shell("check", "fedoag-plus")
    assert status == 0, out
    assert not err
    assert "note  reports" in out
    assert "FAIL" not in out
    assert out.splitlines()[-1] == "fedoag-plus: passed"


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
    assert out.splitlines()[-1] == "of-my-own: 1 check failed"
    assert "nothing is named 'fedog' (did you mean 'fedoag'?)" in shell("check", "fedog")[2]
    assert "--plugin none.py: is not a Python file" in shell("check", "fedoag", "--plugin", "none.py")[2]
    Path("broken.py").write_text("def f(:\n")
    assert "--plugin broken.py: cannot be loaded: SyntaxError" in shell("check", "fedoag", "--plugin", "broken.py")[2]
