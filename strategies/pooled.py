"""Scores under secure aggregation: each client adds integers to a masked sum, and the server sees only the sum.

The server never receives a single client's loss, accuracy or number of processed samples. The settings alone determine
the layout of the integers, so the layout is the same for all clients.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posy.metrics import Spread
from posy.strategies.settings import Settings

LOSS_STEPS = 2**20
"""Number of fixed-point steps per unit of loss; rounding changes a mean loss by less than 10^-6."""
TRAIN = "train"
"""Key of the tally of the training loss."""


class Tally(NamedTuple):
    """Scores of one model on one split, summed over samples and clients."""

    clients: int = 0
    """Number of clients with samples in the split."""
    samples: int = 0
    correct: int = 0
    loss: int = 0
    """Sum of the samples' losses, in units of 1 / :data:`LOSS_STEPS`."""

    def spread(self, measure: str) -> Spread | None:
        """Return the mean ``accuracy`` or ``loss`` over all samples, or None without samples.

        No single client's numbers are available, so all other statistics are None.
        """
        if not self.samples:
            return None
        total = self.correct if measure == "accuracy" else self.loss / LOSS_STEPS
        return Spread(
            mean=total / self.samples,
            std=None,
            min=None,
            max=None,
            tenth=None,
            weighted=None,
            jain=None,
            clients=self.clients,
            samples=self.samples,
        )


def splits(settings: Settings) -> dict[str, str]:
    """Return the names of the splits on which a run scores models, keyed by the suffix in the scores' keys."""
    names = {"": "test"}
    if settings.data.validation_fraction:
        names["-validation"] = "validation"
    if settings.run.evaluate_training:
        names["-training"] = "train"
    return names


def layout(settings: Settings, *, training: bool) -> tuple[str, ...]:
    """Return the keys of the tallies in a training or evaluation reply, in order."""
    points = ("local",) if training else ("served", "local")
    keys = tuple(point + suffix for suffix in splits(settings) for point in points)
    return (TRAIN, *keys) if training else keys


def numbers_of(
    settings: Settings, metrics: Mapping[str, Any], sizes: Mapping[str, int], *, training: bool
) -> list[int]:
    """Return a client's numbers for the masked sum: four per tally, then its number of processed samples.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    metrics : mapping
        The client's scores by key, ``samples``, and after training ``train-loss``. A missing score adds nothing.
    sizes : mapping
        The client's number of samples in each split, keyed by the split's name.
    training : bool
        Whether the reply answers a training message.

    Raises
    ------
    ArithmeticError
        If a loss is not finite.
    """
    numbers: list[int] = []
    suffixes = splits(settings)
    for key in layout(settings, training=training):
        split = "train" if key == TRAIN else suffixes[key.removeprefix(key.partition("-")[0])]
        loss = metrics.get(f"{key}-loss")
        count = sizes[split] if loss is not None else 0
        correct = round(count * float(metrics.get(f"{key}-accuracy", 0.0)))
        total = round(count * float(loss or 0.0) * LOSS_STEPS)
        numbers += Tally(int(count > 0), count, correct, total)
    return [*numbers, int(metrics.get("samples", 0))]


def tallies(settings: Settings, numbers: Sequence[int], *, training: bool) -> tuple[dict[str, Tally], int]:
    """Return the tallies by key and the number of processed samples, given the sums of :func:`numbers_of`."""
    keys, size = layout(settings, training=training), len(Tally._fields)
    parts = {key: Tally(*numbers[size * i : size * (i + 1)]) for i, key in enumerate(keys)}
    return parts, numbers[-1]


def spreads(sums: Mapping[str, Tally]) -> dict[str, Spread]:
    """Return the mean of each measure over all samples, keyed by column, such as ``train_loss``."""
    columns = {}
    for key, tally in sums.items():
        for measure in ("loss",) if key == TRAIN else ("accuracy", "loss"):
            if (values := tally.spread(measure)) is not None:
                columns[f"{key}_{measure}".replace("-", "_")] = values
    return columns


def count_of(settings: Settings, *, training: bool) -> int:
    """Return how many numbers :func:`numbers_of` returns."""
    return len(Tally._fields) * len(layout(settings, training=training)) + 1
