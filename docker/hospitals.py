"""Divide scikit-learn's breast cancer data among hospitals: ``python hospitals.py FILE.csv ...``.

Each row of a file has a patient's number, ten measurements of cell nuclei, and the diagnosis. The first hospital has
the smallest share of malignant tumours, and the last hospital has the largest.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

MEASUREMENTS = 10
"""Number of columns to use: the first are means over the nuclei, and the others are their errors and extremes."""


def write_patients(files: Sequence[Path]) -> None:
    """Write a part of the patients into each file."""
    data = load_breast_cancer()
    weights = np.arange(2, 2 + len(files))
    hospitals: list[list[int]] = [[] for _ in files]
    for target, shares in ((0, weights), (1, weights[::-1])):
        patients = np.flatnonzero(data.target == target)
        ends = np.cumsum(shares) * len(patients) // shares.sum()
        for hospital, part in zip(hospitals, np.split(patients, ends[:-1]), strict=True):
            hospital.extend(part.tolist())
    for file, hospital in zip(files, hospitals, strict=True):
        with file.open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream)
            table.writerow(["patient", *data.feature_names[:MEASUREMENTS], "diagnosis"])
            for patient in sorted(hospital):
                diagnosis = data.target_names[data.target[patient]]
                table.writerow([patient, *data.data[patient, :MEASUREMENTS], diagnosis])


if __name__ == "__main__":
    write_patients([Path(name) for name in sys.argv[1:]])
