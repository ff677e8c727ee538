"""One round as a method sees it: the instruments with which it trains, reports, sends and receives.

Knows: updates, the air, views.
Does not know: configuration, files, which method is running.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from otafl.core.contract import Problem, Spent
from otafl.engine.devices import Devices
from otafl.engine.fast.preactivation import FactoredUpdates
from otafl.engine.objective import Objective
from otafl.engine.rows import Known, Rows, all_rows, blend_rows, can_look, replace_rows, rows_of
from otafl.engine.rule import LocalRule
from otafl.engine.training import Engine, LocalWork, NotRecordable
from otafl.engine.updates import RowUpdates, Updates, own_references, shared_reference
from otafl.errors import PluginError
from otafl.gpu import dense
from otafl.radio.air import RECEPTIONS, Air, Channel, IdealAir, Reception, Transmission, check_mask
from otafl.radio.csi import Reports, View
from otafl.radio.digital import Delivered
from otafl.radio.imperfect import Downlink
from otafl.radio.vectors import Vectors
from otafl.random import Streams

SIGNALS = (Updates, RowUpdates, FactoredUpdates, Vectors)
"""The classes that the radio accepts, since their norms and sums are computed by the library."""
MOST_REPORTS = 8  # scalars that a device may report in a round: more would not be side information


class Round:
    """Everything that a method can see and do in one round; the argument of its `step`.

    In the shapes, S is the number of seeds, M of devices, P of parameters, Q of channel uses, N of server antennas.
    After the end of the round train, carry, broadcast, report and uplink raise a PluginError.

    >>> import otafl
    >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8], "algorithm.name": "ota-fedavg"})
    >>> sim = otafl.Simulation(small, torch.device("cpu"))
    >>> round = sim.round_at(0)
    >>> updates = round.train(sim.problem.initial, round.active)
    >>> reports = round.report(updates.norms(round.active), round.active)
    >>> scale = round.device.h.conj() / reports.max()[:, None]
    >>> round.uplink(updates, scale, round.active).shape
    torch.Size([2, 610])
    """

    def __init__(
        self,
        *,
        owner: str,
        problem: Problem,
        t: int | Tensor,
        lr: float | Tensor,
        seeds: tuple[int, ...],
        device: View,
        server: View,
        channel: Channel,
        engine: Engine,
        objective: Objective,
        batches: Callable[[], Tensor],
        local_steps: int,
        rule: LocalRule,
        air: Air | IdealAir,
        everyone: Known,
        active: Known | None,
        useful: Known | None,
        plan: Mapping[str, Tensor],
        downlink: Downlink | None = None,
    ) -> None:
        self.problem, self._seeds, self._downlink = problem, seeds, downlink
        """`problem`: the constants of the run, a `Problem`."""
        self.plan = plan
        """What the method's `plan` decided for this round: name to tensor [S, ...]; empty without a `plan`."""
        self.t: Any = t
        """The round's number t, from 0; a scalar tensor if rounds are recorded as a CUDA graph."""
        self.lr: Any = lr
        """Learning rate η_t; a scalar tensor if rounds are recorded as a CUDA graph."""
        self._recorded = isinstance(t, Tensor)
        self.everyone = everyone.mask
        """Devices that may take part in this round: all, or its cohort; bool [S, M]."""
        self._active = None if active is None else active.mask
        self._active_version = 0 if active is None else active.mask._version
        self._useful = None if useful is None else useful.mask
        self._known = [(known, known.mask._version) for known in (everyone, active, useful) if known is not None]
        self.device, self.server = device, server
        """What the devices and what the server know of the channel in this round, each a `View`."""
        self._owner, self._channel, self._air = owner, channel, air
        self._engine, self._objective, self._batches = engine, objective, batches
        self._local_steps, self._rule = local_steps, rule
        self._open, self._reports = True, 0
        self._stored: list[Devices] = []  # devices that broadcast() gave, with anchors
        self._used: list[Devices] = []  # devices whose models may have been overwritten
        may = active if active is not None else everyone if problem.cohort else None
        self._told = None if may is None else may.mask.clone()  # a copy, in case a method writes into the mask
        self._heard = torch.zeros_like(everyone.mask)
        self._transmissions: list[Transmission] = []
        place = channel.coeff.device
        self._energy_j = torch.zeros(channel.coeff.shape, dtype=torch.float64, device=place)
        self._energy_ratio = torch.zeros_like(self._energy_j)
        self._scalars = torch.zeros(len(seeds), dtype=torch.int64, device=place)
        self._slots_s = torch.zeros(len(seeds), dtype=torch.float64, device=place)
        self._strays = torch.zeros(len(seeds), dtype=torch.bool, device=place)

    @property
    def active(self) -> Tensor:
        """Devices that transmit in this round, as the method's `active` decides, bool [S, M]; do not write into it.

        With cohorts, these are the devices of the cohort among them.

        Raises:
            PluginError: the method has no `active`, or it returned None; or this mask was overwritten.
        """
        if self._active is None:
            raise PluginError(f"algorithm {self._owner}: round.active needs a method `active(device, problem)`")
        self._check_active()
        return self._active

    def train(
        self,
        start: Tensor | Devices,
        who: Tensor | None = None,
        reference: Tensor | None = None,
        *,
        correction: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> Updates:
        """Train locally on the devices' own data; returns the updates Δ_i = (end_i − reference_i)/η_t.

        The local step is the same for every method and set by `[training]` (see `otafl.engine.rule`). The reference is
        the given `reference`, else the anchor of `Devices` with anchors, else the start model. In the first two cases
        the end points may overwrite the start models, so the same `Devices` train only once in a round.

        Args:
            start: a model that all devices share [S, P], or one for each: `Devices`, or a tensor [S, M, P].
            who: devices that train, bool [S, M]; the end point of the others is their start model. By default all that
                may take part; if the reference is not the start, those that transmit neither now nor later may be
                left out.
            reference: a model [S, P] that all updates are measured against; not with a shared start.
            correction: a term c_i [S, M, P] that is added to every gradient of device i, in the unit of a gradient.
            steps: number of local steps of each device, int [S, M]; clamped to 0 … `training.local_steps`.

        Returns:
            Lazy updates of all devices, each of P values in the unit of a gradient.

        Raises:
            PluginError: these `Devices` have already trained in this round, or an argument has a wrong type or shape.
        """
        shape = self._check("train()")
        size = self._objective.num_params
        against: tuple[Tensor, Tensor] | None = None
        if isinstance(start, Devices):
            if start.anchors is not None:
                against = start.anchors.pool, start.anchors.slot
            self._use(start, "train()", becomes_end=against is not None or reference is not None)
            start = start.models
        self._check_plain("train()", start)
        if start.shape not in ((shape[0], size), (*shape, size)) or (reference is not None and start.dim() == 2):
            raise PluginError(
                f"algorithm {self._owner}: train() needs models of shape [S, P] or, with a reference, [S, M, P]; got "
                f"{tuple(start.shape)}"
            )
        if reference is not None:
            against = self._against("train()", reference, start.dtype)
        if who is None:
            who = self.everyone if against is None or self._useful is None else self._useful
        check_mask(self._owner, "train()", who, shape)
        if correction is not None:
            self._check_plain("train()", correction)
            if correction.shape != (*shape, size) or correction.dtype != start.dtype:
                raise PluginError(
                    f"algorithm {self._owner}: train() needs corrections of shape {[*shape, size]} and {start.dtype}"
                )
        if steps is not None:
            self._check_plain("train()", steps)
            if steps.shape != shape or steps.is_floating_point() or steps.is_complex():
                raise PluginError(f"algorithm {self._owner}: train() needs whole steps, of shape {list(shape)}")
            steps = steps.clamp(0, self._local_steps)
        (rows, mask), batches = self._rows(who), self._batches()
        rule = (self._rule, correction, steps)
        drops = self._objective.dropout_keys(self._seeds, shape[1], self.t)
        if self._downlink is not None:
            return self._train_from_received(start, rows, batches, against, rule, drops)
        work = LocalWork(
            self._objective, start, rows, batches, self._local_steps, self.lr, mask, against, *rule, who, drops
        )
        return self._engine.train(work)

    def carry(self, devices: Devices, progress: Updates, reference: Tensor) -> Updates:
        """What devices have to send if they keep what they have not sent before, as in error feedback.

            x_i ← x_i + η_t progress_i,   result_i = (x_i − reference)/η_t

        Pass the result to `broadcast`, whose `unsent` says how much of it a device keeps.

        Args:
            devices: the state's devices, without anchors; used up, so once in a round.
            progress: updates that the devices trained in this round from the server's model.
            reference: the server's model x^t, [S, P].

        Returns:
            Lazy updates of all devices, which include what they kept from earlier rounds.

        Raises:
            PluginError: the devices have anchors or are used up, or an argument has a wrong type or shape.
        """
        self._check("carry()")
        call = f"algorithm {self._owner}: carry()"
        if not isinstance(devices, Devices) or devices.anchors is not None:
            raise PluginError(f"{call} needs the state's otafl.Devices, without anchors")
        if not isinstance(progress, Updates):
            raise PluginError(f"{call} needs what train() returned, got a {type(progress).__name__}")
        against = self._against("carry()", reference, devices.models.dtype)
        self._use(devices, "carry()")
        models = devices.models if self._engine.donates else devices.models.clone()
        progress.move(models)
        return Updates(models, *against, self.lr)

    def broadcast(
        self,
        params: Tensor,
        who: Tensor,
        devices: Devices,
        trained: Updates,
        *,
        unsent: Tensor | None = None,
        stored: Tensor | None = None,
    ) -> Devices:
        """Send a model to some devices at the end of the round; the others go on from what they trained.

            i ∈ who: x_i ← params + unsent_i η_t Δ_i, anchor_i ← stored;   others: x_i ← end_i

        Take norms and sums before this call: do not use `devices` and `trained` after it.

        Args:
            params: the model that is sent, [S, P].
            who: devices that receive it, bool [S, M].
            devices: the state's devices, before this round's training.
            trained: what `train` or `carry` returned for them, Δ_i.
            unsent: share of its update, 0 to 1, that a device of `who` has not sent and keeps, [S, M]; by default 0.
            stored: model that becomes the anchor of the devices `who`, [S, P]; by default `params`.

        Returns:
            The devices' models and anchors for the next round.

        Raises:
            PluginError: an argument has a wrong type, shape or range, or `stored` is given for devices without anchors.

        >>> import otafl
        >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8]})
        >>> sim = otafl.Simulation(small, torch.device("cpu"))
        >>> round, devices, model = sim.round_at(0), sim.problem.devices(), sim.problem.initial
        >>> trained = round.train(devices, reference=model)
        >>> after = round.broadcast(model, round.everyone, devices, trained)  # all return to x^0
        >>> bool((after.models == model[:, None]).all())
        True
        """
        shape = self._check("broadcast()")
        check_mask(self._owner, "broadcast()", who, shape)
        self._check_broadcast(shape, params, devices, trained, unsent, stored)
        models = trained.end
        if unsent is None:
            replace_rows(models, who, params)
        else:
            blend_rows(models, who, params, unsent, *trained.reference)
        if devices.anchors is None:
            return Devices(models)
        kept = params if stored is None else stored
        again = any(devices is one for one in self._stored)
        if again and not can_look(params) and devices.anchors.pool.shape[1] < shape[1]:
            raise PluginError(
                f"algorithm {self._owner}: broadcast() stores a second anchor in a round; with more devices than "
                "rounds, a GPU has room for one in each"
            )
        self._stored.append(Devices(models, devices.anchors.after(kept, who, self._engine.donates)))
        return self._stored[-1]

    def _check_broadcast(
        self, shape: tuple[int, int], params: Any, devices: Any, trained: Any, unsent: Any, stored: Any
    ) -> None:
        """Refuse arguments of broadcast() that have a wrong type, shape or range."""
        call = f"algorithm {self._owner}: broadcast()"
        if not isinstance(devices, Devices):
            raise PluginError(f"{call} needs the state's otafl.Devices, got a {type(devices).__name__}")
        if not isinstance(trained, Updates):
            raise PluginError(f"{call} needs what train() returned for these devices, got a {type(trained).__name__}")
        if stored is not None and devices.anchors is None:
            raise PluginError(f"{call}: these devices have no anchors, so that nothing can be `stored` as one")
        model = (shape[0], self.problem.num_params)
        needed = [("a model", params, model, devices.models.dtype), ("unsent shares", unsent, shape, None)]
        needed.append(("a stored model", stored, model, devices.models.dtype))
        for what, value, wanted, dtype in needed:
            if value is None and what != "a model":
                continue
            fits = type(value) in (Tensor, Parameter) and value.shape == wanted and value.is_floating_point()
            if not fits or dtype not in (None, value.dtype):
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise PluginError(f"{call} needs {what} of shape {list(wanted)}{_of(dtype)}, got {got}")
        if unsent is not None and can_look(unsent) and not bool(((unsent >= 0) & (unsent <= 1)).all()):
            raise PluginError(f"{call}: unsent shares are from 0 to 1")

    def _against(self, call: str, reference: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Pool and slots (see `Updates`) that give all devices the same reference [S, P]."""
        self._check_plain(call, reference)
        shape = len(self._seeds), self._objective.num_params
        if reference.shape != shape or reference.dtype != dtype:
            raise PluginError(f"algorithm {self._owner}: {call} needs a reference of shape {list(shape)} and {dtype}")
        return shared_reference(reference, self.problem.num_devices)

    def _use(self, devices: Devices, call: str, becomes_end: bool = True) -> None:
        """Refuse devices that were used up in this round, and note those whose models become the end points."""
        if any(devices is used for used in self._used):
            raise PluginError(
                f"algorithm {self._owner}: {call} was called with these devices already in this round; once only, "
                "since their models become the end points"
            )
        if becomes_end:
            self._used.append(devices)

    def _rows(self, who: Tensor) -> tuple[Rows, Tensor | None]:
        """Rows of the devices that train; if the rows hold other devices, too, also the mask of those that train."""
        self._check_active()
        for known, version in self._known:
            if who is known.mask and who._version == version:
                return known.rows, None if known.exact else who
        if self.problem.cohort:
            who = who & self.everyone
        if self._recorded:  # a recorded round cannot read the mask
            return all_rows(who), who
        return rows_of(who), None

    def _train_from_received(
        self,
        start: Tensor,
        rows: Rows,
        batches: Tensor,
        reference: tuple[Tensor, Tensor] | None,
        rule: tuple[LocalRule, Tensor | None, Tensor | None],
        drops: Tensor | None,
    ) -> Updates:
        """Train from models received with errors; the errors are subtracted from the end points and not sent."""
        assert self._downlink is not None
        num_devices = batches.shape[1]
        errors = self._downlink.errors(int(self.t), start.dim() == 3, start, num_devices)
        received = (start if start.dim() == 3 else start[:, None]) + errors
        parts = (self._objective, received, rows, batches, self._local_steps, self.lr, None, None, *rule)
        work = LocalWork(*parts, dropout=drops)
        end = self._engine.train(work).end - errors
        shared = shared_reference(start, num_devices) if start.dim() == 2 else own_references(start)
        return Updates(end, *(reference or shared), self.lr)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """Send one real number from each device `who` to the server, error-free; at most eight times in a round.

        The server may announce to all devices what it computes from reports, for instance their maximum.

        Args:
            values: the number that each device reports, real [S, M]; ignored outside `who`.
            who: devices that report, bool [S, M]; only those of `round.active` where the method has an `active`.

        Returns:
            The reports; each counts in the column `scalar_reports`.

        Raises:
            PluginError: a ninth report in this round, or an argument of a wrong type or shape.
        """
        shape = self._check("report()")
        check_mask(self._owner, "report()", who, shape)
        self._check_plain("report()", values, who)
        if values.shape != shape or values.is_complex():
            raise PluginError(f"algorithm {self._owner}: report() needs one real value per device, of shape {shape}")
        self._reports += 1
        if self._reports > MOST_REPORTS:
            raise PluginError(
                f"algorithm {self._owner}: a device reports more than {MOST_REPORTS} scalars in a round; vectors go by "
                "uplink()"
            )
        self._scalars += who.sum(-1)
        self._note(who)
        return Reports(torch.where(who, values, torch.zeros_like(values)), who.clone())

    def uplink(
        self, signal: Updates | Vectors, tx_scale: Tensor, who: Tensor, reception: Reception | None = None
    ) -> Tensor:
        """Let the devices `who` send their vectors at once over the air; returns what the server hears.

            y_n = Σ_{i∈who} h_{i,n} x̂_i + z_n,   x̂_i = tx_scale_i vector_i,   ‖x̂_i‖² ≤ Q E_s

        It takes Q channel uses, and the energy limit Q E_s holds for each call. The noise variance σ_z² is per real
        dimension. With an ideal radio the sum arrives without h, noise and limit.

        Args:
            signal: what `train` or `carry` returned (Q = P), or `Vectors` of any length Q.
            tx_scale: factor by which each device multiplies its vector, real or complex [S, M], √J per unit of the
                vector; ignored outside `who`. To invert its channel, a device divides by `round.device.h`.
            who: devices that transmit, bool [S, M]; only those of `round.active` where the method has an `active`.
            reception: "real", the in-phase part of y and the default for real signals; "complex", all of y;
                "antennas", that of every antenna; "energy", Σ_n |y_n|². See `otafl.radio.air`.

        Returns:
            What is heard, in √J: real [S, Q], complex [S, Q], complex [S, N, Q] or, for "energy" in J, real [S, Q].

        Raises:
            PluginError: a complex signal without a `reception`, or an argument of a wrong type or shape. A device
                above its energy limit ends the run with an EnergyError after the round; on a GPU, at the next row.
        """
        shape = self._check("uplink()")
        if type(signal) not in SIGNALS or not {"norms", "measured_norms", "superpose", "dense"}.isdisjoint(
            vars(signal)
        ):
            raise PluginError(
                f"algorithm {self._owner}: uplink() sends what train() returned or otafl.Vectors, not a "
                f"{type(signal).__name__}"
            )
        if isinstance(signal, Vectors):
            self._check_plain("uplink()", signal.values)
        if isinstance(signal, Vectors) and signal.values.shape[:2] != shape:
            raise PluginError(
                f"algorithm {self._owner}: uplink() needs vectors of shape {[*shape, 'Q']}, got "
                f"{list(signal.values.shape)}"
            )
        if reception is None:
            if signal.is_complex:
                raise PluginError(
                    f'algorithm {self._owner}: uplink() of complex vectors needs a reception: "complex", or "real" for '
                    "their in-phase part alone"
                )
            reception = "real"
        if reception not in RECEPTIONS:
            raise PluginError(f"algorithm {self._owner}: reception is one of {', '.join(RECEPTIONS)}")
        self._check_plain("uplink()", tx_scale, who)
        if tx_scale.shape != shape:
            raise PluginError(
                f"algorithm {self._owner}: uplink() needs tx_scale of shape {shape}, got {tuple(tx_scale.shape)}"
            )
        check_mask(self._owner, "uplink()", who, shape)
        self._note(who)
        use = len(self._transmissions)
        heard, spent = self._air.uplink(signal, tx_scale, who, self._channel, self.t, use, reception)
        self._transmissions.append(spent)
        self._energy_j += spent.energy_j
        self._energy_ratio = torch.maximum(self._energy_ratio, spent.energy_j / spent.limit_j)
        return heard

    def digital(self, signal: Updates | Vectors, bits: Tensor, who: Tensor, deadline_s: float | Tensor) -> Delivered:
        """Let the devices `who` send their vectors as bits, one after another, at the capacity of their channels.

            rate_i = B log2(1 + |h_i|² E_s/(2 σ_z²)),   slot_i = bits_i/rate_i,   energy P slot_i

        The best channels go first, and whoever has not finished by the deadline is not heard. Vectors arrive as they
        are given: quantise them before (`otafl.radio.digital.quantised`). On the ideal radio it takes no time.

        Args:
            signal: what `train` or `carry` returned, or `Vectors`.
            bits: number of bits that each device sends, real or int [S, M]; ignored outside `who`.
            who: devices that send, bool [S, M].
            deadline_s: seconds that all slots may take together, a number or [S].

        Returns:
            Who got through, and weighted sums of their vectors. Seconds and energies count in `uplink_s`, `energy_j`.

        Raises:
            PluginError: an argument of a wrong type or shape.
        """
        shape = self._check("digital()")
        if type(signal) not in SIGNALS:
            raise PluginError(f"algorithm {self._owner}: digital() sends what train() returned or otafl.Vectors")
        self._check_plain("digital()", bits, who)
        check_mask(self._owner, "digital()", who, shape)
        if bits.shape != shape or bits.is_complex():
            raise PluginError(f"algorithm {self._owner}: digital() needs a number of bits per device, of shape {shape}")
        through, seconds, energy_j = self._air.deliver(bits.to(torch.float64), who, self._channel, deadline_s)
        self._note(who)
        self._slots_s += seconds.sum(-1)
        self._energy_j += energy_j
        return Delivered(signal, through)

    def uniform(self, name: str, size: int) -> Tensor:
        """Random numbers of the method's own, uniform in [0, 1), [S, size], drawn on the compute device.

        As `draw`, a stream depends on (seed, name, round) alone; unlike it, rounds can be recorded as a CUDA graph. A
        GPU draws other numbers than a CPU.

        Args:
            name: the stream's name; another name gives independent numbers.
            size: how many numbers each seed needs.
        """
        self._check("uniform()")
        normal = self._air.noise(self._seeds, f"algorithm/{name}", self.t, size)
        if dense.possible(normal):
            return dense.uniform(normal)
        below_one = 1 - torch.finfo(normal.dtype).eps / 2
        drawn: Tensor = torch.special.ndtr(normal).clamp(max=below_one)
        return drawn

    def draw(self, name: str) -> list[np.random.Generator]:
        """The method's own random streams of this round, one NumPy generator per seed.

        A stream depends on (seed, name, round) alone: a second call with the same name repeats the same numbers. A
        method that draws is slower on a GPU, since its rounds cannot be recorded as a CUDA graph.

        Args:
            name: the stream's name; another name gives independent numbers.

        >>> import otafl
        >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8]})
        >>> round = otafl.Simulation(small, torch.device("cpu")).round_at(0)
        >>> [generator.random() for generator in round.draw("mine")] == [g.random() for g in round.draw("mine")]
        True
        """
        if self._recorded:
            raise NotRecordable("the method draws random numbers")
        return [Streams(seed).anonymous(f"algorithm/{name}", self.t) for seed in self._seeds]

    def _close(self, active: Tensor) -> Spent:
        """End the round and return what it spent; `active` is the method's mask of who took part."""
        self._check("step()")
        self._open = False
        absent = (active & ~self._heard).any(-1)
        parts = (self._energy_j, self._energy_ratio, self._scalars, self._slots_s, self._strays, absent)
        return Spent(tuple(self._transmissions), *parts)

    def _note(self, who: Tensor) -> None:
        """Remember who is heard, and flag seeds in which a device is heard that `active` or the cohort keeps silent."""
        self._heard |= who
        if self._told is not None:
            self._check_active()
            self._strays |= (who & ~self._told).any(-1)

    def _check_plain(self, call: str, *values: object) -> None:
        """Refuse all but plain tensors: the arithmetic of other classes could be anything."""
        for value in values:
            if type(value) not in (Tensor, Parameter):
                raise PluginError(f"algorithm {self._owner}: {call} needs plain tensors, got a {type(value).__name__}")

    def _check_active(self) -> None:
        if self._active is not None and self._active._version != self._active_version:
            raise PluginError(f"algorithm {self._owner}: round.active was written; make a mask of your own")

    def _check(self, call: str) -> tuple[int, int]:
        """The shape [S, M]; raises if the round is over."""
        if not self._open:
            raise PluginError(f"algorithm {self._owner}: {call} of round {int(self.t)} was called after that round")
        num_seeds, num_devices = self._channel.coeff.shape
        return num_seeds, num_devices


def _of(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else f" and {dtype}"
