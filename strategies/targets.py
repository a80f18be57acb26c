"""Check that the settings and the method of a run suit its target: classes, labels or values."""

from posy.data.settings import DataSettings
from posy.data.task import TITLES
from posy.extensions import is_custom
from posy.metrics import CLASSES
from posy.settings import SettingsError
from posy.strategies.run_settings import AUTO, LOSSES, RunSettings, TrainSettings


def check_target(run: RunSettings, data: DataSettings, train: TrainSettings, needs_classes: str) -> None:
    """Raise :class:`SettingsError` if a setting or the method does not suit the target of the predictions.

    ``needs_classes`` is :attr:`~posy.strategies.settings.MethodSettings.needs_classes` of the method.
    """
    target = data.target
    task = f"task = {TITLES[target]!r}"
    if not is_custom(train.loss) and train.loss not in (AUTO, *LOSSES[target]):
        raise SettingsError(
            f"loss = {train.loss!r} is not valid for {task}; choose auto, {', '.join(LOSSES[target])} or a custom loss"
        )
    if target == CLASSES:
        return
    if needs_classes:
        raise SettingsError(f"method = {run.method!r} does not support {task}: {needs_classes}; choose another method")
    unsuitable = {
        "class-weights": (train.class_weights, "none"),
        "share-class-counts": (data.share_class_counts, False),
        "positive-class": (run.positive_class, ""),
        "system-accuracy": (run.system_accuracy == "on", False),
    }
    for key, (value, default) in unsuitable.items():
        if value != default:
            raise SettingsError(f"{key} needs classes, but the run has {task}; remove {key}")
