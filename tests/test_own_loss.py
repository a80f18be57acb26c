"""Custom losses, class weights and other optimisers: every method supports them, and wrong losses are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posy
from posy.client_app.training.losses import criterion_of
from posy.settings import SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

LOSSES = """
import torch
import torch.nn.functional as F


def focal(logits, labels):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


def same(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def mean(logits, labels):
    return F.cross_entropy(logits, labels)


def constant(logits, labels):
    return 0 * logits.sum(1) + 1


def detached(logits, labels):
    return same(logits, labels).detach()


def endless(logits, labels):
    return same(logits, labels) + (logits[:, 0] - logits[:, 0]).sqrt()


def undefined(logits, labels):
    return same(logits, labels) * float("nan")


def infinite(logits, labels):
    return -torch.log(torch.relu(-same(logits, labels)))


def noisy(logits, labels):
    return same(logits, labels) * torch.rand(())


CALLS = []


def counting(logits, labels):
    CALLS.append(None)
    return same(logits, labels) * len(CALLS)


def number(logits, labels):
    return 1.0


def broken(logits, labels):
    raise KeyError("nothing")


def branching(logits, labels):
    return same(logits, labels) * (2 if logits[0, 0] > 0 else 1)


FIVE = 5
"""
SMALL = {"max_samples": 240, "num_clients": 3, "num_server_rounds": 2, "local_epochs": 1, "model": "mlp"}


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the losses to the working directory of the run."""
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(LOSSES, encoding="utf-8")
    criterion_of.cache_clear()


def method_settings(method: str) -> dict[str, Any]:
    """Return the extra settings that a short run of a method needs."""
    return {"ppfe_stages": 2, "ppfe_stage_rounds": "1,1"} if method == "ppfe" else {}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_minimises_a_custom_loss(losses: None, method: str) -> None:
    """A custom cross-entropy gives the same losses as the built-in one, and a focal loss gives different losses."""
    plain, same, focal = (
        posy.run(method=method, run_name=name, loss=loss, stack="loop", lr=0.2, **SMALL, **method_settings(method))
        for name, loss in (("a", "cross-entropy"), ("b", "losses:same"), ("c", "losses:focal"))
    )
    columns = [column for column in ("served_loss", "local_loss") if plain.clients[column].notna().any()]
    for column in columns:
        np.testing.assert_allclose(same.clients[column], plain.clients[column], rtol=1e-3)
    assert not np.allclose(focal.clients[columns], plain.clients[columns], rtol=3e-3, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_supports_or_refuses_adamw_with_balanced_classes(losses: None, method: str) -> None:
    options = {
        **SMALL,
        **method_settings(method),
        "lr": 0.005,
        "class_weights": "balanced",
        "optimizer": "adamw",
        "method": method,
    }
    if method == "scaffold":
        with pytest.raises(SettingsError, match=r"optimizer = 'adamw'.*method = 'scaffold'"):
            posy.run(**options)
        return
    summary = posy.run(run_name="a", **options).summary
    assert (summary["status"], summary["dropped"]) == ("completed", {})


WRONG = {
    "nowhere:focal": "file nowhere.py",
    "losses:nothing": "does not define nothing",
    "losses:FIVE": "must be a function, not int",
    "losses:mean": "of shape (4,), not shape ()",
    "losses:number": "of shape (4,), not float",
    "losses:constant": "its gradient is 0",
    "losses:detached": "its gradient is 0",
    "losses:endless": "its gradient is not finite",
    "losses:undefined": "returns [nan, nan, nan, nan]",
    "losses:infinite": "returns [inf, inf, inf, inf]",
    "losses:noisy": "a second call returns different losses",
    "losses:counting": "a second call returns different losses",
    "losses:broken": "KeyError: 'nothing'",
    "losses:branching": "RuntimeError",
    "focal": "must be one of auto, cross-entropy",
}


@pytest.mark.parametrize("loss", WRONG)
def test_invalid_losses_are_refused_before_the_run(losses: None, loss: str) -> None:
    with pytest.raises(SettingsError) as raised:
        posy.run(method="fedavg", loss=loss, **SMALL)
    assert WRONG[loss] in str(raised.value)
    assert not Path("runs").exists()


def test_adam_refuses_momentum() -> None:
    with pytest.raises(SettingsError, match=r"optimizer = sgd.*optimizer = 'adam'"):
        read_settings({"optimizer": "adam", "momentum": 0.9})
