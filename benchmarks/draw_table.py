"""Draw a table that `posy table` has written: a row a method, its served and local accuracy over the seeds.

usage: python -m benchmarks.draw_table results/digits/table.csv docs/digits.png [--title TITLE]
"""

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure

from posy.figures import COLOURS

POINTS = {"served": ("served model", COLOURS[0], "o", 0.12), "local": ("local model", COLOURS[1], "D", -0.12)}


def main() -> None:
    """Read the CSV and write the PNG."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    with options.table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["method"] for row in rows]
    figure = Figure(figsize=(8, 0.42 * len(names) + 1.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for point, (label, colour, marker, shift) in POINTS.items():
        measured = [(place, row) for place, row in enumerate(reversed(rows)) if row[f"{point}-last"]]
        means = [100 * float(row[f"{point}-last"]) for _, row in measured]
        spreads = [100 * float(row[f"{point}-last-seeds-std"] or 0) for _, row in measured]
        places = [place + shift for place, _ in measured]
        axes.errorbar(means, places, xerr=spreads, fmt=marker, color=colour, label=label, capsize=3, markersize=5)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_xlabel("accuracy over the clients, %; mean ± std over the seeds")
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False)
    axes.set_title(options.title, loc="left")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture)


if __name__ == "__main__":
    main()
