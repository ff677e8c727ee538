"""The paper's Table 1, who needs which channel knowledge, made from the methods' declarations.

Knows: declarations, the printed table.
Does not know: results.
"""

from otafl import registry
from otafl.errors import PluginError
from otafl.radio.knowledge import Knowledge
from otafl.report.markdown import markdown

COLUMNS = ("h, server", "h, devices", "Λ, server", "Λ, devices", "fading")
# printed row, and the methods it speaks of; ✓ and × in the order of COLUMNS
PRINTED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Ours (FedOAG)", "×✓××", "arbitrary", ("fedoag", "fedoag-plus", "fedoag-zero")),
    ("SCA", "×✓✓×", "Rayleigh", ("sca",)),
    ("Vanilla OTA", "✓✓××", "arbitrary", ("vanilla",)),
    ("BB methods", "×✓✓✓", "Rayleigh", ("bb-interior", "bb-alternative")),
    ("OPC/LCPC methods", "✓✓✓×", "Rayleigh", ("opc", "lcpc")),
    ("Air-FEEL", "×✓✓×", "block", ("air-feel",)),
)
NOTES = {
    "bb-interior": "devices are told γ and need no Λ_i in the form `energy`; in the form `fading` they do",
    "bb-alternative": "as bb-interior",
    "opc": "optimises each round for its channels: needs h_i at the server, no statistics, any fading",
    "lcpc": "one constant from statistics: needs Λ_i at the server, no h_i there",
}


def known(name: str) -> tuple[str, str]:
    """What a method knows of the channel, as marks, and its fading; for the library's own without loading it."""
    return registry.channel(name) or (marks(declared(name)), declared(name).fading)


def declared(name: str) -> Knowledge:
    """What a method declares to know of the channel."""
    knowledge = getattr(registry.lookup("algorithms", name), "knowledge", None)
    if not isinstance(knowledge, Knowledge):
        raise PluginError(f"algorithm {name}: declares no knowledge")
    return knowledge


def marks(knowledge: Knowledge) -> str:
    """✓ or × for h at the server and the devices, statistics at the server and the devices.

    Part of h is marked as such: Σ where the server knows the sum of all, ∠ where a device knows its phase.
    """
    statistics = {"mean_gain", "distance_m"}
    instantaneous = [
        "✓" if {"h", "h_each"} & side else "Σ" if "sum_h" in side else "∠" if "phase" in side else "×"
        for side in (knowledge.server, knowledge.device)
    ]
    known = ["✓" if statistics & side else "×" for side in (knowledge.server, knowledge.device)]
    return "".join([*instantaneous, *known])


def table1() -> str:
    """Table 1 as Markdown: a row per method, and the printed row where it differs."""
    rows: list[tuple[str, ...]] = []
    notes = []
    for printed, cells, fading, methods in PRINTED:
        for name in methods:
            mine, own = known(name)
            if mine == cells and own.split(",")[0] == fading:
                same = "the same"
            else:
                same = f"{printed}: {' '.join(cells)} {fading}"
                notes.append(f"- {name}: {NOTES[name]}")
            rows.append((name, *mine, own, same))
    table = markdown(("method", *COLUMNS, "printed"), rows)
    return "\n".join([table, "", "Where a row differs from the printed one:", *notes])
