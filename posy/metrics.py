"""Define the metrics that a run can report. Importing this module does not import NumPy."""

import math
from dataclasses import dataclass

CLASSES, LABELS, VALUES = "classes", "labels", "values"
"""Targets of a task: one of C classes, any subset of C labels, or C real values."""
CALIBRATION_BINS = 15
"""Number of equal-width confidence bins for the expected calibration error (Guo et al., 2017)."""


@dataclass(frozen=True)
class Metric:
    """A metric. ``name`` appears in settings and columns, ``title`` in tables.

    ``targets`` lists the targets for which the metric is defined. ``in_percent`` is True if tables show the metric as a
    percentage, ``lower_is_better`` if lower values are better, and ``binary_only`` if the metric needs two classes.
    """

    name: str
    title: str
    about: str
    targets: tuple[str, ...] = (CLASSES,)
    in_percent: bool = True
    lower_is_better: bool = False
    binary_only: bool = False

    def format(self, value: float | None) -> str:
        """Return a value as text, as a percentage or with four significant digits; None gives an empty string."""
        text = self.number(value)
        return f"{text} %" if text and self.in_percent else text

    def number(self, value: float | None, sign: str = "") -> str:
        """Return a value as text without its unit; ``sign`` is ``+`` to show the sign of positive values."""
        if value is None or math.isnan(value):
            return ""
        return f"{100 * value:{sign}.2f}" if self.in_percent else f"{value:{sign}.4g}"

    def suits(self, target: str, size: int) -> bool:
        """Return whether the metric applies to a task with C = ``size`` classes, labels or values."""
        return target in self.targets and (not self.binary_only or size == 2)

    def is_possible(self, value: float) -> bool:
        """Return whether a finite number is in the metric's range."""
        if self.name == "r2":
            return value <= 1
        return value >= 0 and (value <= 1 or not self.in_percent)


_CATEGORICAL = (CLASSES, LABELS)
_ALL = (
    Metric("accuracy", "accuracy", "fraction of samples whose class or set of labels is predicted correctly",
           _CATEGORICAL),
    Metric("balanced-accuracy", "balanced accuracy", "mean recall over the classes that occur"),
    Metric("macro-f1", "macro F1", "mean F1 over the classes that occur or are predicted", _CATEGORICAL),
    Metric("weighted-f1", "weighted F1", "mean F1 over the classes, weighted by their samples", _CATEGORICAL),
    Metric("micro-f1", "micro F1", "F1 over all sample-label pairs", (LABELS,)),
    Metric("auroc", "AUROC",
           "area under the ROC curve; with more than two classes, mean of each class against the rest", _CATEGORICAL),
    Metric("average-precision", "average precision", "area under the precision-recall curve, averaged like the AUROC",
           _CATEGORICAL),
    Metric("sensitivity", "sensitivity", "fraction of positive samples that are predicted as positive at `threshold`",
           binary_only=True),
    Metric("specificity", "specificity", "fraction of negative samples that are predicted as negative at `threshold`",
           binary_only=True),
    Metric("specificity-at-sensitivity", "specificity at fixed sensitivity",
           "highest specificity at a sensitivity of at least `fixed-sensitivity`", binary_only=True),
    Metric("log-loss", "log loss", "mean negative log-likelihood", _CATEGORICAL, in_percent=False,
           lower_is_better=True),
    Metric("brier", "Brier score",
           "mean squared error of the probabilities; with more than two classes, summed over the classes",
           _CATEGORICAL, in_percent=False, lower_is_better=True),
    Metric("calibration-error", "calibration error",
           f"expected calibration error of the most probable class, with {CALIBRATION_BINS} equal bins",
           lower_is_better=True),
    Metric("mae", "MAE", "mean absolute error", (VALUES,), in_percent=False, lower_is_better=True),
    Metric("rmse", "RMSE", "square root of the mean squared error", (VALUES,), in_percent=False, lower_is_better=True),
    Metric("r2", "R²", "coefficient of determination, averaged over the values that vary", (VALUES,),
           in_percent=False),
)  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
"""All metrics, keyed by name."""
DEFAULTS = {CLASSES: "accuracy", LABELS: "average-precision", VALUES: "rmse"}
"""The metric that ``metric = auto`` selects for each target."""


def metrics_for(target: str, size: int) -> list[Metric]:
    """Return the metrics that apply to a task with C = ``size`` classes, labels or values."""
    return [metric for metric in METRICS.values() if metric.suits(target, size)]


def column_of(point: str, measure: str, split: str = "") -> str:
    """Return the column name of a score in a client's row, as in ``served_validation_accuracy``."""
    return "_".join(part for part in (point, split, measure) if part).replace("-", "_")
