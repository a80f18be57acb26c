"""With optimizer-state = kept, momentum and Adam's moments continue from a client's last round."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posy
from posy.settings import SettingsError
from posy.strategies.methods import METHODS

OPTIMISERS = {
    "sgd": {"momentum": 0.9, "lr": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.001},
    "adamw": {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.01},
}
SMALL = {"max_samples": 240, "num_clients": 3, "model": "mlp", "batch_size": 1000, "device": "cpu"}


def trained(folder: Path, name: str, rounds: int, epochs: int, **settings: object) -> list[np.ndarray]:
    """Return the flat vector of each client's stored model after a run."""
    posy.run(
        **{"method": "local", **SMALL, **settings},
        num_server_rounds=rounds,
        local_epochs=epochs,
        output_dir=str(folder),
        run_name=name,
        save_models=True,
    )
    files = sorted((folder / name).rglob("client-*.safetensors"))
    assert len(files) == settings.get("num_clients", 3)
    return [np.concatenate([t.ravel() for t in posy.storage.read_arrays(file)[0].values()]) for file in files]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_two_rounds_with_kept_state_equal_one_round_of_twice_the_epochs(tmp_path: Path, name: str) -> None:
    """With full batches, the runs differ only in the optimiser's state. A fresh state changes the models."""
    settings = OPTIMISERS[name]
    long = trained(tmp_path, "long", 1, 4, **settings)
    continued = trained(tmp_path, "kept", 2, 2, optimizer_state="kept", **settings)
    fresh = trained(tmp_path, "fresh", 2, 2, **settings)
    for expected, model, fresh_model in zip(long, continued, fresh, strict=True):
        np.testing.assert_allclose(model, expected, rtol=1e-4, atol=1e-6)
        assert np.abs(fresh_model - expected).max() > 1e-4


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "fedfew"])
def test_stacked_and_looped_clients_keep_the_same_state(tmp_path: Path, method: str, name: str) -> None:
    """Clients have different numbers of batches, and one client joins after the first rounds."""
    settings = {**OPTIMISERS[name], "method": method, "optimizer_state": "kept", "batch_size": 16}
    settings |= {"num_clients": 5, "fraction_train": 0.6, "full_last_round": True}
    loop, vmap = (trained(tmp_path, stack, 3, 1, stack=stack, **settings) for stack in ("loop", "vmap"))
    for expected, model in zip(loop, vmap, strict=True):
        np.testing.assert_allclose(model, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_with_a_kept_state(tmp_path: Path, method: str) -> None:
    """Some methods require plain steps, and the network of PPFE grows. SCAFFOLD rejects the setting."""
    outcome: Any = pytest.raises(SettingsError, match="a stored momentum") if method == "scaffold" else nullcontext()
    with outcome:
        trained(tmp_path, "run", 3, 1, method=method, optimizer_state="kept", momentum=0.5, batch_size=32)


def test_kept_state_without_momentum_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="optimizer-state = 'kept'"):
        trained(tmp_path, "run", 1, 1, optimizer_state="kept")
