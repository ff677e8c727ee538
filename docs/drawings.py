"""Draws the concept figures of the documentation into docs/images: `python docs/drawings.py` from the root."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse, FancyArrowPatch, FancyBboxPatch, Rectangle

IMAGES = Path(__file__).parent / "images"
INK, GREY, SILVER, PALE, WHITE = "#222222", "#666666", "#B0B0B0", "#F3F3F3", "#FFFFFF"
# Okabe and Ito's palette, which can be told apart with any colour vision; AMBER is its orange, darker for text.
BLUE, ORANGE, GREEN, RED, SKY, PINK, AMBER = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#A87400"
PALE_BLUE, PALE_ORANGE, PALE_GREEN = "#E3F0F8", "#FDF3DC", "#E0F3ED"
DASHES, SHORT_DASHES = (0, (4, 3)), (0, (3, 2))
FONT = {"font.family": "DejaVu Sans", "font.size": 9.5, "mathtext.fontset": "dejavusans", "text.color": INK}
STYLE = FONT | {"svg.fonttype": "path", "svg.hashsalt": "otafl", "axes.titlesize": 10, "axes.titleweight": "bold"}
Line = str | tuple[int, tuple[int, int]]
Point = tuple[float, float]


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A white figure of this size in inches; its one pair of axes has the same unit."""
    figure = Figure(figsize=(width, height), facecolor=WHITE)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, color: str = INK, bold: bool = False, ha: str = "center") -> None:
    """Text around this height."""
    y, va = (y, "center") if "\n" in text else (y - 0.048, "baseline")
    axes.text(x, y, text, color=color, weight="bold" if bold else "normal", ha=ha, va=va, linespacing=1.4, zorder=8)


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str, edge: str, face: str = WHITE) -> None:
    """A rounded box from its lower left corner, with text in its middle; dashed if its edge is grey."""
    shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.07", ec=edge, fc=face, lw=1.2, zorder=3)
    shape.set_linestyle(DASHES if edge == GREY else "-")
    axes.add_patch(shape)
    write(axes, x + w / 2, y + h / 2, text, GREY if edge == GREY else INK)


def arrow(axes: Axes, start: Point, end: Point, color: str, width: float, bend: float = 0, line: Line = "-") -> None:
    """An arrow, or a line without a head if it has long dashes; `bend` curves it."""
    style = "-" if line == DASHES else f"-|>,head_length={3 + width},head_width={1.2 + 0.6 * width}"
    how = {"arrowstyle": style, "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 1}
    axes.add_patch(FancyArrowPatch(start, end, color=color, lw=width, linestyle=line, zorder=4, **how))


def badge(axes: Axes, x: float, y: float, number: int, color: str) -> None:
    """A step's number in a disc."""
    axes.add_patch(Circle((x, y), 0.14, fc=color, ec=WHITE, lw=1.2, zorder=7))
    write(axes, x, y, str(number), WHITE, bold=True)


def system() -> Figure:
    """The system at one glance."""
    figure, axes = canvas(9.0, 4.2)
    axes.add_patch(Ellipse((4.5, 1.87), 8.85, 3.4, fc="#F3F7FA", ec="#9FB4C4", lw=1.2, linestyle=DASHES, zorder=0))
    write(axes, 0.78, 1.3, "cell", GREY)
    for number, (x, data) in enumerate(((1.1, "9251"), (2.75, "1834"), (6.25, "3419"), (7.9, "2395")), start=1):
        ink, edge = (INK, BLUE) if number < 4 else (GREY, GREY)
        box(axes, x - 0.56, 1.55, 1.12, 0.8, "", edge)
        write(axes, x, 2.15, f"device {number}", ink, bold=number < 4)
        write(axes, x + 0.22, 1.8, "own\ndata", ink)
        for k, color in enumerate((ORANGE, SKY, GREEN, PINK) if number < 4 else (SILVER,) * 4):
            axes.add_patch(Rectangle((x - 0.45 + 0.11 * k, 1.63), 0.09, 0.04 * int(data[k]), color=color, zorder=5))
        if number > 1:
            badge(axes, x - 0.56, 2.35, 1, BLUE)
    write(axes, 7.9, 1.38, "weak channel: silent", GREY)
    arrow(axes, (1.1, 2.37), (4.23, 3.14), ORANGE, 2.4, -0.16)
    arrow(axes, (2.75, 2.37), (4.27, 2.96), ORANGE, 2.4, -0.1)
    arrow(axes, (6.25, 2.37), (4.73, 2.96), ORANGE, 2.4, 0.1)
    arrow(axes, (7.9, 2.37), (6.33, 3.0), GREY, 1.6, 0.1, DASHES)
    axes.plot([6.25], [3.02], "x", color=GREY, ms=8, mew=2)
    axes.add_patch(Circle((4.5, 3.08), 0.25, fc=PALE_ORANGE, ec=ORANGE, lw=2, zorder=5))
    write(axes, 4.5, 3.08, "Σ", bold=True)
    write(axes, 4.5, 3.87, "noise", RED)
    arrow(axes, (4.5, 3.73), (4.5, 3.35), RED, 1.6)
    arrow(axes, (4.5, 2.82), (4.5, 2.08), ORANGE, 3.4)
    mast = (4.3, 4.5, 4.7, 4.65, 4.35, 4.4, 4.6), (0.93, 1.93, 0.93, 1.18, 1.18, 1.43, 1.43)
    axes.plot(*mast, color=INK, lw=1.8, marker="o", markevery=[1], ms=8, zorder=5)
    box(axes, 4.1, 0.55, 0.8, 0.38, "server", INK, PALE_GREEN)
    arrow(axes, (4.08, 0.84), (2.75, 1.53), GREEN, 2.0, -0.18)
    arrow(axes, (4.08, 0.66), (1.1, 1.53), GREEN, 2.0, -0.26)
    arrow(axes, (4.92, 0.84), (6.25, 1.53), GREEN, 2.0, 0.18)
    steps = (
        (0.15, 0.12, 1.8, 0.54, 2.35, BLUE, "train locally,\nall devices"),
        (0.15, 3.5, 2.35, 2.1, 2.85, AMBER, "transmit at once, if |h|\nis above the threshold"),
        (6.0, 3.5, 2.85, 4.76, 2.45, RED, "the server hears the noisy\nsum, and rebuilds the model"),
        (5.6, 0.12, 3.25, 5.72, 1.08, GREEN, "at the end of the round: new model\nback to those that transmitted"),
    )
    for number, (x, y, w, there_x, there_y, color, text) in enumerate(steps, start=1):
        box(axes, x, y, w, 0.58, "", color)
        write(axes, x + 0.47, y + 0.29, text, ha="left")
        badge(axes, x + 0.24, y + 0.29, number, color)
        badge(axes, there_x, there_y, number, color)
    return figure


def one_round() -> Figure:
    """One FedOAG round as a timeline."""
    figure, axes = canvas(11.6, 5.5)
    lanes = (("device\nthat is\nsilent", PALE), ("device\nthat is\nactive", PALE_BLUE), ("air,\nnoise z", PALE_ORANGE))
    for k, (name, face) in enumerate((*lanes, ("server", PALE_GREEN))):
        axes.add_patch(Rectangle((0.15, 3.9 - 1.15 * k), 11.3, 1.0, color=face, lw=0, zorder=0))
        write(axes, 0.62, 4.4 - 1.15 * k, name, bold=True)
    places = ((1.45, "train"), (3.2, "report"), (4.5, "announce"), (6.0, "uplink"), (7.8, "update"))
    for number, (x, name) in enumerate((*places, (9.5, "broadcast at the end")), start=1):
        badge(axes, x, 5.18, number, BLUE)
        write(axes, x + 0.22, 5.18, name, bold=True, ha="left")
    for y in (4.05, 2.9):
        box(axes, 1.2, y, 1.5, 0.7, "$s$ local steps\n$x_i \\rightarrow \\tilde{x}_i$", BLUE)
        arrow(axes, (2.7, y + 0.35), (3.03, y + 0.35), BLUE, 1.6)
    box(axes, 3.05, 4.05, 1.5, 0.7, "$|h_i| < \\gamma/\\sqrt{d E_s}$:\nstays silent", GREY)
    arrow(axes, (4.55, 4.4), (9.6, 4.4), GREY, 1.6, 0, DASHES)
    box(axes, 9.6, 4.05, 1.75, 0.7, "goes on from $\\tilde{x}_i$,\nkeeps its anchor", GREY)
    box(axes, 3.05, 2.9, 1.5, 0.7, "$|h_i| \\geq \\gamma/\\sqrt{d E_s}$:\nreports $\\Vert\\Delta_i\\Vert$", BLUE)
    arrow(axes, (3.8, 2.9), (3.8, 1.33), INK, 1.4, 0, SHORT_DASHES)
    write(axes, 2.85, 2.1, "one scalar from\neach active device\n$i \\in A$, error-free")
    box(axes, 3.05, 0.6, 2.4, 0.7, "$B_t = \\max_{i\\in A}\\ \\Vert\\Delta_i\\Vert$", GREEN)
    arrow(axes, (5.15, 1.3), (5.15, 2.87), INK, 1.4, 0, SHORT_DASHES)
    write(axes, 4.5, 2.1, "$B_t$, to\nthe active")
    box(axes, 4.75, 2.9, 2.55, 0.7, "$\\hat{x}_i = (\\gamma/h_i)\\ \\Delta_i/B_t$", BLUE)
    arrow(axes, (6.6, 2.9), (6.6, 2.48), ORANGE, 3.2)
    arrow(axes, (7.9, 2.98), (7.9, 2.48), ORANGE, 3.2)
    write(axes, 8.45, 3.25, "other active devices,\nat the same time")
    heard = "$y = \\Sigma_{i\\in A}\\, h_i\\hat{x}_i + z$\n$= \\Sigma_{i\\in A}\\, \\gamma\\Delta_i/B_t + z$"
    box(axes, 5.6, 1.75, 3.0, 0.7, heard, ORANGE)
    arrow(axes, (7.1, 1.75), (7.1, 1.33), ORANGE, 3.2)
    update = "$x^{t+1} = \\eta_t\\, B_t\\, y/(\\gamma |A|)$\n+ mean of the active devices' anchors"
    box(axes, 5.65, 0.6, 3.75, 0.7, update, GREEN)
    axes.plot([9.4, 10.48, 10.48], [0.95, 0.95, 2.7], color=GREEN, lw=2.4, zorder=2)
    arrow(axes, (10.48, 2.6), (10.48, 2.87), GREEN, 2.4)
    write(axes, 9.6, 2.1, "$x^{t+1}$, to the\nactive only")
    box(axes, 9.6, 2.9, 1.75, 0.7, "model and anchor\n$\\leftarrow x^{t+1}$", BLUE)
    arrow(axes, (1.2, 0.22), (11.35, 0.22), GREY, 1.2)
    write(axes, 0.62, 0.22, "time", GREY)
    return figure


def side(axes: Axes, x: float, name: str, color: str, face: str, known: str, unknown: str) -> None:
    """What one side knows, and what it does not know."""
    box(axes, x, 2.45, 3.1, 2.95, "", color, face)
    write(axes, x + 1.55, 5.15, name, bold=True)
    for y, title, shade, text in ((4.8, "knows", color, known), (3.42, "does not know", RED, unknown)):
        write(axes, x + 0.18, y, title, shade, bold=True, ha="left")
        for k, line in enumerate(text.split("\n")):
            write(axes, x + 0.18, y - 0.26 - 0.23 * k, line, ha="left")


def knowledge() -> Figure:
    """Who knows what in FedOAG, and what the library lets a method read."""
    figure, axes = canvas(10.0, 5.6)
    own = "its own channel $h_i$ in this round\nits own data, model and anchor\nits innovation $\\Delta_i$"
    others = "the channels of other devices\nchannel statistics, even its own $\\Lambda_i$"
    side(axes, 0.2, "device $i$", BLUE, PALE_BLUE, own, others)
    heard = "who is active, and the norms $\\Vert\\Delta_i\\Vert$\nthe noisy sum $y$\nwhich anchor each device holds"
    side(axes, 6.7, "server", GREEN, PALE_GREEN, heard, "any channel $h_i$\nchannel statistics, any $\\Lambda_i$")
    report, model = "norm $\\Vert\\Delta_i\\Vert$: a scalar, error-free", "new model, to the active only"
    for k, text in enumerate((report, "largest norm $B_t$", "analog sum, with noise", model)):
        y, ends = 4.9 - 0.7 * k, (3.34, 6.66) if k % 2 == 0 else (6.66, 3.34)
        color, width, line = ((INK, 1.4, SHORT_DASHES), (ORANGE, 3.2, "-"), (GREEN, 2.2, "-"))[max(k - 1, 0)]
        arrow(axes, (ends[0], y), (ends[1], y), color, width, 0, line)
        write(axes, 5.0, y + 0.2, text)
    write(axes, 0.2, 2.08, "What otafl lets a method read in a round", bold=True, ha="left")
    views = (
        (BLUE, "round.device", "channel quantities declared\nfor devices, each its own;\nFedOAG: h"),
        (GREEN, "round.server", "channel quantities declared\nfor the server;\nFedOAG: none"),
        (INK, "round.report", "one real number from each\ndevice, error-free, counted,\nat most eight a round"),
        (ORANGE, "round.uplink", "what the server hears:\nthe sum, with noise; the\nenergy limit is checked"),
    )
    for k, (edge, name, text) in enumerate(views):
        box(axes, 0.2 + 2.42 * k, 0.65, 2.34, 1.2, "", edge)
        write(axes, 1.37 + 2.42 * k, 1.63, name, bold=True)
        write(axes, 1.37 + 2.42 * k, 1.1, text)
    write(axes, 5.0, 0.32, "Reading a channel quantity that was not declared raises an InformationError.", GREY)
    return figure


def inversion() -> Figure:
    """Truncated channel inversion: amplitudes over that of the channel, in units of the threshold."""
    figure = Figure(figsize=(9.6, 3.9), facecolor=WHITE)
    sent, received = figure.add_axes((0.085, 0.17, 0.395, 0.71)), figure.add_axes((0.585, 0.17, 0.395, 0.71))
    strong = [1 + 0.01 * k for k in range(301)]
    for axes in (sent, received):
        axes.axvspan(0, 1, color=PALE, zorder=0)
        for norm, color, line, name in ((1.0, BLUE, "-", "B"), (0.5, ORANGE, (0, (5, 2)), "B/2")):
            heights = [norm / h if axes is sent else norm for h in strong]
            label = f"$\\Vert\\Delta_i\\Vert = {name}$"
            axes.plot(strong, heights, color=color, lw=2.2, linestyle=line, marker="o", markevery=[0], label=label)
        axes.plot([0, 1], [0, 0], color=GREY, lw=2.6, marker="o", markevery=[1], mfc=WHITE, clip_on=False, zorder=4)
        axes.text(0.5, 0.2, "silent", color=GREY, ha="center")
        axes.set(xlim=(0, 4), ylim=(0, 1.5), xlabel="channel amplitude $|h_i|$")
        axes.set_xticks([0, 1], ["0", "threshold $\\gamma/\\sqrt{d E_s}$"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", frameon=False, ncols=2)
    sent.set(title="A device sends", ylabel="transmit amplitude $\\Vert\\hat{x}_i\\Vert$")
    sent.set_yticks([0, 1], ["0", "$\\sqrt{d E_s}$"])
    sent.axhline(1, color=RED, lw=1.2, linestyle=(0, (2, 2)), zorder=1)
    sent.text(3.98, 1.05, "energy limit, touched at the threshold", color=RED, ha="right")
    sent.text(2.65, 0.66, "$\\Vert\\hat{x}_i\\Vert = (\\gamma/|h_i|)\\ \\Vert\\Delta_i\\Vert/B$", ha="center")
    received.set(title="The server hears", ylabel="received amplitude $|h_i|\\,\\Vert\\hat{x}_i\\Vert$")
    received.set_yticks([0, 0.5, 1], ["0", "$\\gamma/2$", "$\\gamma$"])
    write(received, 2.5, 0.75, "$h_i\\hat{x}_i = \\gamma\\,\\Delta_i/B$, whatever $h_i$:\nequal weights $1/|A|$")
    return figure


def postponed() -> Figure:
    """Postponed broadcast and implicit gossip over four rounds."""
    figure, axes = canvas(11.0, 6.5)
    shades = (GREY, BLUE, AMBER, GREEN, RED)  # of the models x^0 to x^4
    heights, anchor, learnt = {"A": 3.75, "B": 2.75, "C": 1.75}, dict.fromkeys("ABC", 0), dict.fromkeys("ABC", 0)
    write(axes, 0.65, 5.32, "server")
    for name, y in heights.items():
        write(axes, 0.65, y, f"device {name},\nstarts from $x^0$")
    for t, active in enumerate(("AB", "A", "BC", "AC")):
        x, shade, low = 1.3 + 2.42 * t, shades[t + 1], heights[active[-1]]
        axes.add_patch(Rectangle((x, 1.2), 2.3, 5.15, color=PALE, lw=0, zorder=0))
        write(axes, x + 1.15, 6.15, f"round {t}", bold=True)
        for name, y in heights.items():
            on, learnt[name] = name in active, learnt[name] + 1
            word, ink, edge, fill = ("active", INK, ORANGE, ORANGE) if on else ("silent", GREY, GREY, SILVER)
            box(axes, x + 0.35, y - 0.36, 1.6, 0.72, "", edge)
            write(axes, x + 0.45, y + 0.17, word, ink, on, "left")
            for k in range(learnt[name]):
                axes.add_patch(Rectangle((x + 1.1 + 0.25 * k, y + 0.08), 0.19, 0.19, color=fill, lw=0, zorder=5))
            if on:
                axes.plot([x + 0.35, x + 0.16], [y, y], color=ORANGE, lw=2.4, zorder=2)
                arrow(axes, (x + 2.14, y - 0.17), (x + 1.97, y - 0.17), shade, 1.8)
                anchor[name], learnt[name] = t + 1, 0
            write(axes, x + 0.45, y - 0.17, f"then anchor $x^{anchor[name]}$", shades[anchor[name]], on, "left")
        arrow(axes, (x + 0.16, low - 0.015), (x + 0.16, 4.73), ORANGE, 2.4)
        axes.plot([x + 2.14] * 2, [4.75, low - 0.18], color=shade, lw=1.8, zorder=2)
        write(axes, x + 0.27, 4.42, "innovations" if len(active) > 1 else "innovation", AMBER, ha="left")
        write(axes, x + 2.05, 4.42, f"then $x^{t + 1}$", shade, ha="right")
        box(axes, x + 0.05, 4.75, 2.2, 1.15, "", shade)
        mean = ("mean(${}$)" if len(active) > 1 else "${}$").format(", ".join(f"\\tilde{{x}}_{n}" for n in active))
        write(axes, x + 1.15, 5.6, f"$x^{t + 1}$ = {mean} + noise")
        kept = ", ".join(f"$x^{k}$" for k in sorted(set(anchor.values())))
        write(axes, x + 1.15, 5.1, f"keeps the anchors\n{kept}", GREY)
    box(axes, 0.15, 0.12, 6.3, 0.95, "", ORANGE)
    axes.add_patch(Rectangle((0.35, 0.665), 0.19, 0.19, color=ORANGE, lw=0, zorder=5))
    write(axes, 0.65, 0.76, "what a device learns in a round; its innovation is all of it since its anchor", ha="left")
    write(axes, 0.35, 0.43, "C, silent in rounds 0 and 1, sends in round 2 what it has learnt since round 0", ha="left")
    gossip = "Implicit gossip: the server mixes B with C in round 2,\nand C with A in round 3,\n"
    box(axes, 6.6, 0.12, 4.3, 0.95, gossip + "so that A receives what B has learnt", GREEN)
    return figure


def main() -> None:
    """Draw all figures."""
    with mpl.rc_context(STYLE):
        system().savefig(IMAGES / "system.png", dpi=160)
        for draw in (system, one_round, knowledge, inversion, postponed):
            draw().savefig(IMAGES / f"{draw.__name__.removeprefix('one_')}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
