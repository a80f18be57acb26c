"""Read recorded runs, compare them, and present them on a page."""
