"""Draw figures as PNG files that are 1200 pixels wide.

Every function takes data and a path and writes one file, unless the data is empty or contains only None and NaN. The
functions use matplotlib's object-oriented interface instead of pyplot, so they do not keep any global state.
"""

from posy.figures.curves import Band, Curve, lines, over_rounds, small_multiples
from posy.figures.diagrams import branches, images, networks
from posy.figures.maps import Panel, gains, heatmaps, partition, routing, similarity_order
from posy.figures.points import Interval, client_scores, dots, ranking, scatter, scatters

__all__ = [
    "Band",
    "Curve",
    "Interval",
    "Panel",
    "branches",
    "client_scores",
    "dots",
    "gains",
    "heatmaps",
    "images",
    "lines",
    "networks",
    "over_rounds",
    "partition",
    "ranking",
    "routing",
    "scatter",
    "scatters",
    "similarity_order",
    "small_multiples",
]
