"""Each setting of a method changes a run. Posy refuses a setting without an effect, or names it in a warning."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from posy.server_app.system import chosen_clients
from posy.settings import Scalar, Setting, SettingsError
from posy.strategies import schedule
from posy.strategies.feddrm import FedDRM
from posy.strategies.methods import METHODS
from posy.strategies.registry import groups, unmet_conditions
from posy.strategies.server_state import state_of

Make = Callable[..., Any]
SLOW = ("ppfe", "fedfew")
"""Methods with so many settings that the test takes a quarter of a minute."""
SETTINGS = {
    "model": "mlp",
    "num_server_rounds": 3,
    "batch_size": 8,
    "local_epochs": 1,
    "lr": 0.1,
    "fraction_train": 0.6,
}
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "cfl": {"cfl_eps1": 1e9, "cfl_eps2": 0.0, "fraction_train": 1.0},  # each cluster may split
    "fedamp": {"fedamp_alpha": 100.0, "fedamp_sigma": 100.0},  # all models attend to each other
    # In round 1 all models are drawn at random.
    "fedfomo": {"fedfomo_models": 2, "fedfomo_epsilon": 1.0, "fraction_train": 1.0},
    "ppfe": {"num_server_rounds": 4, "ppfe_ranks": "8,4;6,3"},
}
"""Settings with which the settings of a method have an effect on the tiny data set."""
VALUES: dict[str, Scalar] = {
    "cfl-eps1": 0.0,
    "cfl-eps2": 1e9,
    "cfl-gamma-max": 1.0,
    "ditto-epochs": 2,
    "fedala-threshold": 1e-5,
    "fedfomo-epsilon": 0.0,
    "fedfomo-epsilon-decay": 1.0,
    "fedfomo-models": 1,
    "pfedfda-beta": 0.3,
    "ppfe-final-epochs": 2,
    "ppfe-fixed-head": 1,
    "ppfe-ranks": "4,2",
    "ppfe-stage-rounds": "2,1,1",
    "ppfe-stages": 2,
}
"""Other values than the default, where a factor or another choice is not suitable."""


def other_value(key: str, setting: Setting) -> Scalar | None:
    """Return another value of a setting, or None for a text without choices."""
    if key in VALUES:
        return VALUES[key]
    default = setting.default
    if setting.choices or setting.kind is bool:
        return next(value for value in (setting.choices or (True, False)) if value != default)
    if setting.kind is str:
        return None
    candidates = (setting.kind(value) for value in (default + 1, default - 1, default * 2, default / 2))
    return next(value for value in candidates if value != default and setting.admits(value))


def contexts(declared: dict[str, Setting]) -> Iterator[dict[str, Scalar]]:
    """Yield the defaults, and each setting that turns a part of the method off or on."""
    yield {}
    for key, setting in declared.items():
        if setting.kind is bool:
            yield {key: not setting.default}
        elif setting.kind in (int, float) and not setting.number_or and setting.admits(0) and setting.default:
            yield {key: setting.kind(0)}


def digest(finished: Any) -> str:
    """Return a hash of the server's state, the clients' states, the scores and the routes of a few queries."""
    content = hashlib.sha256()
    for arrays in (state_of(finished.strategy), *map(finished.kept, range(4))):
        for name, array in sorted(arrays.items()):
            content.update(name.encode() + np.asarray(array).tobytes())
    for column in ("served_accuracy", "served_loss", "local_accuracy", "local_loss"):
        content.update(repr(finished.column(column)).encode())
    if isinstance(finished.strategy, FedDRM):
        logits = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
        content.update(chosen_clients(finished.strategy, logits).numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=pytest.mark.slow) if method in SLOW else method for method in METHODS]
)
def test_method_setting_changes_the_run_or_is_reported(
    method: str, make_config: Make, federate: Make, warnings: pytest.LogCaptureFixture
) -> None:
    declared = dict(groups([method])[method])

    def run(settings: dict[str, Scalar]) -> tuple[str, dict[str, Any]]:
        values = SETTINGS | METHOD_SETTINGS.get(method, {}) | {k.replace("-", "_"): v for k, v in settings.items()}
        config = make_config(method, **values)
        return digest(federate(config)), config

    def is_reported(key: str) -> bool:
        """Return whether a warning names the setting."""
        logged = (record.getMessage() for record in warnings.records if record.levelname == "WARNING")
        return any(re.search(rf"(?<![\w-]){key}(?![\w-])", text) for text in logged)

    unreported = []
    for context in contexts(declared):
        try:
            expected, config = run(context)
        except SettingsError:
            continue
        for key in declared.keys() - context.keys() - unmet_conditions(config).keys():
            value = other_value(key, declared[key])
            if value is None:
                continue
            warnings.clear()
            try:
                changed = run({**context, key: value})[0] != expected
            except SettingsError:
                continue
            if not changed and not is_reported(key):
                unreported.append((context, key, value))
    assert unreported == []


# -- shared settings -------------------------------------------------------------------------------------

NOTICES: list[tuple[dict[str, Any], str]] = [
    (
        {"lr_schedule": "step", "lr_step": 3},
        "lr-schedule = 'step' has no effect: lr is 0.05 in all rounds from 1 to 3; ",
    ),
    ({"lr_schedule": "step", "lr_step": 2}, ""),
    ({"lr_schedule": "exponential", "lr_decay": 1.0}, "lr-schedule = 'exponential' has no effect"),
    ({"lr_schedule": "exponential"}, ""),
    ({"lr_schedule": "cosine", "num_server_rounds": 1}, "lr-schedule = 'cosine' has no effect"),
    ({"lr_schedule": "cosine"}, ""),
    (
        {"secure_aggregation": True, "secure_neighbours": 3, "fraction_train": 0.75},
        "secure-neighbours = 3: a round has ",
    ),
    ({"secure_aggregation": True, "secure_neighbours": 2, "fraction_train": 0.75}, ""),
    ({"precision": "tf32"}, "a node: precision = 'tf32' has no effect on the device cpu, which computes in float32"),
    ({"precision": "bfloat16"}, ""),
]


@pytest.mark.parametrize(("settings", "words"), NOTICES)
def test_a_shared_setting_without_an_effect_is_reported_once_before_round_1(
    settings: dict[str, Any], words: str, make_config: Make, federate: Make, warnings: pytest.LogCaptureFixture
) -> None:
    """The run has four clients and three rounds."""
    finished = federate(make_config("fedavg", model="linear", **settings))
    records = list({id(record): record for record in warnings.records}.values())
    first_round = [record.getMessage() for record in records].index(f"[ROUND 1/{len(finished.records)}]")
    logged = [record.getMessage() for record in records[:first_round] if record.levelname == "WARNING"]
    assert len(logged) == bool(words)
    assert all(text.startswith(words) for text in logged)


def test_full_last_round_has_enough_neighbours(make_strategy: Make) -> None:
    settings = {"secure_aggregation": True, "secure_neighbours": 3, "fraction_train": 0.75}
    for full_last_round, count in ((True, 0), (False, 1)):
        strategy = make_strategy("fedavg", **settings, full_last_round=full_last_round)
        assert len(schedule.notices(strategy.settings, 3, strategy.rounds.cohort)) == count
