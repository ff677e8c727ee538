"""Draw where an analog uplink beats a digital one: two maps over transmit power and the cell's radius.

    python recipes/analog_digital.py sweeps/analog-digital [--seconds 100] [--joules 3] [-o analog-digital.png]

A field has the accuracy of FedOAG-zero within the budget, minus that of the digital uplink with whatever of its numbers
of bits is best on the test set, which favours it. It is bold where ten seeds tell the two apart, with Holm's correction
for all fields of both maps.
"""

import argparse
from pathlib import Path

import numpy as np

from otafl.errors import OtaflError
from otafl.report.axes import Budget
from otafl.report.figures import drawing, save, write_csv
from otafl.report.runs import Named, collect
from otafl.report.statistics import accuracy_in, compared

ANALOG, POWER, RADIUS = "FedOAG-zero", "radio.tx_power_dbm", "cell.radius_m"


def reached(run: Named, budget: Budget) -> np.ndarray:
    """Every seed's accuracy within the budget, percent."""
    return accuracy_in(run.result, budget.rows(run.result, run.label))


def main() -> None:
    """Read the sweep, draw, and write the numbers beside the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--joules", type=float, default=3.0)
    parser.add_argument("-o", "--output", type=Path, default=Path("analog-digital.png"))
    options = parser.parse_args()
    runs = collect(options.folder)
    powers, radii = (sorted({run.value(key) for run in runs}) for key in (POWER, RADIUS))
    budgets = [Budget.parse(f"seconds={options.seconds}"), Budget.parse(f"joules={options.joules}")]
    values: dict[str, np.ndarray] = {}
    best: dict[tuple[int, int, int], tuple[float, float, str]] = {}
    for b, budget in enumerate(budgets):
        for p, power in enumerate(powers):
            for r, radius in enumerate(radii):
                here = [run for run in runs if (run.value(POWER), run.value(RADIUS)) == (power, radius)]
                scores = {run.axes["method"]: reached(run, budget) for run in here}
                digital = max((name for name in scores if name.startswith("digital")), key=lambda n: scores[n].mean())
                values[f"{b} {p} {r}"] = scores[ANALOG] - scores[digital]
                best[b, p, r] = (scores[ANALOG].mean(), scores[digital].mean(), digital.removeprefix("digital, "))
    count = len(next(iter(values.values())))
    told = compared({"none": np.zeros(count), **values}, "none")
    rows = []
    with drawing(9.0, 3.6, columns=2) as (figure, panels):
        for b, (panel, budget) in enumerate(zip(panels, budgets, strict=True)):
            gaps = np.array([[values[f"{b} {p} {r}"].mean() for p in range(len(powers))] for r in range(len(radii))])
            image = panel.imshow(gaps, cmap="PuOr", vmin=-90, vmax=90, origin="lower", aspect="auto")
            for (r, p), gap in np.ndenumerate(gaps):
                analog, digital, bits = best[b, p, r]
                sure = told[f"{b} {p} {r}"].told
                text = {"ha": "center", "va": "center", "fontsize": 8, "weight": "bold" if sure else "normal"}
                panel.text(p, r, f"{analog:.0f}\n{digital:.0f} ({bits})", color="w" if abs(gap) > 60 else "k", **text)
                rows.append(
                    (str(budget), powers[p], radii[r], f"{analog:.3f}", f"{digital:.3f}", bits, f"{gap:.3f}", sure)
                )
            panel.set_xticks(range(len(powers)), [f"{power:g}".replace("-", "−") for power in powers])
            panel.set_yticks(range(len(radii)), [f"{radius:g}" for radius in radii])
            panel.set_xlabel("transmit power (dBm)")
            panel.set_ylabel("radius of the cell (m)" if b == 0 else "")
            panel.set_title(f"within {budget}", fontsize=10, loc="left")
        figure.colorbar(image, ax=panels, label="FedOAG-zero minus digital (points)", shrink=0.9)
        figure.suptitle(
            "Test accuracy (%): FedOAG-zero above, digital uplink with its best number of bits below", fontsize=10
        )
        header = ("budget", "tx_power_dbm", "radius_m", "analog", "digital", "difference", "bits", "told_apart")
        write_csv(options.output, header, rows)
        print(save(figure, options.output))


if __name__ == "__main__":
    try:
        main()
    except OtaflError as error:
        raise SystemExit(f"recipes/analog_digital.py: {error}") from None
