"""The house keeps its rooms: who imports whom, where noise and seeds live, what each module says of itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "otafl"
MODULES = sorted(SOURCE.rglob("*.py"))
# data flows down: a room imports only from rooms above it, and from its own
ROOMS = [
    ["errors", "_version"],
    ["units", "registry", "random", "disk", "signals", "terminal"],
    ["gpu"],
    ["world"],
    ["doors"],
    ["radio"],
    ["engine"],
    ["core"],
    ["algorithms"],
    ["config"],
    ["runs"],
    ["simulation"],
    ["conformance", "report", "complete"],
    ["laws"],
    ["studies"],
    ["papers"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FACADE = SOURCE / "__init__.py"  # names anything, when it is asked for


def module_of(path: Path) -> str:
    return ".".join(("otafl", *path.relative_to(SOURCE).with_suffix("").parts))


KNOWN = {module_of(path): path for path in MODULES}


def imports(nodes: list[ast.stmt]) -> set[str]:
    """Modules of otafl that some statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "otafl":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & KNOWN.keys()) or {str(node.module)}
    return found


BODIES = {name: ast.parse(path.read_text(encoding="utf-8")).body for name, path in KNOWN.items()}
IMPORTS = {name: imports(body) for name, body in BODIES.items()}
"""Modules that each module imports as it is loaded; imports inside functions are not among them."""
TYPES = {
    name: imports([i for node in body if isinstance(node, ast.If) for i in node.body]) for name, body in BODIES.items()
}
"""Modules that it imports for its annotations only."""


@pytest.mark.parametrize("name", [module_of(path) for path in MODULES if path != FACADE])
def test_imports_flow_down(name: str) -> None:
    mine = name.split(".")[1]
    for module in IMPORTS[name] | TYPES[name]:
        theirs = module.split(".")[1]
        assert theirs == mine or LEVEL[theirs] < LEVEL[mine], f"{mine} must not import {module}"


def test_no_module_imports_itself_by_a_detour() -> None:
    """Depth first over the imports; a module that is met again on its own way closes a cycle."""
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " imports ".join((*way[way.index(name) :], name))
        if name not in done:
            for module in sorted(IMPORTS.get(name, ())):
                visit(module, (*way, name))
            done.add(name)

    for name in IMPORTS:
        visit(name, ())
    assert len(done) >= len(MODULES)


@pytest.mark.parametrize(
    "path", [m for m in MODULES if m.name not in ("__init__.py", "_version.py")], ids=lambda p: p.stem
)
def test_every_module_says_what_it_knows(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert re.search(r"^Knows: ", doc, re.MULTILINE), path
    assert re.search(r"^Does not know: ", doc, re.MULTILINE), path


def lines_with(pattern: str) -> set[str]:
    return {str(path.relative_to(SOURCE)) for path in MODULES if re.search(pattern, path.read_text(encoding="utf-8"))}


def test_one_place_for_each_thing() -> None:
    assert lines_with(r"SeedSequence|default_rng|np\.random\.seed") == {"random.py"}
    assert lines_with(r"manual_seed") == {"radio/noise.py", "engine/models.py", "doors/sionna.py"}  # from keys
    assert lines_with(r"\.normal_\(|torch\.randn") == {"radio/noise.py"}
    assert lines_with(r"log10") == {"units.py", "world/tr38901.py"}  # whose tables are in decibels
    assert lines_with(r"for t in range\(") == {
        "simulation/run.py",
        "conformance.py",
        "world/process.py",
        "world/mobility.py",
    }


def test_the_page_for_contributors_shows_the_rooms_as_they_are() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[\w]+`(?:, )?)+) \|", page, re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == ROOMS


def test_the_way_of_a_run_visits_files_that_are_there_each_once() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    way = re.findall(r"^\d+\. `([\w/]+\.py)` ", page.split("## The way of a run")[1], re.MULTILINE)
    assert len(way) == len(set(way)) >= 15
    assert [name for name in way if not (SOURCE / name).is_file()] == []
    for name in re.findall(r"`(src/otafl/[\w/]+\.(?:py|toml))`", page):
        assert (ROOT / name).is_file() or "NAME" in name, name


def test_methods_are_short_and_nothing_is_homeless() -> None:
    for path in (SOURCE / "algorithms").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 150, path
    assert not [path for path in MODULES if path.stem in ("utils", "util", "misc", "common", "helpers")]


def test_importing_otafl_loads_no_extra() -> None:
    script = (
        "import sys, otafl, otafl.simulation.run\n"
        "loaded = {'matplotlib', 'sklearn', 'ray', 'sionna', 'flwr'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions_agree() -> None:
    from otafl import __version__

    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_fedoag_is_read_in_350_lines_without_a_machine_in_them() -> None:
    """The method and what it needs for being understood, besides the contract and lists of arguments."""
    parts = ("fedoag", "parts/gossip", "parts/threshold", "parts/truncated")
    files = [SOURCE / "algorithms" / f"{name}.py" for name in parts]
    files.append(SOURCE / "engine" / "devices.py")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(r'\n\n +(Args|Returns|Raises):\n.*?(?=""")', "", text, flags=re.DOTALL)
    assert text.count("\n") <= 350
    assert not re.search(r"\b(gpu|cuda|cpu|triton|kernels?|graph)\b", text, re.IGNORECASE)
    for path in (SOURCE / "algorithms").glob("*.py"):
        assert not re.search(r"gpu|triton|donat|static:", path.read_text(encoding="utf-8"), re.IGNORECASE), path


def test_the_contract_has_every_name_that_is_looked_for() -> None:
    """What the library asks of a method by name is in the Protocols."""
    from otafl.core.contract import Algorithm, Foresight

    asked: set[str] = set()
    pattern = r"(?:getattr|hasattr|getattr_static)\(\s*(?:type\()?[\w.]*algorithm(?:\.spec)?\)?, \"(\w+)\""
    for path in SOURCE.rglob("*.py"):
        asked |= set(re.findall(pattern, path.read_text(encoding="utf-8")))
    assert {"knowledge", "plan", "active", "ideal_radio"} <= asked
    said = {name for one in (Algorithm, Foresight) for name in (*one.__annotations__, *vars(one))}
    assert asked <= said


def test_prose_is_at_most_100_columns_wide() -> None:
    """Pages are read in terminals and in diffs; tables and code may be wider."""
    wide = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        code = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > 100 and not code and not line.startswith(("|", "    ")):
                wide.append(f"{page.relative_to(ROOT)}:{number}")
    assert wide == []


def test_a_run_is_read_without_the_simulator() -> None:
    script = "import sys, otafl.runs.result\nsys.exit('loaded' if 'otafl.simulation' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
