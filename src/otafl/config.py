"""A run's configuration: typed, validated, TOML in and out.

A section's schema is the fields of the class it chooses. Every default is the paper's stationary setting, so an
empty file is a valid configuration; presets are what differs from it.

Knows: sections, keys, presets.
Does not know: how a run is carried out.
"""

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import TypeAdapter, ValidationError

from otafl import registry
from otafl.errors import ConfigError
from otafl.presets import PRESETS, Layer
from otafl.radio.link import LinkBudget
from otafl.world.partition import Partition
from otafl.world.placement import Cell

Record = Literal["server", "mean", "consensus", "gradient", "validation"]
PAPER_PARAMS = 814_090  # d of the paper's network, for which its γ was chosen


@dataclass(frozen=True)
class Experiment:
    """How long, how often, what is recorded."""

    name: str = "stationary"
    """First part of the default run directory's name."""
    rounds: Annotated[int, Ge(1)] = 800
    """T; paper: 800."""
    seeds: Annotated[tuple[Annotated[int, Ge(0), Lt(2**32)], ...], MinLen(1)] = (0, 1, 2, 3, 4)
    """Each seed is a world, a partition, an initial model and noise of its own; paper: five repetitions."""
    eval_every: Annotated[int, Ge(1)] = 10
    """Rounds between recorded rows; the first and the last model are always recorded."""
    record: tuple[Record, ...] = ("server",)
    """x^t always; on request x̄^t ("mean"), "consensus" distance, "gradient" norm, "validation" scores."""
    checkpoint_s: Annotated[float, Gt(0)] = 60.0
    """Seconds between checkpoints."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"experiment.seeds = {list(self.seeds)}: a seed is named twice")
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name[0] == ".":
            raise ConfigError(f"experiment.name = {self.name!r}: use letters, digits, '-', '_' and '.'")


@dataclass(frozen=True)
class Training:
    """Local training."""

    local_steps: Annotated[int, Ge(1)] = 10
    """s; paper: 10."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Images of a mini-batch; paper: 32."""
    batches: Literal["per_step", "per_round"] = "per_step"
    """A fresh mini-batch per step, or one per round for all its steps (Algorithm 1 to the letter)."""
    lr: Annotated[float, Gt(0)] = 0.1
    """η_0; paper: searched over 0.1 … 0.0003."""
    lr_schedule: Literal["inverse_sqrt", "constant"] = "inverse_sqrt"
    """η_t = η_0/√(1 + t/10), or η_0."""
    engine: Literal["batched", "reference"] = "batched"
    """All devices at once, or the readable loop that is its oracle."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of models and training; channel algebra is always float64."""

    def lr_at(self, t: int) -> float:
        """η_t."""
        return self.lr / math.sqrt(1 + t / 10) if self.lr_schedule == "inverse_sqrt" else self.lr


@dataclass(frozen=True)
class Choice:
    """A named class of the registry and an instance of it."""

    name: str
    spec: Any


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's numbers."""

    experiment: Experiment
    data: Choice
    partition: Partition
    model: Choice
    training: Training
    cell: Cell
    mobility: Choice
    pathloss: Choice
    fading: Choice
    radio: LinkBudget
    algorithm: Choice

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections and keys with every value."""
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
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items()), ""]
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """Hash of the resolved configuration."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def replace(self, overrides: Mapping[str, Any]) -> "Config":
        """This configuration with `{"section.key": value}` changed."""
        return resolve(self.to_dict(), _nest(overrides))


SECTIONS = (
    "experiment",
    "data",
    "model",
    "training",
    "cell",
    "mobility",
    "pathloss",
    "fading",
    "radio",
    "algorithm",
)
PLAIN: dict[str, type] = {"experiment": Experiment, "training": Training, "cell": Cell, "radio": LinkBudget}
CHOSEN = {
    "data": ("datasets", "mnist"),
    "model": ("models", "mlp"),
    "mobility": ("mobility", "static"),
    "pathloss": ("pathloss", "log-distance"),
    "fading": ("fading", "rayleigh"),
    "algorithm": ("algorithms", "fedoag"),
}
"""Section to registry kind and default name."""

PARTITION_KEYS = frozenset(f.name for f in dataclasses.fields(Partition))
"""Keys that [data] has whatever the data set."""


def load_config(source: str | Path = "stationary", overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a preset or TOML file, with `{"section.key": value}` on top.

    >>> load_config("mixed", {"experiment.rounds": 50}).experiment.rounds
    50
    """
    user = _nest(overrides or {})
    if str(source) in PRESETS:
        config = resolve(PRESETS[str(source)].layer(), user)
        has_gamma = hasattr(config.algorithm.spec, "gamma")
        if str(source) == "quick" and has_gamma and "gamma" not in user.get("algorithm", {}):
            return config.replace({"algorithm.gamma": _paper_gamma(config)})
        return config
    return resolve(_read_toml(Path(source)), user)


def _paper_gamma(config: Config) -> float:
    """γ at which the threshold γ/√(d E_s) is the paper's: the same devices are heard by a smaller model."""
    from otafl.engine.models import TaskShape

    dataset = config.data.spec.load(config.cell.devices)
    shape = TaskShape(dataset.train.features.shape[1], dataset.num_classes, dataset.image_shape)
    num_params = sum(parameter.numel() for parameter in config.model.spec.build(shape).parameters())
    return float(f"{config.algorithm.spec.gamma * math.sqrt(num_params / PAPER_PARAMS):.4g}")


def _read_toml(path: Path) -> Layer:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = registry.nearest(str(path), PRESETS)
        raise ConfigError(f"{path}: no such file or preset{known}; presets are {', '.join(PRESETS)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return content


def _nest(overrides: Mapping[str, Any]) -> Layer:
    """`{"section.key": value}` as sections."""
    layer: Layer = {}
    for dotted, value in overrides.items():
        section, dot, key = dotted.partition(".")
        if not dot or not section or not key:
            raise ConfigError(f"{dotted!r}: name a key as section.key, for instance training.lr")
        layer.setdefault(section, {})[key] = value
    return layer


def parse_override(text: str) -> tuple[str, Any]:
    """`section.key=value` of the command line; the value is TOML, a bare word is a string."""
    dotted, equals, raw = text.partition("=")
    if not equals or not raw.strip():
        raise ConfigError(f"--set {text}: write section.key=value, for instance --set training.lr=0.03")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        if not all(c.isalnum() or c in "-_./" for c in raw.strip()):
            raise ConfigError(f"--set {text}: {raw!r} is neither a TOML value nor a plain word") from None
        value = raw.strip()
    return dotted.strip(), value


def resolve(base: Layer, user: Layer) -> Config:
    """Merge a layer of defaults with what the user gave, and validate.

    Where the user chooses another `name` in a section, that section's other keys of the base layer are dropped.
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
                if keys.get("name", old_name) != old_name:
                    old = {key: old[key] for key in old if section == "data" and key in PARTITION_KEYS}
            merged[section] = old | keys
    built: dict[str, Any] = {}
    for section in SECTIONS:
        keys = dict(merged.get(section, {}))
        if section in PLAIN:
            built[section] = _validate(section, PLAIN[section], keys)
            continue
        kind, default = CHOSEN[section]
        name = keys.pop("name", default)
        if not isinstance(name, str):
            raise ConfigError(f"{section}.name = {name!r}: must be a string")
        cls = registry.lookup(kind, name, f"{section}.name")
        if not dataclasses.is_dataclass(cls):
            raise ConfigError(f"{section}.name = {name!r}: {cls!r} must be a dataclass of its own keys")
        if section == "data":
            mine = {key: keys.pop(key) for key in list(keys) if key in PARTITION_KEYS}
            built["partition"] = _validate(section, Partition, mine)
            built[section] = Choice(name, _validate(section, cls, keys, also=PARTITION_KEYS | {"name"}))
        else:
            built[section] = Choice(name, _validate(section, cls, keys, also=frozenset({"name"})))
    return Config(**built)


def _validate(section: str, cls: Any, keys: dict[str, Any], also: frozenset[str] = frozenset()) -> Any:
    """An instance of a section's class, or one line that says what is wrong."""
    types = get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    allowed = sorted({*fields, *also})
    values = {}
    for key, value in keys.items():
        if key not in fields:
            raise ConfigError(
                f"{section}.{key}: unknown key{registry.nearest(key, allowed)}; [{section}] has {', '.join(allowed)}"
            )
        if not _finite(value) and (section, key) != ("radio", "noise_dbm_hz"):
            raise ConfigError(f"{section}.{key} = {_toml(value)}: must be a finite number")
        try:
            values[key] = TypeAdapter(types[key]).validate_python(_tuples(value), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"[{index}]" for index in first["loc"] if isinstance(index, int))
            message = first["msg"].removeprefix("Input ")
            raise ConfigError(f"{section}.{key}{place} = {_toml(first['input'])}: {message}") from error
    required = dataclasses.MISSING
    for key, f in fields.items():
        if key not in values and f.default is required and f.default_factory is required:
            raise ConfigError(f"{section}.{key}: missing; {cls.__name__} needs it")
    return cls(**values)


def _finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down, since sections are hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _fields(spec: Any) -> dict[str, Any]:
    return {f.name: _lists(getattr(spec, f.name)) for f in dataclasses.fields(spec)}


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
