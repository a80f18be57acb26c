"""Draw a table that `posy table` has written: a row for each method, its served and local accuracy over the seeds.

``python -m benchmarks.draw_table results/cifar10-12000/table.csv docs/cifar10-12000.png --title CIFAR-10``
"""

from pathlib import Path

import pandas as pd
import typer
from matplotlib.figure import Figure

from posy.figures import COLOURS

POINTS = {"served": ("served model", COLOURS[0], "o", 0.12), "local": ("local model", COLOURS[1], "D", -0.12)}


def main(table: Path, picture: Path, title: str = "") -> None:
    """Read the CSV and write the PNG."""
    rows = pd.read_csv(table)[::-1].reset_index(drop=True)
    figure = Figure(figsize=(8, 0.42 * len(rows) + 1.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for point, (label, colour, marker, shift) in POINTS.items():
        measured = rows[rows[f"{point}-last"].notna()]
        spread = 100 * measured[f"{point}-last-seeds-std"].fillna(0)
        axes.errorbar(
            100 * measured[f"{point}-last"], measured.index + shift, xerr=spread, fmt=marker, color=colour, label=label,
            capsize=3, markersize=5,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), rows["method"])
    axes.set_xlabel("accuracy over the clients, %; mean ± std over the seeds")
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    axes.set_title(title, loc="left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    typer.run(main)
