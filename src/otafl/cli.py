"""The command line: one function per command; everything else is in the library.

Knows: commands, their options, exit statuses.
Does not know: how anything is computed.
"""

import contextlib
import io
import logging
import math
import os
import shlex
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from otafl import complete
from otafl._version import __version__
from otafl.errors import ConfigError, OtaflError, is_out_of_memory, say
from otafl.registry import in_a_line, load_plugin

FAILED_STATUS = 1
DIVERGED_STATUS = 3
MOST_CURVES = 12  # of the figure that a sweep ends with
BUG_STATUS = 70  # sysexits.h: internal software error

RUN_EXAMPLES = """\b
Examples:
  otafl run quick
  otafl run stationary --set algorithm.name=fedavg --seeds 0-4
  otafl run my.toml --set training.lr=0.03 --out runs/mine
"""  # \b keeps the lines as they are

SWEEP_EXAMPLES = """\b
A sweep file:
  base = "stationary"
  set = { "experiment.rounds" = 200 }
  [axes]
  "algorithm.name" = ["fedoag", "fedoag-plus"]
  "algorithm.gamma" = [3e-10, 1e-9]
"""

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="section.key=value",
        help="Change a key; may be repeated. 'otafl config' shows all keys.",
        autocompletion=complete.overrides,
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|PRESET",
        help="A TOML file, or a preset: see 'otafl list presets'.",
        autocompletion=complete.configurations,
    ),
]
RunNames = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Run directories, folders of them, or a sweep's folder.")
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", help="A label for a run; give one for each, in their order.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ExecutorName = Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")]
Workers = Annotated[int | None, typer.Option(help="local: worker processes; default one per core, one on a GPU.")]
Together = Annotated[int, typer.Option(help="local: runs of a worker at a time, in turns; several overlap on a GPU.")]
Address = Annotated[str | None, typer.Option(help="ray: the cluster's address; default: one on this machine.")]
Cpus = Annotated[float, typer.Option(help="CPUs of a run: its threads, whatever the number of workers.")]
Gpus = Annotated[float, typer.Option(help="ray: GPUs of a run; may be a fraction.")]


def _load_plugins(files: list[str] | None) -> list[str] | None:
    for file in files or []:
        load_plugin(file)
    return files


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="FILE.py", callback=_load_plugins, is_eager=True, help="Make what a file registers known."
    ),
]

app = typer.Typer(
    name="otafl",
    help="Over-the-air federated learning: every method in one harness on the same wireless world.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="List data sets, or get one.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line; a user's mistake gives one line and status 2, a bug one line and the path of a log."""
    _mend_streams()
    logging.basicConfig(level=logging.WARNING, format="otafl: %(message)s")
    logging.raiseExceptions = False  # a message that cannot be shown is no reason to stop
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's; results are checked for it
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except OtaflError as error:
        _fail(str(error), error.exit_status)
    except SystemExit as stop:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # click: the reader of the pipe has gone
            sys.exit(141)
        raise stop
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _silence_output()
        sys.exit(141)
    except OSError as error:
        _silence_output()
        place = error.filename or "standard output, where what was shown is lost and nothing else"
        _fail(f"{place}: {error.strerror or error}", 2)
    except Exception as error:  # click's own errors, under whichever name typer ships them
        if is_out_of_memory(error):
            _fail("not enough memory; try fewer seeds, devices or images, or a smaller model", 2)
        if not hasattr(error, "format_message"):
            _fail(f"a bug: {in_a_line(error)}; the traceback is in {_write_traceback()}", BUG_STATUS)
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "otafl"
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(0)
        hint = _as_a_key(getattr(error, "option_name", ""))
        _fail(f"{' '.join(error.format_message().split())} {hint}(see '{where} --help')", 2)
    sys.exit(status if isinstance(status, int) else 0)


def _as_a_key(option: str) -> str:
    """How the key is changed that somebody took for an option; "" if there is none."""
    from otafl.config.keys import sections_with

    keys = sections_with(option.lstrip("-").replace("-", "_")) if option.startswith("--") else []
    return (
        f"A key of the configuration is changed by --set {' or '.join(f'{key}=VALUE' for key in keys)} " if keys else ""
    )


def _mend_streams() -> None:
    """Connect closed streams to the null device; a character that a terminal cannot show becomes a '?'."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)  # else a file of the run would get this descriptor
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _silence_output() -> None:
    """Send what is left in the output buffer to the null device, so that Python does not fail on it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_traceback() -> str:
    """Write the current traceback to a new file; returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="otafl-", suffix=".log", delete=False, encoding="utf-8", errors="replace"
    ) as log:
        print(f"otafl {__version__}: {sys.argv}", file=log)
        traceback.print_exc(file=log)
    return log.name


def _fail(message: str, status: int) -> NoReturn:
    """Print the message as one line, even if it quotes line breaks, and exit."""
    line = "".join(c if c.isprintable() else " " for c in message)
    say(f"otafl: {' '.join(line.split())}")
    sys.exit(status)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"otafl {__version__}")
        raise typer.Exit


@app.command(epilog=RUN_EXAMPLES)
def run(
    config: Source = "quick",
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, for instance 0-4 or 0,2,5.")] = None,
    device: Device = "auto",
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Run directory; default runs/NAME-HASH.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run anew beside a run that is there already.")] = False,
    plugin: Plugins = None,
) -> int:
    """Run a configuration; the same command continues an interrupted run."""
    from otafl.config.schema import load_config

    _check_out(out)
    chosen = _parsed(overrides)
    if seeds is not None:
        chosen["experiment.seeds"] = parse_seeds(seeds)
    resolved = load_config(config, chosen)
    if config == "quick" and resolved.data.name == "digits" and "data.name" not in chosen:
        say("MNIST is not here, so this takes the small digits of the package; 'otafl data get mnist' gets it")
    if config == "quick":
        _say_whose_constants(resolved, chosen)

    from otafl.report.told import Progress, headline, print_summary
    from otafl.simulation.build import choose_device
    from otafl.simulation.run import Interrupted, default_directory, fresh_directory, run as run_config

    choose_device(device)
    folder = Path(out) if out is not None else default_directory(resolved)
    if fresh:
        folder = fresh_directory(folder)
    try:
        with Progress(resolved, f"{headline(resolved)}\n{folder}") as progress:
            result = run_config(resolved, out=folder, device=device, observer=progress)
    except Interrupted as stop:
        if fresh:
            say(f"otafl: this run is in {folder}: continue it with --out {folder}, without --fresh")
        raise stop
    print_summary(result, folder)
    if len(result.diverged) == len(resolved.experiment.seeds):
        return DIVERGED_STATUS
    _draw(result, folder / "accuracy.png")
    if config == "quick" and not chosen:
        print(
            "next   otafl sweep first      the same beside FedOAG, SCA and error-free training\n"
            f"       otafl plot {folder} -y num_active -o active.pdf; otafl config quick; otafl list"
        )
    elif config == "quick":
        print(f"next   otafl compare {folder} ANOTHER; otafl plot {folder} ANOTHER -o figure.pdf")
    return DIVERGED_STATUS if result.diverged else 0


def _say_whose_constants(resolved: Any, chosen: Any) -> None:
    """Say so if another method has the learning rate and so on that the preset quick has for its own."""
    from otafl.config.schema import as_toml, file_layer, load_config

    preset, paper = file_layer("quick"), load_config("stationary").to_dict()["training"]
    own, keys = preset["algorithm"]["name"], preset["training"]
    if resolved.algorithm.name != own and not any(f"training.{key}" in chosen for key in keys):
        theirs = " ".join(f"--set training.{key}={as_toml(paper[key])}" for key in keys)
        say(f"training.{', '.join(keys)} are {own}'s; the paper's are {theirs}, and 'otafl tune' finds others")


@app.command(epilog=SWEEP_EXAMPLES)
def sweep(
    file: Annotated[str, typer.Argument(metavar="SWEEP.toml", help="A base configuration and axes; or an example.")],
    overrides: Overrides = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of every run, for instance 0-4.")] = None,
    chosen: Annotated[
        str | None, typer.Option(metavar="CHOSEN.toml", help="What 'otafl tune' chose for this file: run only that.")
    ] = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    workers: Workers = None,
    together: Together = 1,
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = 0.0,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the runs; default sweeps/NAME.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the runs, and which are there already.")
    ] = False,
    plugin: Plugins = None,
) -> int:
    """Run every combination of a sweep file; the same command again runs what is missing."""
    from otafl.studies.sweep import load_sweep

    _check_out(out)
    keys = _parsed(overrides)
    if seeds is not None:
        keys["experiment.seeds"] = parse_seeds(seeds)
    asked = load_sweep(file, keys, chosen)

    from otafl.studies.conduct import Executor, conduct
    from otafl.studies.study import Study

    study = Study(Path(out) if out is not None else Path("sweeps") / asked.name, asked)
    if dry_run:
        print(study.plan())
        return 0
    outcome = conduct(study, device, Executor(executor, workers, together, address, cpus, gpus))
    if not outcome.status:
        from otafl.report.compare import overview

        print(overview(study.folder))
        if len(asked.cases) <= MOST_CURVES:
            _draw(study.folder, study.folder / "accuracy.png", width="double")
    print(f"table  {outcome.table}\nruns   {study.folder / 'runs'}")
    if not outcome.status:
        over = next((f" -x {axis}" for axis, values in asked.axes.items() if _is_scale(values)), "")
        per = "".join(f" --per {shlex.quote(axis)}" for axis in asked.worlds)
        print(f"next   otafl compare {study.folder}{per}; otafl plot {study.folder}{over} -o {asked.name}.pdf")
    return outcome.status


def _is_scale(values: Any) -> bool:
    """Whether an axis has numbers that one would draw over."""
    return len(values) > 2 and all(isinstance(value, int | float) for value in values)


def _draw(runs: Any, file: Path, **options: Any) -> None:
    """Draw accuracy over rounds and say where, if figures can be drawn and there is an accuracy."""
    from otafl.report.plot import plot as drawn

    with contextlib.suppress(OtaflError):
        drawn(runs, **options).save(file)
        print(f"figure {file}")


@app.command()
def tune(
    file: Annotated[str, typer.Argument(metavar="SWEEP.toml", help="A sweep file with a section [tune].")],
    overrides: Overrides = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    workers: Workers = None,
    together: Together = 1,
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = 0.0,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the runs; default sweeps/NAME-tune.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the runs, and do nothing.")] = False,
    plugin: Plugins = None,
) -> int:
    """Choose hyper-parameters on the validation set, by the same rule and budget for every method."""
    from otafl.studies.sweep import load_sweep

    _check_out(out)
    asked = load_sweep(file, _parsed(overrides))

    from otafl.studies import tune as tuning
    from otafl.studies.conduct import Executor

    if dry_run:
        print(tuning.plan(asked, file))
        return 0
    folder = Path(out) if out is not None else Path("sweeps") / f"{asked.name}-tune"
    found = tuning.tune(
        asked, folder, file, device=device, executor=Executor(executor, workers, together, address, cpus, gpus)
    )
    table, chosen = tuning.write(found, asked, folder)
    for group, point in found.chosen.items():
        where = ", ".join(str(value) for _, value in group) or asked.name
        best = ", ".join(f"{axis} = {value}" for axis, value in point.values)
        score = "nothing to choose" if math.isnan(point.score) else f"validation {point.score:.2f} %"
        print(f"{where:<28} {best:<48} {score}")
    for warning in found.warnings:
        print(f"otafl: {warning}", file=sys.stderr)
    print(f"table  {table}\nchosen {chosen}\nnext   otafl sweep {file} --chosen {chosen}")
    return found.status


@app.command()
def compare(
    runs: RunNames,
    label: Labels = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The run that the others are compared with; default: the first.")
    ] = None,
    per: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS", help="Compare runs with different values of an axis or key apart; may be repeated."
        ),
    ] = None,
    level: Annotated[float | None, typer.Option(help="Test accuracy in percent for 'rounds to reach'.")] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="COLUMN=VALUE",
            help="Compare at equal cost: uplink_s=600 (airtime), joules=0.1, uses=1e9, time=3600, rounds=300.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    plugin: Plugins = None,
) -> None:
    """Compare finished runs: levels, paired differences by seed, and what cannot be told."""
    from otafl.report.compare import compare as compared

    if level is not None and not 0 <= level <= 100:
        raise ConfigError(f"--level {level:g}: give an accuracy in percent")
    table = compared(runs, baseline, label, per, level, at)
    print(table.markdown() if markdown else table)


@app.command()
def plot(
    runs: RunNames,
    x: Annotated[
        str,
        typer.Option(
            "-x",
            help="rounds, uses (of the channel), seconds (of airtime), joules, time (of the world), or a column; "
            "or an axis of a sweep, for instance cell.radius_m.",
        ),
    ] = "rounds",
    y: Annotated[str, typer.Option("-y", help="A column of metrics.csv.")] = "test_accuracy",
    out: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="A .pdf, .png or .svg; the numbers go beside it as .csv."),
    ] = "plot.pdf",
    label: Labels = None,
    width: Annotated[str, typer.Option(help="single (a column of a journal), or double.")] = "single",
    title: Annotated[str, typer.Option(help="A line above the axes.")] = "",
    log: Annotated[bool, typer.Option("--log", help="A logarithmic y axis.")] = False,
    log_x: Annotated[bool, typer.Option("--log-x", help="A logarithmic x axis.")] = False,
    bottom: Annotated[float | None, typer.Option(help="Where the y axis begins.")] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="COLUMN=VALUE", help="Over an axis: after a budget, seconds=600 or joules=0.1."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Draw curves of finished runs for a paper: vector fonts, column widths, colours for any vision."""
    _check_out(out)
    from otafl.report.plot import plot as drawn

    picture = drawn(runs, x, y, label, width, title, log, bottom, at, log_x)
    for file in picture.save(out):
        print(file)


@app.command()
def report(
    runs: RunNames,
    label: Labels = None,
    out: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")
    ] = "report.html",
    plugin: Plugins = None,
) -> None:
    """Write one HTML page about finished runs that opens offline."""
    _check_out(out)
    from otafl.report.page import report as page
    from otafl.report.runs import collect
    from otafl.runs.directory import publish

    found = collect(runs, label)
    text = page(found).encode(errors="replace")
    publish(Path(out), text)
    print(f"{out}: {len(found)} runs, {len(text) / 1e6:.1f} MB")


@app.command()
def theory(
    config: Source,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A finished run of it, to be shown beside.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(metavar="FILE", help="The figure that a run gets.")] = "theory.png",
    plugin: Plugins = None,
) -> None:
    """Show what the paper's analysis says about a configuration, term by term, and beside it what a run measured."""
    _check_out(out)
    from otafl.config.schema import load_config

    chosen = load_config(config, _parsed(overrides))

    import torch

    from otafl.papers.fedoag.theory.account import account
    from otafl.runs.directory import same_sources
    from otafl.runs.identity import sources
    from otafl.runs.result import read_run
    from otafl.simulation.build import Simulation

    result = read_run(run) if run is not None else None
    if result is not None and result.config.digest != chosen.digest:
        raise ConfigError(f"{run}: was made by another configuration; give its own, {run}/config.toml")
    other = None if result is None else same_sources(result.summary.get("sources"), sources(chosen))
    if other is not None:
        raise ConfigError(f"{run}: was made with {other}")
    sim = Simulation(chosen.replace({"experiment.seeds": [chosen.experiment.seeds[0]]}), torch.device("cpu"))
    found = account(sim, result, say)
    print(found.words)
    for symbol, value, text in found.rows:
        print(f"{symbol:<16} {value:>10}  {text}")
    for warning in found.warnings:
        print(f"otafl: {warning}", file=sys.stderr)
    if result is not None:
        from otafl.papers.fedoag.theory.figures import beside_bounds

        print(f"figure {beside_bounds(found, result, Path(out))}")


@app.command()
def check(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method: see 'otafl list algorithms'; or a law, fading.NAME.")
    ],
    overrides: Overrides = None,
    plugin: Plugins = None,
) -> int:
    """Check that a method, built in or your own, keeps the rules of all methods, or that a fading law is as it says."""
    from otafl import registry
    from otafl.conformance import check as examine, knowledge_line
    from otafl.laws import check_fading

    chosen = _parsed(overrides)
    kind, _, law = method.rpartition(".")
    if method in registry.names("fading") and method not in registry.names("algorithms"):
        raise ConfigError(f"{method}: is a law of fading; otafl check fading.{method}")
    if kind != "fading":
        print(f"{method} {knowledge_line(method, chosen)}")
    failed = noted = 0
    for name, verdict, text in check_fading(law, chosen) if kind == "fading" else examine(method, chosen):
        print(f"  {verdict:<5} {name:<9} {text}", flush=True)
        failed += verdict == "FAIL"
        noted += verdict == "note"
    plural = "s" if failed > 1 else ""
    notes = f", {noted} note{'s' if noted > 1 else ''}" if noted else ""
    print(f"{method}: {f'{failed} check{plural} failed' if failed else 'passed'}{notes}")
    return FAILED_STATUS if failed else 0


def _check_out(out: str | None) -> None:
    """Refuse an empty --out, which an unset shell variable gives, and one that is not valid UTF-8."""
    if out is not None and not out.strip():
        raise ConfigError("--out is empty; name a directory")
    if out is not None and not out.isascii() and any("\ud800" <= c <= "\udfff" for c in out):
        raise ConfigError("--out: is no valid UTF-8; choose another name")


def _parsed(overrides: list[str] | None) -> dict[str, Any]:
    """The overrides that `--set` gives."""
    from otafl.config.schema import parse_override

    return dict(parse_override(text) for text in overrides or [])


@app.command("list")
def list_(
    kind: Annotated[
        str, typer.Argument(help="algorithms, fading, mobility, pathloss, datasets, models, presets or sweeps.")
    ] = "",
    plugin: Plugins = None,
) -> None:
    """List what a configuration can choose."""
    from otafl import registry

    kinds = [*registry.BUILTIN, "presets", "sweeps"]
    if kind and kind not in kinds:
        raise ConfigError(f"list {kind!r}: unknown{registry.nearest(kind, kinds)}; choose from {', '.join(kinds)}")
    for shown in [kind] if kind else kinds:
        if not kind:
            print(f"{shown}:")
        if kind == "algorithms":
            _list_algorithms()
            continue
        for name, text in _entries(shown):
            print(f"  {name:<18} {text}")


def _list_algorithms() -> None:
    """Print all methods with their channel knowledge, as in the paper's Table 1."""
    from otafl.papers.fedoag.table1 import known

    print(f"  {'':<16} {'channel h_i':^16} {'statistics Λ_i':^16}")
    print(f"  {'':<16} {'server':^8}{'device':^8} {'server':^8}{'device':^8} {'fading':<18}")
    for name, text in _entries("algorithms"):
        try:
            marks, fading = known(name)
        except OtaflError as error:
            print(f"  {name:<16} {error}")
            continue
        cells = [f"{mark if mark != '×' else '·':^8}" for mark in marks]
        print(f"  {name:<16} {cells[0]}{cells[1]} {cells[2]}{cells[3]} {fading:<18} {text}")


@app.command()
def config(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[PRESET|FILE]", help="A preset, or a TOML file.", autocompletion=complete.configurations
        ),
    ] = "stationary",
    overrides: Overrides = None,
    plugin: Plugins = None,
) -> None:
    """Show a whole configuration: every key with its value, where that came from, its meaning and range.

    The output is a configuration file: otafl config quick > my.toml
    """
    from otafl.config.keys import explained

    print(explained(source, _parsed(overrides)))


@app.command()
def describe(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC",
            help="A section (fading), a key (training.lr), a part (fading.rician), or a preset.",
            autocompletion=complete.topics,
        ),
    ],
    plugin: Plugins = None,
) -> None:
    """Describe one part of a configuration: what it is, its keys, their defaults and ranges."""
    from otafl.config.keys import describe as described

    print(described(topic))


@app.command()
def reproduce(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="fig1 … fig5, table1, claims, ablation, methods, norms, tradeoff, or all; "
            "adaptive, anchors, speedup, tails, or open: what the paper leaves open.",
        ),
    ],
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small model, 100 rounds, 2 seeds: minutes on a laptop.")
    ] = False,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Default reproduction, or reproduction-quick.")] = None,
    device: Device = "auto",
    executor: ExecutorName = "local",
    workers: Workers = None,
    together: Together = 1,
    address: Address = None,
    cpus: Cpus = 1.0,
    gpus: Gpus = 0.0,
) -> int:
    """Reproduce the paper's figures and tables, and compare with its claims; the same command continues."""
    if what == ["table1"] and out is None:
        from otafl.papers.fedoag.table1 import table1

        print(table1())
        return 0
    _check_out(out)
    from otafl.papers.fedoag.reproduce import reproduce as make
    from otafl.studies.conduct import Executor

    started = time.monotonic()
    folder = Path(out) if out is not None else Path("reproduction-quick" if quick else "reproduction")
    changes = _parsed(overrides)
    drawn = make(
        what, folder, quick, changes, device=device, executor=Executor(executor, workers, together, address, cpus, gpus)
    )
    if drawn.files:
        print("\n".join(str(path) for path in drawn.files))
        print(f"done in {time.monotonic() - started:.0f} s")
    return drawn.status


def _entries(kind: str) -> list[tuple[str, str]]:
    from otafl import registry

    if kind == "presets":
        from otafl.config.presets import PRESETS

        return [(name, preset.summary) for name, preset in PRESETS.items()]
    if kind == "sweeps":
        from otafl.studies.examples import EXAMPLES

        return [(name, file.read_text(encoding="utf-8").splitlines()[0].strip("# ")) for name, file in EXAMPLES.items()]
    return [(name, registry.summary(kind, name)) for name in registry.names(kind)]


@data_app.command("list")
def data_list() -> None:
    """List data sets and where their files are."""
    from otafl import registry
    from otafl.world.cifar import DOWNLOADS

    for name in registry.names("datasets"):
        if name not in DOWNLOADS:
            print(f"  {name:<18} ready, no files needed")
            continue
        found = DOWNLOADS[name].locate()
        place = next(iter(found.values())).parent if found else None
        print(f"  {name:<18} {f'in {place}' if place else f'not here; otafl data get {name}'}")


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100.")]) -> None:
    """Find or download a data set's files and verify them."""
    from otafl import registry
    from otafl.world.cifar import DOWNLOADS

    if name not in DOWNLOADS:
        if name in registry.names("datasets"):
            print(f"{name} needs no files")
            return
        raise ConfigError(
            f"data get {name!r}: unknown{registry.nearest(name, DOWNLOADS)}; there are {', '.join(DOWNLOADS)}"
        )
    print(f"{name}: verified in {DOWNLOADS[name].fetch()}")


@app.command()
def doctor() -> None:
    """Show what is installed, which compute devices there are and where data is."""
    import importlib.metadata
    import importlib.util
    import platform

    import torch

    from otafl.world.cifar import DOWNLOADS
    from otafl.world.files import data_directory

    print(f"otafl {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("torch", "numpy", "scipy", "pydantic", "safetensors", "typer", "rich"):
        print(f"  {package:<12} {importlib.metadata.version(package)}")
    for package, extra in (("matplotlib", "plot"), ("pillow", "images"), ("pyarrow", "parquet")):
        missing = importlib.util.find_spec({"pillow": "PIL"}.get(package, package)) is None
        state = f"missing: pip install otafl[{extra}]" if missing else importlib.metadata.version(package)
        print(f"  {package:<12} {state}")
    print(f"  CPU          {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory_gib = torch.cuda.get_device_properties(index).total_memory / 2**30
            print(f"  CUDA         {torch.cuda.get_device_name(index)}, {memory_gib:.0f} GiB")
    else:
        print("  CUDA         none; runs use the CPU")
    for package in ("triton", "pandas", "ray", "optuna", "sionna"):
        there = importlib.util.find_spec(package) is not None
        named = {"sionna": "sionna-no-rt"}.get(package, package)
        print(f"  {package:<12} {importlib.metadata.version(named) if there else 'not installed (optional)'}")
    kernels = (
        "on this GPU" if torch.cuda.is_available() and importlib.util.find_spec("triton") else "need a GPU and Triton"
    )
    print(f"  engines      preactivation, threads, batched, reference; layers (convolutions): {kernels}")
    source = "OTAFL_DATA" if os.environ.get("OTAFL_DATA") else "default; OTAFL_DATA changes it"
    print(f"  data         {data_directory()} ({source})")
    damaged: OtaflError | None = None
    for name, files in DOWNLOADS.items():
        try:
            state = "verified" if files.locate() is not None and files.read() else f"not here; otafl data get {name}"
        except OtaflError as error:
            state, damaged = "damaged", error
        print(f"  {name:<12} {state}")
    if damaged is not None:
        raise damaged


def parse_seeds(text: str) -> list[int]:
    """Parse seeds that are written as `0-4` or `0,2,5`."""
    from otafl.config.schema import MOST_SEEDS

    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            start, stop = int(first), int(last if dash else first)
            if stop < start:
                raise ConfigError(f"--seeds {text}: {part} names no seed; write it as {stop}-{start}")
            if stop - start >= MOST_SEEDS:
                raise ConfigError(f"--seeds {text}: more than {MOST_SEEDS} seeds; split them over several runs")
            seeds += range(start, stop + 1)
    except ValueError:
        raise ConfigError(f"--seeds {text}: write seeds as 0-4 or 0,2,5") from None
    return seeds


if __name__ == "__main__":
    main()
