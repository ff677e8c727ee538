"""A run's configuration: typed, validated, TOML in and out.

The keys of a section are the fields of its class. The defaults are the paper's stationary setting, so an empty file
is a valid configuration. A preset lists only what differs from the defaults.

Knows: sections, keys, presets.
Does not know: how a run is carried out.
"""

import dataclasses
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from otafl import registry
from otafl.config.presets import PRESETS, Layer
from otafl.disk import content_of
from otafl.engine.rule import LocalRule
from otafl.errors import ConfigError, PluginError
from otafl.radio.imperfect import Imperfections
from otafl.radio.link import LinkBudget
from otafl.world.partition import Partition
from otafl.world.placement import Cell
from otafl.world.process import round_length_s

Record = Literal["server", "mean", "consensus", "gradient", "validation"]
MOST_SEEDS = 1000
LARGEST, SMALLEST = 1e30, 1e-100  # limits of |value|: beyond them, our formulas leave the range of float64
DEEPEST = 8  # levels of nested lists
PAPER_PARAMS = 814_090  # d of the paper's network, for which its γ was chosen


@dataclass(frozen=True)
class Experiment:
    """How long a run is, how often it is recorded, and what is recorded."""

    name: str = "stationary"
    """First part of the default run directory's name."""
    rounds: Annotated[int, Ge(1), Le(10**7)] = 800
    """Number of rounds T; paper: 800."""
    seeds: Annotated[tuple[Annotated[int, Ge(0), Lt(2**32)], ...], MinLen(1), MaxLen(MOST_SEEDS)] = (0, 1, 2, 3, 4)
    """Each seed has its own world, partition, initial model and noise; paper: five repetitions."""
    eval_every: Annotated[int, Ge(1)] = 10
    """Rounds between recorded rows; the first and the last model are always recorded."""
    record: tuple[Record, ...] = ("server",)
    """x^t is always scored. On request: x̄^t ("mean"), "consensus" distance, "gradient" norm, "validation" scores."""
    checkpoint_s: Annotated[float, Gt(0)] = 60.0
    """Seconds between checkpoints."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"experiment.seeds = {list(self.seeds)}: a seed is named twice")
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name[0] == ".":
            raise ConfigError(f"experiment.name = {self.name!r}: use letters, digits, '-', '_' and '.'")


@dataclass(frozen=True)
class Training:
    """How devices train locally."""

    local_steps: Annotated[int, Ge(1), Le(10**5)] = 10
    """Local steps s in a round; paper: 10."""
    batch_size: Annotated[int, Ge(1), Le(10**6)] = 32
    """Images in a mini-batch; paper: 32."""
    batches: Literal["per_step", "per_round"] = "per_step"
    """A fresh mini-batch for every step, or one for all steps of a round, exactly as in Algorithm 1."""
    lr: Annotated[float, Gt(0), Le(1e30)] = 0.1
    """Initial learning rate η_0; the paper searched over 0.1 … 0.0003."""
    lr_schedule: Literal["inverse_sqrt", "constant"] = "inverse_sqrt"
    """Learning rate of round t: η_t = η_0/√(1 + t/10), or η_t = η_0."""
    warmup: Annotated[int, Ge(0), Le(10**6)] = 0
    """Number of first rounds in which η_t is multiplied by (t + 1)/warmup."""
    engine: Literal["auto", "preactivation", "layers", "batched", "threads", "reference"] = "auto"
    """How it is computed; "auto" takes what is fastest for the model: see docs/performance.md. "reference" is a plain
    loop."""
    precision: Literal["float32", "tf32", "bf16", "float64"] = "float32"
    """Number type of models and training; channels are always float64. With "tf32" and "bf16" models are float32, and
    products on a GPU are less precise: TF32, and bfloat16 where the kernels for convolutions do them."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Momentum μ of local SGD; velocities start at zero in every round."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay λ: every local step adds λ w to the gradient."""
    proximal: Annotated[float, Ge(0)] = 0.0
    """Proximal weight ρ (FedProx): every local step adds ρ (w − w_0), where w_0 is the round's start model."""
    clip: Annotated[float, Gt(0)] = math.inf
    """Largest norm C of a round's local progress (w_s − w_0)/η_t; longer progress is scaled down to norm C."""
    skip_unheard: bool = True
    """Skip devices that never transmit again; x^t is unchanged. Ignored if "mean" or "consensus" is recorded."""

    def __post_init__(self) -> None:
        if math.isnan(self.clip):
            raise ConfigError("training.clip = nan: must be a number")

    @property
    def rule(self) -> LocalRule:
        """The rule of a local step."""
        return LocalRule(self.momentum, self.weight_decay, self.proximal, self.clip)

    def lr_at(self, t: int) -> float:
        """Learning rate η_t of round t."""
        lr = self.lr / math.sqrt(1 + t / 10) if self.lr_schedule == "inverse_sqrt" else self.lr
        return lr * (t + 1) / self.warmup if t < self.warmup else lr


@dataclass(frozen=True)
class Choice:
    """A name in the registry, and an instance of the class with that name."""

    name: str
    spec: Any


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked and unchangeable; `load_config` makes one.

    Each field is a section of a configuration file and has the section's keys as fields; a section that chooses a class
    by its `name` has them in `spec`. Two configurations are equal if all their keys are.

    >>> config = load_config("stationary")
    >>> config.training.local_steps, config.algorithm.name, config.algorithm.spec.gamma
    (10, 'fedoag', 1e-09)
    >>> config.replace({"training.local_steps": 5}).training.local_steps
    5
    """

    experiment: Experiment
    """Rounds, seeds, and what is recorded."""
    data: Choice
    """The data set."""
    partition: Partition
    """How training examples are shared out to devices; its keys are those of `[data]`, too."""
    model: Choice
    """The model."""
    training: Training
    """Local training."""
    cell: Cell
    """Number of devices, the cell and first positions."""
    mobility: Choice
    """How devices move."""
    pathloss: Choice
    """Mean gain as a function of the position."""
    fading: Choice
    """Law of the small-scale fading."""
    radio: LinkBudget
    """Transmit power, bandwidth, noise and antennas."""
    imperfect: Imperfections
    """Errors of the radio; none by default."""
    algorithm: Choice
    """The method."""

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section to its keys and values, as in a file; the keys of `partition` are in "data"."""
        sections = {}
        for section in SECTIONS:
            value = getattr(self, section)
            keys = {"name": value.name, **_fields(value.spec)} if isinstance(value, Choice) else _fields(value)
            sections[section] = keys | (_fields(self.partition) if section == "data" else {})
        return sections

    def to_toml(self) -> str:
        """The resolved configuration as a file that gives the same run."""
        lines = []
        for section, keys in self.to_dict().items():
            lines += [f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in keys.items()), ""]
        return "\n".join(lines)

    @staticmethod
    def from_toml(text: str) -> "Config":
        """Read a configuration that `to_toml` wrote, or any other in TOML.

        Args:
            text: the content of a configuration file.

        Raises:
            ConfigError: it is not TOML, or a key or value is not valid.
        """
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not valid TOML: {error}") from error
        return resolve(content, {}, keep_fitting=True)

    @property
    def round_s(self) -> float | None:
        """Seconds that a round lasts in the world, by the motion or else the fading; None if neither says."""
        return round_length_s(self.mobility.spec, self.fading.spec)

    @property
    def digest(self) -> str:
        """SHA-256 of all sections, keys and values, in hexadecimal."""
        return digest_of(self.to_dict())

    def replace(self, overrides: Mapping[str, Any]) -> "Config":
        """A copy of this configuration with other values.

        If the `name` of a section changes, its keys that the new class has, too, keep their values.

        Args:
            overrides: values by key, `{"section.key": value}`.

        Raises:
            ConfigError: a key or value that does not exist or cannot be run.
        """
        return resolve(self.to_dict(), _nest(overrides), keep_fitting=True)


def digest_of(sections: Mapping[str, Any]) -> str:
    """Hash of a configuration's sections and keys."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


SECTIONS = tuple(f.name for f in dataclasses.fields(Config) if f.name != "partition")
PLAIN: dict[str, type] = {"experiment": Experiment, "training": Training, "cell": Cell}
PLAIN |= {"radio": LinkBudget, "imperfect": Imperfections}
MAY_BE_INFINITE = {("radio", "noise_dbm_hz")}
MAY_BE_INFINITE |= {("training", "clip")} | {
    ("imperfect", key) for key in ("pilot_snr_db", "interference_dbm_hz", "clip_amplitude")
}
CHOSEN = {
    "data": ("datasets", "mnist"),
    "model": ("models", "mlp"),
    "mobility": ("mobility", "static"),
    "pathloss": ("pathloss", "log-distance"),
    "fading": ("fading", "rayleigh"),
    "algorithm": ("algorithms", "fedoag"),
}
"""Section to the kind of class that it chooses, and the default name."""

RETIRED = ("refresh", "pruning")
"""Keys of FedOAG that older files may have; ignored, since they changed only the memory of the simulated server."""
PARTITION_KEYS: frozenset[str] = frozenset(f.name for f in dataclasses.fields(Partition))
"""Keys of [data] that do not depend on the data set."""


def load_config(source: str | Path = "stationary", overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a preset or a TOML file, and apply overrides; keys that neither gives have the paper's stationary values.

    If an override chooses another `name` in a section of a preset, the preset's other keys of that section are dropped;
    those of a file stay if the new class has them. In the preset "quick" a γ that is not overridden is scaled with √d
    to the model, so that the same devices are heard as with the paper's network.

    Args:
        source: a preset's name, or the path of a TOML file.
        overrides: values by key, `{"section.key": value}`, in the units of the keys' names.

    Returns:
        The configuration with all its keys.

    Raises:
        ConfigError: no such preset or file, or a key or value that does not exist or cannot be run.
        PluginError: a chosen plug-in cannot be loaded.

    >>> load_config("mixed", {"experiment.rounds": 50}).experiment.rounds
    50
    """
    if not isinstance(source, str | Path) or not isinstance(overrides, Mapping | None):
        raise ConfigError("load_config() takes a preset's name or a path, and a mapping of section.key to value")
    user = _nest(overrides or {})
    if str(source) in PRESETS:
        config = resolve(PRESETS[str(source)].layer(), user)
        keys = {field.name for field in dataclasses.fields(config.algorithm.spec)}
        has_gamma = "gamma" in keys and isinstance(config.algorithm.spec.gamma, float)
        if str(source) == "quick" and has_gamma and "gamma" not in user.get("algorithm", {}):
            return config.replace({"algorithm.gamma": scaled_gamma(config.algorithm.spec.gamma, config)})
        return config
    return resolve(_read_toml(Path(source)), user, keep_fitting=True)


def scaled_gamma(gamma: float, config: Config) -> float:
    """Scale γ from the paper's d to this model's, so that the threshold γ/√(d E_s), and who is heard, stay the same."""
    return float(f"{gamma * math.sqrt(num_params(config) / PAPER_PARAMS):.4g}")


def num_params(config: Config) -> int:
    """Number d of the model's parameters."""
    return _num_params(config.data, config.model, config.cell.devices)


@functools.lru_cache
def _num_params(data: Choice, model: Choice, num_devices: int) -> int:
    from otafl.engine.models import TaskShape, seeded_build, without_storage  # torch is needed only here
    from otafl.world.data import Sizes, load_dataset, sizes_of

    sizes = sizes_of(data.spec, num_devices) or Sizes.of(load_dataset(data.name, data.spec, num_devices))
    shape = TaskShape(sizes.features, sizes.classes, sizes.image_shape)
    own = model.spec.__class__.__module__.startswith("otafl.")
    with without_storage() if own else nullcontext():
        module = seeded_build(
            lambda: registry.guarded(f"model {model.name}: build", model.spec, lambda: model.spec.build(shape)), 0
        )
    return sum(parameter.numel() for parameter in module.parameters())


def read_config(path: Path) -> Config:
    """The configuration of a run directory; the plug-ins that it names need not be loaded."""
    return resolve(_read_toml(path), {}, unloaded=True)


def file_layer(source: str | Path) -> Layer:
    """The keys that a preset or a TOML file gives."""
    return PRESETS[str(source)].layer() if str(source) in PRESETS else _read_toml(Path(source))


def _read_toml(path: Path) -> Layer:
    try:
        content = tomllib.loads(content_of(path).decode())
    except FileNotFoundError as error:
        known = registry.nearest(str(path), PRESETS)
        raise ConfigError(f"{path}: no such file or preset{known}; presets are {', '.join(PRESETS)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:  # tomllib also raises a plain ValueError, for huge integers
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    method = content.get("algorithm")
    if isinstance(method, dict) and method.get("name") in ("fedoag", "fedoag-plus"):
        for key in RETIRED:
            method.pop(key, None)
    return content


def _nest(overrides: Mapping[str, Any]) -> Layer:
    """Group `{"section.key": value}` by section."""
    layer: Layer = {}
    for dotted, value in overrides.items():
        section, dot, key = str(dotted).partition(".")
        if not dot or not section or not key:
            from otafl.config.keys import sections_with  # imports every class that can be chosen

            near = sections_with(str(dotted)) or ["for instance training.lr"]
            raise ConfigError(f"{dotted!r}: name a key as section.key: {' or '.join(near)}")
        layer.setdefault(section, {})[key] = value
    return layer


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `section.key=value` from the command line; the value is TOML, and a bare word is a string."""
    dotted, equals, raw = text.partition("=")
    if not equals or not raw.strip() or "\n" in text:
        raise ConfigError(f"--set {text}: write section.key=value, for instance --set training.lr=0.03")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        if not all(c.isalnum() or c in "-_./" for c in raw.strip()):
            point = raw.strip().replace(",", ".", 1)
            number = point.replace(".", "", 1).isdigit()
            hint = f"; for a decimal write {point}, for a list '[{raw.strip()}]'" if number else ""
            raise ConfigError(f"--set {text}: {raw!r} is neither a TOML value nor a plain word{hint}") from None
        value = raw.strip()
    return dotted.strip(), value


def resolve(base: Layer, user: Layer, keep_fitting: bool = False, unloaded: bool = False) -> Config:
    """Merge a base layer with what the user gave, and validate.

    Where the user chooses another `name` in a section, the base layer's other keys of that section are dropped. With
    `keep_fitting` (for a file or a resolved configuration), keys that the new class has, too, are kept. With `unloaded`
    (for what has been run) a plug-in need not be loaded: its keys are read as they are.
    """
    merged: Layer = {}
    for layer in (base, user):
        for section, keys in layer.items():
            if section not in SECTIONS:
                raise ConfigError(
                    f"{section}: unknown section{registry.nearest(section, SECTIONS)}; "
                    f"sections are {', '.join(SECTIONS)}"
                )
            if not isinstance(keys, dict):
                raise ConfigError(f"{section} = {keys!r}: write it as a section, [{section}]")
            old = merged.get(section, {})
            if section in CHOSEN:
                old_name = old.get("name", CHOSEN[section][1])
                new_name = keys.get("name", old_name)
                if new_name != old_name:
                    stay = PARTITION_KEYS if section == "data" else frozenset[str]()
                    if keep_fitting and isinstance(new_name, str):
                        stay |= _own_keys(_chosen_class(section, new_name))
                    old = {key: value for key, value in old.items() if key in stay}
            merged[section] = old | keys
    built: dict[str, Any] = {}
    for section in SECTIONS:
        keys = dict(merged.get(section, {}))
        if section in PLAIN:
            built[section] = _validate(section, PLAIN[section], keys)
            continue
        name = keys.pop("name", CHOSEN[section][1])
        if not isinstance(name, str):
            raise ConfigError(f"{section}.name = {name!r}: must be a string")
        stranger = unloaded and name not in registry.names(CHOSEN[section][0])
        own = tuple(key for key in keys if section != "data" or key not in PARTITION_KEYS)
        cls = _unloaded_class(section, name, own) if stranger else _chosen_class(section, name)
        if section == "data":
            mine = {key: keys.pop(key) for key in list(keys) if key in PARTITION_KEYS}
            built["partition"] = _validate(section, Partition, mine)
            built[section] = Choice(name, _validate(section, cls, keys, PARTITION_KEYS | {"name"}, f"{section} {name}"))
        else:
            built[section] = Choice(name, _validate(section, cls, keys, frozenset({"name"}), f"{section} {name}"))
    for choice in (built[section] for section in CHOSEN):
        if hasattr(choice.spec, "check_world"):
            check = functools.partial(choice.spec.check_world, built)
            registry.guarded(f"{choice.name}: check_world", choice.spec, check)
    if unloaded:  # these were checked when it ran
        return Config(**built)
    fading, name = built["fading"].spec, built["fading"].name
    if built["radio"].antennas > 1 and not getattr(fading, "zero_mean", False):
        raise ConfigError(f"radio.antennas: several need a fading law of zero mean (`zero_mean`); {name} is not one")
    if built["imperfect"].block_uses and not getattr(fading, "goes_on", False):
        raise ConfigError(
            "imperfect.block_uses: how fading goes on within an upload is known for rayleigh fading only (`goes_on`)"
        )
    return Config(**built)


def _chosen_class(section: str, name: str) -> type:
    """The class that a section's `name` chooses."""
    cls = registry.lookup(CHOSEN[section][0], name, f"{section}.name")
    parameters = getattr(cls, "__dataclass_params__", None)
    if not isinstance(cls, type) or parameters is None or not parameters.frozen:
        raise PluginError(f"{section}.name = {name!r}: must be a class decorated with @dataclass(frozen=True)")
    return cls


@functools.cache
def _unloaded_class(section: str, name: str, keys: tuple[str, ...]) -> type:
    """A class in the place of a plug-in's that is not loaded; one for the same keys, so that runs are equal."""
    made = dataclasses.make_dataclass(f"Unloaded_{name}", [(key, Any) for key in keys], frozen=True)
    _unloaded.add(made)
    return made


_unloaded: set[type] = set()


def loaded(config: Config) -> Config:
    """The configuration, of which every class must be known here: that of a run that was read need not be."""
    missing = [section for section in CHOSEN if type(getattr(config, section).spec) in _unloaded]
    return config.replace({}) if missing else config  # this looks them up


def _own_keys(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def _place(location: tuple[int | str, ...]) -> str:
    """Position of an error within a list, as `[index]`."""
    return "".join(f"[{index}]" for index in location if isinstance(index, int))


def _validate(section: str, cls: Any, keys: dict[str, Any], also: frozenset[str] = frozenset(), whose: str = "") -> Any:
    """Build an instance of a section's class; a wrong key or value raises a one-line error."""
    types = registry.guarded(f"{section}: {cls.__name__}", cls, lambda: get_type_hints(cls, include_extras=True))
    fields = {f.name: f for f in dataclasses.fields(cls)}
    allowed = sorted({*fields, *also})
    values = {}
    for key, value in keys.items():
        if key not in fields:
            near, has = registry.nearest(key, allowed), whose or f"[{section}]"
            raise ConfigError(f"{section}.{key}: unknown key{near}; {has} has {', '.join(allowed)}")
        _check_value(section, key, value, is_plugin=cls.__module__.partition(".")[0] != "otafl")
        try:
            values[key] = TypeAdapter(types[key]).validate_python(_tuples(value), strict=True)
        except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as error:
            raise PluginError(f"{section}.{key}: {cls.__name__} gives it a type that TOML does not have") from error
        except ValidationError as error:
            first, *others = error.errors()
            place = _place(first["loc"])
            alike = [other["msg"] for other in others if _place(other["loc"]) == place]  # other types it may have
            choices = [first["msg"].removeprefix("Input "), *(text.removeprefix("Input should be ") for text in alike)]
            choices = [text.replace("a valid tuple", f"a list, [{as_toml(first['input'])}]") for text in choices]
            raise ConfigError(f"{section}.{key}{place} = {as_toml(first['input'])}: {' or '.join(choices)}") from error
    required = dataclasses.MISSING
    for key, f in fields.items():
        if key not in values and f.default is required and f.default_factory is required:
            raise ConfigError(f"{section}.{key}: missing; {cls.__name__} needs it")
    spec = registry.guarded(f"{section}: {cls.__name__}", cls, lambda: cls(**values))
    try:
        hash(spec)
        _fields(spec)
    except TypeError as error:
        raise PluginError(f"{section}: {cls.__name__} has a value that TOML does not have: {error}") from error
    return spec


def _check_value(section: str, key: str, value: Any, is_plugin: bool, depth: int = 0) -> None:
    """Refuse numbers out of range, strings that are not valid UTF-8, and lists that are nested too deeply."""
    if isinstance(value, list | tuple):
        if depth == DEEPEST:
            raise ConfigError(f"{section}.{key}: has lists within lists, more than {DEEPEST} deep")
        for item in value:
            _check_value(section, key, item, is_plugin, depth + 1)
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" or c == "\0" for c in value):
        raise ConfigError(f"{section}.{key}: is no valid UTF-8")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{section}.{key}: is a whole number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        if (section, key) not in MAY_BE_INFINITE:
            raise ConfigError(f"{section}.{key} = {as_toml(value)}: must be a finite number")
    elif isinstance(value, float) and value and not is_plugin and not SMALLEST <= abs(value) <= LARGEST:
        raise ConfigError(
            f"{section}.{key} = {value:g}: cannot be computed with; give a size of {SMALLEST:g} to {LARGEST:g}, or 0"
        )


def _tuples(value: Any) -> Any:
    """Turn nested lists into tuples, since sections must be hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _fields(spec: Any) -> dict[str, Any]:
    """A section's keys and values in TOML types; keys whose value is None are left out."""
    values = {f.name: _plain(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return {key: value for key, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    return value


def as_toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return repr(value)
