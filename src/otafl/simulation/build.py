"""Builds world, radio, engine and algorithm for all seeds of a configuration, and carries out single rounds.

Knows: configurations, worlds, radios, engines, the contract of algorithms.
Does not know: the loop over rounds, files.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otafl.config.schema import Config, load_config, loaded
from otafl.core.contract import Info, Problem, Step
from otafl.core.metrics import EXPLODED, RESERVED_COLUMNS
from otafl.core.round import Round
from otafl.core.state import parts_of, tensors_of
from otafl.engine.batches import shared_sampler
from otafl.engine.devices import Devices
from otafl.engine.fast.layerwise import layer_engine
from otafl.engine.fast.preactivation import PreactivationEngine, suits
from otafl.engine.models import builder
from otafl.engine.objective import Examples, Objective
from otafl.engine.rows import Schedule
from otafl.engine.training import THREADS_FROM, ChunkEngine, Engine, ReferenceEngine, one_by_one
from otafl.errors import ConfigError, PluginError, TooLargeError
from otafl.radio.air import Air, Channel, EnergyGuard, IdealAir
from otafl.radio.csi import View
from otafl.radio.knowledge import OWN, Knowledge, Quantity
from otafl.radio.link import inversion_threshold
from otafl.radio.noise import NoiseSource, addressed_noise
from otafl.random import Streams
from otafl.registry import guarded
from otafl.simulation.memory import refuse_too_large
from otafl.world.channel import Trajectory, active_prob, trajectory
from otafl.world.data import Dataset, load_dataset


def choose_device(name: str) -> torch.device:
    """The compute device for "auto", "cpu" or "cuda"."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch sees no CUDA device here; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


class Simulation:
    """All seeds of a run, ready to make rounds; `otafl.run` is a loop over `step`.

    Useful attributes are `problem`, the constants; `algorithm`, the method; `worlds`, positions and channels of each
    seed (see `trajectory`); `shares`, for each seed and device the indices of its training examples; `objective`, the
    model and its loss; `engine_name`.

    >>> from otafl.config.schema import load_config
    >>> sim = Simulation(load_config("quick", {"data.name": "digits", "model.hidden": [8]}), "cpu")
    >>> step = sim.step(sim.init(), 0)
    >>> step.info.active.shape, step.finite
    (torch.Size([2, 30]), tensor([True, True]))
    """

    def __init__(
        self,
        config: Config | str | Path,
        device: torch.device | str = "auto",
        model: nn.Module | None = None,
        noise: NoiseSource | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        """Load the data, compute all channels, and let the method plan.

        Args:
            config: what to simulate; a preset's name or a file, too.
            device: "auto" (a GPU if there is one), "cpu", "cuda", or a torch.device.
            model: a module that replaces `[model]`; every seed starts from its weights.
            noise: a source of unit-variance receiver noise that replaces the seeded one.
            dataset: the configuration's data set, if that is loaded already.

        Raises:
            OtaflError: the configuration or the method cannot be run, or does not fit into memory.
        """
        config = loaded(config) if isinstance(config, Config) else load_config(config)
        device = choose_device(device) if isinstance(device, str) else device
        refuse_too_large(config, device, dataset, model)
        self.config, self.device = config, device
        self._state_names: list[str] | None = None
        self._extra: set[str] | None = None  # the method's own columns, known after the first round
        self.seeds = config.experiment.seeds
        self.algorithm = config.algorithm.spec
        knowledge = getattr(self.algorithm, "knowledge", None)
        if not isinstance(knowledge, Knowledge):
            raise PluginError(f"{self._who}: declare `knowledge = otafl.Knowledge(...)`: what it reads of the channel")
        self._knowledge = knowledge  # read once, so that it cannot change during the run
        if strange := sorted(knowledge.device - OWN):
            raise PluginError(f"{self._who}: a device cannot know {', '.join(strange)}; the server can")
        if dataset is None:
            dataset = load_dataset(config.data.name, config.data.spec, config.cell.devices)
        self.shares = [_share_out(config, dataset, seed) for seed in self.seeds]
        build = builder(config.model.name, config.model.spec, dataset)
        if model is not None:  # a user's own module, with its weights
            build = functools.partial(copy.deepcopy, model)
        self.objective = Objective(build, dataset, device, config.training.precision)
        self.dtype = self.objective.dtype
        self.test = self.objective.on_device(dataset.test)
        self.validation = self._validation(dataset)
        self.worlds = [self._world(seed) for seed in self.seeds]
        imperfect = config.imperfect
        host_channel: dict[Quantity, Tensor] = {  # as devices and server estimate it
            "h": self._stacked(lambda world, streams: imperfect.believed(world.coeff, world.mean_gain, streams)),
            "mean_gain": self._stacked(lambda world, streams: world.mean_gain),
            "distance_m": self._stacked(lambda world, streams: world.distance_m),
        }
        mask = (len(self.seeds), config.cell.devices)
        everyone = np.ones((1, *mask), dtype=np.bool_)
        if config.cell.cohort:
            rounds = config.experiment.rounds
            everyone = np.stack([config.cell.cohorts(rounds, Streams(seed)) for seed in self.seeds], axis=1)
        self._everyone = Schedule(everyone, device)  # one mask for all rounds or, with cohorts, one for each
        host_channel |= self._more_known(host_channel["h"], torch.from_numpy(everyone))
        self._channel = {quantity: values.to(device) for quantity, values in host_channel.items()}
        self._coeff = self._channel["h"]  # the true channel
        if not imperfect.none:
            self._coeff = self._stacked(lambda world, streams: imperfect.true(world.coeff, streams)).to(device)
        self._each = None  # the true channel at every antenna, [T, S, M, N]
        if config.radio.antennas > 1:
            self._each = self._stacked(lambda world, streams: imperfect.true(world.each, streams)).to(device)
        self.noise_var_j = config.radio.noise_var_j
        num_params = self.objective.num_params
        source = noise or addressed_noise(device, self.dtype)
        self.air: Air | IdealAir = IdealAir(source)
        ideal = inspect.getattr_static(type(self.algorithm), "ideal_radio", False)
        if not isinstance(ideal, bool):
            raise PluginError(f"{self._who}: `ideal_radio` must be True or False in the class")
        if not ideal:
            several = config.radio.antennas > 1
            each_gain = self._stacked(lambda world, streams: world.antenna_gain) if several else None
            flawed = (imperfect, host_channel["mean_gain"], each_gain)
            radio = config.radio
            self.air = Air(self.seeds, radio.symbol_energy_j, self.noise_var_j, source, *flawed, radio.bandwidth_hz)
        self.guard = EnergyGuard(config.algorithm.name, self.seeds, device)
        training = config.training
        self.sampler = shared_sampler(
            self.seeds, self.shares, training.local_steps, training.batch_size, training.batches, device
        )
        self.engine_name = self._choose_engine()
        self._engine = self._engine_of(self.engine_name)
        self.problem = Problem(
            num_devices=config.cell.devices,
            num_params=num_params,
            symbol_energy_j=config.radio.symbol_energy_j,
            noise_var_j=self.noise_var_j,
            initial=self.objective.initial(self.seeds),
            cohort=config.cell.cohort,
            bandwidth_hz=config.radio.bandwidth_hz,
            local_steps=training.local_steps,
            rounds=config.experiment.rounds,
            server=self._view("server", {name: values[0] for name, values in self._channel.items()}),
        )
        self._plan = self._decide(host_channel)
        self.problem = dataclasses.replace(self.problem, plan=self._plan)
        self._active, self._useful = self._foresee(host_channel)
        self._plan = {name: values.to(device) for name, values in self._plan.items()}
        self._strays = torch.zeros(len(self.seeds), dtype=torch.bool, device=device)
        self._absent = torch.zeros_like(self._strays)
        self._downlink = None
        if imperfect.downlink_std > 0 and not getattr(self.algorithm, "downlink_errors", True):
            raise ConfigError(
                f"imperfect.downlink_std: errors of received models are not known for this form of {self._who} (FedOAG "
                'needs a fixed algorithm.gamma and algorithm.anchors = "kept"); change it, or set downlink_std = 0'
            )
        if isinstance(self.air, Air):
            masks = None if self._active is None else self._active.masks.cpu().numpy()
            self._downlink = imperfect.downlink(self.seeds, self.air.noise, masks)

    def init(self) -> Any:
        """The method's state before round 0, in memory of its own."""
        problem = dataclasses.replace(
            self.problem, initial=self.problem.initial.clone()
        )  # the state may be overwritten
        state = self._guarded("init", lambda: self.algorithm.init(problem))
        self._check_state("init", state)
        return state

    def step(self, state: Any, t: int) -> Step:
        """Carry out round t, from 0, and check what the method returns.

        Args:
            state: what `init` or the step before returned; it may be overwritten, so keep `otafl.core.state.copied` of
                it if you need it again.
            t: number of the round, below `experiment.rounds`.

        Returns:
            The next state, the method's diagnostics, what devices sent and spent, and which seeds are finite. Energies
            are judged in `check`, not here.

        Raises:
            PluginError: the method broke its contract.
        """
        return self.take(state, self.round_at(t))

    def take(self, state: Any, round_: Round) -> Step:
        """Carry out one round with a given Round, and check what the method returns."""
        where = f"step of round {round_.t}" if isinstance(round_.t, int) else "step"
        result = self._guarded(where, lambda: self.algorithm.step(state, round_))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Info):
            raise PluginError(f"{self._who}: step() must return (state, otafl.Info)")
        state, info = result
        self._check_state("step", state)
        if any(devices is used for devices in parts_of(state, Devices) for used in round_._used):
            raise PluginError(
                f"{self._who}: step() hands on devices that train() has used up in this round; hand on what "
                "broadcast() gives"
            )
        self._check_info(info)
        spent = round_._close(info.active)
        self._strays |= spent.strays
        self._absent |= spent.absent
        finite = torch.linalg.vector_norm(state.params, ord=torch.inf, dim=-1) <= EXPLODED
        return Step(state, info, spent, self.guard.note(round_.t, spent.energy_ratio, finite), finite)

    def round_at(
        self, t: int, *, batches: Tensor | None = None, air: Air | None = None, skip_unheard: bool = True
    ) -> Round:
        """The instruments of round t, with which one can try out a method by hand.

        Args:
            t: number of the round, from 0.
            batches: indices of the training examples in the mini-batches, int [S, M, steps, batch], instead of the
                seeded ones.
            air: another radio channel than the configuration's.
            skip_unheard: if False, devices that will never be heard again are trained, too.
        """
        return self._round(
            {quantity: rounds[t] for quantity, rounds in self._channel.items()},
            t=t,
            lr=self.config.training.lr_at(t),
            channel=Channel(self._coeff[t], None if self._each is None else self._each[t]),
            batches=lambda: self.sampler.at(t) if batches is None else batches,
            air=air or self.air,
            everyone=self._everyone.at(t if self.problem.cohort else 0),
            active=None if self._active is None else self._active.at(t),
            useful=None if self._useful is None or not skip_unheard else self._useful.at(t),
            plan={name: values[t] for name, values in self._plan.items()},
        )

    def recorded_round(self, t: Tensor, lr: Tensor, batches: Tensor, air: Air | IdealAir) -> Round:
        """A Round for a CUDA graph: its number is in a tensor, and every call reads from the same tensors."""
        needed = {"h"} | self._knowledge.device | self._knowledge.server
        now = {name: rounds.index_select(0, t.view(1))[0] for name, rounds in self._channel.items() if name in needed}
        active = None if self._active is None else self._active.pick(t)
        plan = {name: values.index_select(0, t.view(1))[0] for name, values in self._plan.items()}
        each = None if self._each is None else self._each.index_select(0, t.view(1))[0]
        everyone = self._everyone.pick(t) if self.problem.cohort else self._everyone.at(0)
        own = {"channel": Channel(now["h"], each), "batches": lambda: batches, "air": air, "everyone": everyone}
        return self._round(now, t=t, lr=lr, active=active, useful=None, plan=plan, **own)

    @property
    def recordable(self) -> bool:
        """Whether to try to record rounds as a CUDA graph: only on a GPU, and not with an imperfect radio."""
        return self.device.type == "cuda" and (self.config.imperfect.none or isinstance(self.air, IdealAir))

    def _round(self, now: Mapping[Quantity, Tensor], **own: Any) -> Round:
        """A Round with what the run gives to all of them, and what is its `own`."""
        return Round(
            owner=self.config.algorithm.name,
            problem=self.problem,
            seeds=self.seeds,
            device=self._view("device", now),
            server=self._view("server", now),
            engine=self._engine,
            objective=self.objective,
            local_steps=self.config.training.local_steps,
            rule=self.config.training.rule,
            downlink=self._downlink,
            **own,
        )

    def check(self) -> None:
        """Judge all rounds so far; `otafl.run` calls it in every round on a CPU, and for every row on a GPU.

        Raises:
            EnergyError: a device's upload of Q channel uses had more energy than Q E_s.
            PluginError: a device was heard that `active` or the cohort keeps silent, or `Info.active` names one that
                was not heard.
        """
        self.guard.check()
        if bool(self._strays.any()):
            raise PluginError(f"{self._who}: a device reports or transmits that `active` or the cohort keeps silent")
        if bool(self._absent.any()):
            raise PluginError(f"{self._who}: Info.active names a device that neither reported nor transmitted")

    def mean_params(self, state: Any) -> Tensor:
        """The mean x̄ of the devices' models, [S, P]; the server model if the method's devices keep none of their own.

        Raises:
            ConfigError: devices that are never heard again have not been trained (`training.skip_unheard`).
        """
        models = own_models(state)
        if models is not None and self._useful is not None:  # some devices were not trained
            raise ConfigError(
                "the mean of the devices' models needs all of them trained: set training.skip_unheard = false, "
                'or put "mean" into experiment.record'
            )
        mean: Tensor = state.params if models is None else models.mean(1)
        return mean

    def uplink_probability(self, place: int = 0) -> NDArray[np.float64] | None:
        """Probability p_i^t = P(|h_i^t| ≥ γ/√(d E_s)) of every device to be active, [T, M]; None without a fixed γ.

        Args:
            place: index of the seed in `seeds`.
        """
        gamma = getattr(self.algorithm, "gamma", None)
        if not isinstance(gamma, float):
            return None
        threshold = inversion_threshold(gamma, self.problem.num_params, self.problem.symbol_energy_j)
        return active_prob(self.worlds[place], self.config.fading.spec, threshold, slice(None))

    @property
    def _who(self) -> str:
        return f"algorithm {self.config.algorithm.name}"

    def _choose_engine(self) -> str:
        """The name of the engine, by a rule that depends on the model, the batch and the kind of machine alone."""
        training, asked = self.config.training, self.config.training.engine
        if asked == "preactivation" and self.objective.head is None:
            raise ConfigError(
                'training.engine = "preactivation": the model does not begin with a linear layer (a submodule) on '
                'the input; use "auto"'
            )
        num_images = training.batch_size * (training.local_steps if training.batches == "per_step" else 1)
        if asked == "preactivation" or (asked == "auto" and suits(self.objective, num_images)):
            return "preactivation"
        if asked in ("auto", "layers") and layer_engine(self.objective, training.batch_size) is not None:
            return "layers"
        if asked == "layers":
            raise ConfigError(
                'training.engine = "layers": its kernels need a GPU, single precision, convolutions, and layers that '
                'they know; use "auto"'
            )
        if asked != "auto":
            return asked
        large = self.device.type == "cpu" and self.objective.num_values * training.batch_size >= THREADS_FROM
        return "threads" if large else "batched"

    def use_engine(self, name: str) -> None:
        """Go on with the engine with which a run began, whatever the rule says now, unless it cannot be used here."""
        possible = {"preactivation": self.objective.head is not None}
        possible["layers"] = layer_engine(self.objective, self.config.training.batch_size) is not None
        if name != self.engine_name and possible.get(name, name in ("batched", "threads")):
            self.engine_name, self._engine = name, self._engine_of(name)

    def _engine_of(self, name: str) -> Engine:
        match name:
            case "reference":
                return ReferenceEngine()
            case "preactivation":
                return PreactivationEngine()
            case "threads":
                threads = torch.get_num_threads() if self.device.type == "cpu" else 1
                return ChunkEngine(one_by_one, chunk=1, threads=threads)
            case "layers":
                found = layer_engine(self.objective, self.config.training.batch_size)
                assert found is not None
                return found
        return ChunkEngine()

    def _decide(self, channel: dict[Quantity, Tensor]) -> dict[str, Tensor]:
        """The method's plan for all rounds, made from what the server declared to know; each tensor [T, S, ...]."""
        if not hasattr(self.algorithm, "plan"):
            return {}
        view, shape = self._view("server", channel), tuple(channel["h"].shape[:2])

        def draw(name: str) -> Tensor:
            rows = [Streams(seed).at(f"algorithm/{name}", 0).random(shape[0]) for seed in self.seeds]
            return torch.from_numpy(np.stack(rows, axis=1))

        plan = self._guarded("plan", lambda: self.algorithm.plan(view, self.problem, draw))
        if not isinstance(plan, dict) or not all(
            isinstance(values, Tensor) and tuple(values.shape[:2]) == shape for values in plan.values()
        ):
            raise PluginError(f"{self._who}: plan() must give a dict of tensors, each of shape {list(shape)} and more")
        return plan

    def _foresee(self, channel: dict[Quantity, Tensor]) -> tuple[Schedule | None, Schedule | None]:
        """Masks of who transmits in each round, and of who does so then or later; None if not known beforehand."""
        if not hasattr(self.algorithm, "active"):
            return None, None
        view = self._view("device", channel)
        active = self._guarded("active", lambda: self.algorithm.active(view, self.problem))
        if active is None:
            return None, None
        shape = channel["h"].shape
        if not isinstance(active, Tensor) or active.shape != shape or active.dtype != torch.bool:
            raise PluginError(f"{self._who}: active() must give a boolean mask of shape {tuple(shape)}")
        transmits = active.cpu().numpy() & self._everyone.masks.cpu().numpy()
        useful = None
        if self.config.training.skip_unheard and not {"mean", "consensus"} & set(self.config.experiment.record):
            useful = Schedule(np.flip(np.logical_or.accumulate(np.flip(transmits, 0), axis=0), 0).copy(), self.device)
        return Schedule(transmits, self.device), useful

    def _view(self, side: str, values: Mapping[Quantity, Tensor]) -> View:
        allowed = self._knowledge.device if side == "device" else self._knowledge.server
        return View(self.config.algorithm.name, side, frozenset(allowed), values)

    def _world(self, seed: int) -> Trajectory:
        config = self.config
        return trajectory(
            config.cell,
            config.mobility.spec,
            config.pathloss.spec,
            config.fading.spec,
            config.experiment.rounds,
            seed,
            config.radio.antennas,
        )

    def _more_known(self, h: Tensor, everyone: Tensor) -> dict[Quantity, Tensor]:
        """Declared quantities besides h, mean_gain and distance_m.

        Args:
            h: the channel as estimated, [T, S, M].
            everyone: the cohort of each round or, in one row for all, everybody; the others send no pilot.
        """
        declared = self._knowledge.device | self._knowledge.server
        if {"h_each", "sum_h"} & declared and (
            self.config.imperfect.pilot_snr_db < np.inf or self.config.imperfect.estimate_age
        ):
            raise ConfigError(
                f"imperfect.pilot_snr_db and estimate_age: errors of h_each and sum_h, which {self._who} needs at the "
                "server, are not modelled; leave them off"
            )
        more: dict[Quantity, Tensor] = {}
        if "phase" in declared:
            more["phase"] = torch.polar(torch.ones_like(h.real), h.angle())
        if "h_each" in declared:
            more["h_each"] = self._stacked(lambda world, streams: world.each)
        if "sum_h" in declared:
            each = self._stacked(lambda world, streams: world.each)
            more["sum_h"] = torch.where(everyone[..., None], each, 0.0).sum(2)
        return more

    def _stacked(self, part: Callable[[Trajectory, Streams], Any]) -> Tensor:
        """One quantity of all seeds' worlds, stacked to [T, S, M, ...] on the host."""
        worlds = zip(self.worlds, self.seeds, strict=True)
        return torch.from_numpy(np.stack([part(world, Streams(seed)) for world, seed in worlds], axis=1))

    def _validation(self, dataset: Dataset) -> Examples | None:
        if "validation" not in self.config.experiment.record:
            return None
        if dataset.validation is None:
            raise ConfigError(
                'experiment.record: "validation" needs a validation set, and this data set leaves none; '
                "lower data.train_images or drop it"
            )
        return self.objective.on_device(dataset.validation)

    def _check_state(self, where: str, state: Any) -> None:
        params = getattr(state, "params", None)
        shape = (len(self.seeds), self.objective.num_params)
        if not dataclasses.is_dataclass(state) or not isinstance(params, Tensor) or params.shape != shape:
            got = tuple(params.shape) if isinstance(params, Tensor) else type(state).__name__
            raise PluginError(f"{self._who}: {where}() must give a dataclass with `params` of shape {shape}, got {got}")
        if params.dtype != self.dtype:
            raise PluginError(f"{self._who}: {where}() turned the model from {self.dtype} into {params.dtype}")
        devices = [part.models.untyped_storage().data_ptr() for part in parts_of(state, Devices)]
        if len(set(devices)) < len(devices):
            raise PluginError(f"{self._who}: {where}() gives a state in which the same devices are twice")
        names = list(tensors_of(state))
        if self._state_names is None or where == "init":
            self._state_names = names
        if names != self._state_names:
            changed = ", ".join(sorted(set(names) ^ set(self._state_names)))
            raise PluginError(f"{self._who}: step() gives a state of another form than init(): {changed}")

    def _check_info(self, info: Info) -> None:
        num_seeds = len(self.seeds)
        mask = (num_seeds, self.problem.num_devices)
        if not isinstance(info.active, Tensor) or info.active.shape != mask or info.active.dtype != torch.bool:
            raise PluginError(f"{self._who}: Info.active must be a boolean mask of shape {mask}")
        if not isinstance(info.extra, Mapping):
            raise PluginError(f"{self._who}: Info.extra must be a dict of columns")
        columns = {"norm_bound": info.norm_bound, "anchors": info.anchors}
        for name, value in [*columns.items(), *info.extra.items()]:
            if value is None and name in columns:
                continue
            if not isinstance(value, Tensor) or value.shape != (num_seeds,):
                raise PluginError(
                    f"{self._who}: Info's {name} must be a tensor with one value per seed, ({num_seeds},)"
                )
        for name in info.extra:
            if not isinstance(name, str) or not name.isidentifier() or name in RESERVED_COLUMNS:
                raise PluginError(f"{self._who}: {name!r} cannot be the name of a column of its own")
        if self._extra is None:
            self._extra = set(info.extra)
        if set(info.extra) != self._extra:
            raise PluginError(f"{self._who}: Info.extra must have the same columns in every round")

    def _guarded(self, where: str, call: Callable[[], Any]) -> Any:
        """Call a method's code; errors of a plug-in, and full memory, become one line."""
        try:
            return guarded(f"{self._who}: {where}", self.algorithm, call)
        except PluginError as error:
            if "size of tensor" in str(error):
                raise PluginError(
                    f"{error}; what belongs to a seed, [S], meets [S, M] or [S, P] as x[:, None]"
                ) from error
            raise
        except torch.OutOfMemoryError as error:
            raise TooLargeError(
                f"{self._who}: the device's memory is full in {where}; run fewer seeds at once (--seeds)"
            ) from error


def own_models(state: Any) -> Tensor | None:
    """Devices' own models [S, M, P]; None if the state has none."""
    found = parts_of(state, Devices)
    return found[0].models if found else None


def _share_out(config: Config, dataset: Dataset, seed: int) -> list[Any]:
    """Indices of the images that each device of one seed holds."""
    num_devices = config.cell.devices
    if dataset.owners is not None:
        return [np.flatnonzero(dataset.owners == i) for i in range(num_devices)]
    return config.partition.split(dataset.train.targets, num_devices, config.training.batch_size, Streams(seed))
