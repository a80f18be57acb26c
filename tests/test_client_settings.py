"""Settings of local training that differ between clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy.client_app.policy import violations
from posy.data.policy import Policy
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.client_settings import check_clients
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]
OWN = {0: {"local-epochs": 3, "lr": 0.01}, 1: {"local-steps": 4, "batch-size": 2}, 2: {"batch-size": 3}}


def samples_of(clients: dict[int, int]) -> int:
    return sum(clients.values())


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_each_client_trains_with_its_own_settings(
    make_config: MakeConfig, federate: Callable[..., Any], stack: str, tmp_path: Path
) -> None:
    """Clients of 21, 12, 8 and 1 samples: 3 epochs, 4 steps of 2 samples, 1 epoch and 1 epoch."""
    file = tmp_path / "own.yaml"
    file.write_text("0: {local-epochs: 3, lr: 0.01}\n1: {local-steps: 4, batch-size: 2}\n2: {batch-size: 3}\n")
    common = {"num_server_rounds": 1, "model": "linear", "lr_schedule": "exponential", "stack": stack}
    mixed = federate(make_config("local", **common, client_settings=str(file)))
    assert mixed.records[0].samples == 3 * 21 + 4 * 2 + 8 + 1
    for client, own in OWN.items():
        settings = {key.replace("-", "_"): value for key, value in own.items()}
        alone = federate(make_config("local", **common, **settings))
        for name, array in alone.kept(client).items():
            np.testing.assert_allclose(mixed.kept(client)[name], array, atol=1e-6)


def test_a_file_and_its_content_give_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"1": {"lr": 0.2}}))
    from_file = read_settings({"method": "fedavg", "client-settings": str(file)})
    assert from_file == read_settings({"method": "fedavg", "client-settings": '{"1": {"lr": 0.2}}'})
    assert json.loads(from_file.train.client_settings) == {"1": {"lr": 0.2}}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"0": {"lr": -1}}', "lr = -1"),
        ('{"0": {"momentum": 0.5}}', "momentum"),
        ('{"0": 3}', "client 0"),
        ('{"0": {"local-epochs": 2, "local-steps": 3}}', "local-epochs"),
        ("{", "client-settings"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_wrong_client_settings_are_refused(text: str, key: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({"method": "fedavg", "client-settings": text})
    assert key in str(raised.value)


def test_an_unknown_client_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(SettingsError, match="client-settings: client 7 does not exist"):
        run(None, make_config("fedavg", client_settings='{"7": {"lr": 0.1}}'))


def test_a_method_warns_about_the_settings_of_single_clients(
    make_config: MakeConfig, federate: Callable[..., Any], warnings: pytest.LogCaptureFixture
) -> None:
    """A mini-batch of Per-FedAvg needs two samples; the run's batch-size is 8."""

    def small_batches() -> set[str]:
        return {text for record in warnings.records if "a mini-batch has fewer" in (text := record.getMessage())}

    entries = {"1": {"batch-size": 1}, "2": {"lr": 0.1}, "3": {"batch-size": 1}}
    federate(make_config("per-fedavg", client_settings=json.dumps(entries), num_server_rounds=1))
    (notice,) = small_batches()
    assert notice.startswith("per-fedavg: client-settings, client 1; client-settings, client 3: batch-size = 1: ")
    warnings.clear()
    federate(make_config("per-fedavg", batch_size=1, client_settings=json.dumps(entries), num_server_rounds=1))
    (notice,) = small_batches()
    assert notice.startswith("per-fedavg: batch-size = 1: ")


def test_the_number_of_a_group_is_not_mistaken_for_a_client() -> None:
    names = ["group 1", "group 10", "group 2", "other"]
    for client, accepted in {"group 10": True, "0": True, "1": False, "2": True, "3": True}.items():
        train = read_settings({"method": "fedavg", "client-settings": json.dumps({client: {"lr": 0.1}})}).train
        if accepted:
            check_clients(train, len(names), names)
        else:
            with pytest.raises(SettingsError, match=f"client {client} is"):
                check_clients(train, len(names), names)


@pytest.mark.parametrize("key", ["client-settings", "client-bounds"])
def test_pooled_training_refuses_settings_of_clients(key: str) -> None:
    value = {"client-settings": '{"0": {"lr": 0.1}}', "client-bounds": "lr: 0.1..0.2"}[key]
    with pytest.raises(SettingsError, match=key):
        read_settings({"method": "pooled", key: value})


def test_a_site_applies_its_policy_to_the_settings_of_each_client() -> None:
    policy = Policy(min_rows=10, max_local_epochs=5)
    own = {"0": {"batch-size": 2}, "1": {"local-epochs": 6}}
    values = {"dataset": "sites", "batch-size": 10, "client-settings": json.dumps(own)}
    assert [violation.rule for violation in violations(policy, values)] == ["min-rows", "max-local-epochs"]
    for text in ("/etc/hostname", '{"0": 3}', '{"0": {"batch-size": "x"}}', "[]"):
        assert [violation.rule for violation in violations(policy, {**values, "client-settings": text})] == ["settings"]
