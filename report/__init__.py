"""Read recorded runs, compare them, and write an HTML report."""
