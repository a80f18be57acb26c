"""TensorBoard tracker: curves, figures, and settings with results, in ``tensorboard/`` in the run's directory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from posy.server_app.trackers.tracker import TrackedRun, numbers
from posy.strategies.columns import POINTS


class TensorBoard:
    """Writes event files; ``tensorboard --logdir runs`` shows all runs in the folder ``runs``."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        # A resumed run repeats the rounds after its checkpoint, so purge their earlier values.
        first_repeated = run.finished + 1 if run.finished else None
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=first_repeated)

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Add a point to each curve."""
        values = numbers(record)
        step = int(values.pop("round"))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Add the figures, and the settings with their results."""
        for file in sorted((self._run.directory / "figures").glob("*.png")):
            with Image.open(file) as image:
                self._writer.add_image(file.stem, np.array(image.convert("RGB")), summary["rounds"], dataformats="HWC")
        results = numbers({point: summary[point] for point in POINTS}, "result/")
        self._writer.add_hparams(dict(self._run.settings), results, run_name=".")
        self._writer.close()
