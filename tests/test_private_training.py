"""DP-SGD: gradients of single samples, clipped and with noise."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from posy.accounting import Event, read_ledger, spent
from posy.client_app import jobs
from posy.client_app.training import private
from posy.client_app.training.batches import Batch, Samples
from posy.client_app.training.networks import LoopedModels, Network
from posy.client_app.training.rules import SharpnessAware
from posy.client_app.training.trainer import Trainer
from posy.client_app.training.work import Job, Pull, Train
from posy.data.task import Task
from posy.models.architecture import Architecture, architecture_for
from posy.noise import SecureGenerator
from posy.server_app.app import run
from posy.strategies.cohorts import most_trainings
from posy.strategies.privacy import Sampling, planned_events, sampling_of
from posy.strategies.run_settings import TrainSettings
from posy.strategies.settings import Settings

CPU = torch.device("cpu")
IMAGE = Task("image", (1, 20, 20), ("a", "b", "c"))
SAMPLE = {"dp": "sample", "dp_clip": 1.0, "dp_epsilon": 8.0}


@pytest.fixture(autouse=True)
def accountant() -> None:
    pytest.importorskip("dp_accounting")


def samples(count: int, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return Samples(torch.randn(count, 1, 20, 20, generator=generator), torch.randint(3, (count,), generator=generator))


def resident(name: str) -> tuple[Architecture, Network]:
    architecture = architecture_for(name, IMAGE)
    return architecture, Network(architecture.build, architecture.layout, CPU)


def job(start: torch.Tensor, data: Samples, sampling: Sampling | None = None, **work: Any) -> Job:
    return Job(Train(start, **work), data, torch.Generator(), 0.1, sampling=sampling)


def each_gradient(architecture: Architecture, start: torch.Tensor, data: Samples) -> torch.Tensor:
    """Return the gradients ``(n, d)``, computed by a separate backward pass for each sample."""
    module = architecture.build()
    module.load_state_dict({name: view.clone() for name, view in architecture.layout.views(start).items()})
    rows = []
    for x, y in zip(data.x, data.y, strict=True):
        module.zero_grad()
        F.cross_entropy(module(x[None]), y[None]).backward()
        named = dict(module.named_parameters())
        rows.append(torch.cat([named[entry.name].grad.flatten() for entry in architecture.layout.entries]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
@pytest.mark.parametrize("clip", [1e-3, 0.7, 1e9])
def test_clipped_sum_matches_single_sample_gradients(name: str, clip: float) -> None:
    architecture, network = resident(name)
    start, data = torch.from_numpy(architecture.initial(3)), samples(23)
    single = job(start, data)
    models = LoopedModels(network, single.work)
    index = torch.tensor([0, 5, 7, 22, 11])
    sums, losses = private.clipped_sum(
        single, private.gradients_of_samples(single, network), index, models.parameters, clip
    )
    gradients = each_gradient(architecture, start, Samples(data.x[index], data.y[index]))
    factors = (clip / gradients.norm(dim=1)).clamp(max=1.0)
    expected = (factors[:, None] * gradients).sum(0)
    torch.testing.assert_close(torch.cat([s.flatten() for s in sums]), expected, rtol=1e-4, atol=1e-6)
    assert losses.shape == (5,)
    assert expected.norm() <= 5 * clip + 1e-6


def test_per_sample_gradients_match_opacus() -> None:
    grad_sample = pytest.importorskip("opacus.grad_sample")
    architecture, network = resident("cnn")
    start, data = torch.from_numpy(architecture.initial(3)), samples(16)
    module = grad_sample.GradSampleModule(architecture.build(), loss_reduction="sum")
    module._module.load_state_dict({n: v.clone() for n, v in architecture.layout.views(start).items()})
    F.cross_entropy(module(data.x), data.y, reduction="sum").backward()
    by_opacus = {name.removeprefix("_module."): p.grad_sample for name, p in module.named_parameters()}
    single = job(start, data)
    models = LoopedModels(network, single.work)
    computed, _ = private.gradients_of_samples(single, network)(models.parameters, Batch(data.x, data.y))
    for entry, gradients in zip(architecture.layout.entries, computed, strict=True):
        torch.testing.assert_close(gradients, by_opacus[entry.name], rtol=1e-4, atol=1e-6)


def train(start: torch.Tensor, data: Samples, sampling: Sampling, network: Network, **settings: Any) -> torch.Tensor:
    trainer = Trainer(TrainSettings(dp="sample", dp_clip=sampling.clip, **settings), CPU)
    return trainer.train(job(start, data, sampling), network).parameters


def test_full_batches_with_negligible_noise_equal_gradient_descent() -> None:
    architecture, network = resident("mlp")
    start, data = torch.from_numpy(architecture.initial(3)), samples(23)
    after = train(start, data, Sampling(1.0, 2, 1e-9, 1e3, 23), network)
    expected = start.clone()
    for _ in range(2):
        expected -= 0.1 * each_gradient(architecture, expected, data).mean(0)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)


def test_the_noise_of_a_step_has_the_planned_deviation() -> None:
    architecture, network = resident("mlp")
    start, data = torch.from_numpy(architecture.initial(3)), samples(40)
    sampling = Sampling(0.25, 1, 2.0, 0.5, 10)
    moved = (train(start, data, sampling, network) - start) / -0.1
    expected = 2.0 * 0.5 / 10 * (1 + private.SLACK)
    assert float(moved.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(moved)))
    again = (train(start, data, sampling, network) - start) / -0.1
    assert abs(float(torch.corrcoef(torch.stack([moved, again]))[0, 1])) < 0.05


def test_a_step_without_samples_adds_only_noise() -> None:
    architecture, network = resident("linear")
    start, data = torch.from_numpy(architecture.initial(3)), samples(2)
    after = train(start, data, Sampling(1e-12, 3, 1e-6, 1.0, 1.0), network)
    assert 0 < float((after - start).abs().max()) < 1e-5


def test_a_non_finite_sample_contributes_no_gradient() -> None:
    architecture, network = resident("linear")
    start, data = torch.from_numpy(architecture.initial(3)), samples(4)
    spoilt = Samples(data.x.clone(), data.y)
    spoilt.x[1] = math.nan
    finite = Samples(data.x[[0, 2, 3]], data.y[[0, 2, 3]])
    sampling = Sampling(1.0, 1, 1e-9, 1e3, 4)
    torch.testing.assert_close(train(start, spoilt, sampling, network), train(start, finite, sampling, network))


def test_one_sample_moves_a_step_by_at_most_the_clipping_norm() -> None:
    architecture, network = resident("mlp")
    start, data = torch.from_numpy(architecture.initial(3)), samples(9)
    sampling = Sampling(1.0, 1, 1e-9, 0.01, 9)
    with_all = train(start, data, sampling, network)
    for removed in range(9):
        remaining = [number for number in range(9) if number != removed]
        without = train(start, Samples(data.x[remaining] * 1.0, data.y[remaining]), sampling, network)
        assert float((with_all - without).norm()) <= 0.1 * 0.01 / 9 * 1.001


def test_momentum_and_the_proximal_term_act_on_the_noisy_gradient() -> None:
    architecture, network = resident("linear")
    start, data = torch.from_numpy(architecture.initial(3)), samples(8)
    anchor = start + 1
    sampling = Sampling(1.0, 1, 1e-9, 1e3, 8)
    trainer = Trainer(TrainSettings(dp="sample", dp_clip=1e3, momentum=0.9), CPU)
    single = job(start, data, sampling, pull=Pull(anchor, 2.0))
    after = trainer.train(single, network).parameters
    expected = start - 0.1 * (each_gradient(architecture, start, data).mean(0) + 2.0 * (start - anchor))
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        ({"rule": SharpnessAware(0.1)}, "a step rule"),
        ({"sample_weight": torch.ones(8)}, "sample weights"),
        ({"sample_weight": torch.ones(8), "resample": True}, "sample weights and resampling"),
    ],
)
def test_training_that_mixes_samples_is_refused(work: dict[str, Any], why: str) -> None:
    architecture, network = resident("linear")
    single = job(torch.from_numpy(architecture.initial(3)), samples(8), Sampling(1.0, 1, 1.0, 1.0, 8), **work)
    with pytest.raises(ValueError, match=f"dp = 'sample' .* with {why}"):
        Trainer(TrainSettings(dp="sample", dp_clip=1.0), CPU).train(single, network)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft", "fedprox", "fedper", "fedbabu", "lg-fedavg"])
def test_methods_train_with_dp_sgd(method: str, make_config: Callable[..., Any], federate: Callable[..., Any]) -> None:
    config = make_config(method, model="mlp", num_server_rounds=2, fedavg_ft_steps=1, fedbabu_steps=1, **SAMPLE)
    done = federate(config)
    assert [record.dropped for record in done.records] == [[], []]
    assert np.isfinite(done.strategy.model).all()
    again = federate(config)
    assert not np.array_equal(done.strategy.model, again.strategy.model)  # batches and noise are secret
    for client, info in done.strategy.clients.items():
        events = planned_events(done.strategy.settings, info.num_train)
        assert spent(events, 1e-5) <= 8.0, client


def test_clients_with_their_own_settings_spend_the_planned_epsilon(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client adds the noise for its own batch size and steps, and the server's ledger contains the same events."""
    used: dict[int, Sampling] = {}

    def record_sampling(settings: Settings, num_train: int) -> Sampling:
        used[num_train] = sampling_of(settings, num_train)
        return used[num_train]

    monkeypatch.setattr(jobs, "sampling_of", record_sampling)
    entries = {"0": {"batch-size": 3, "local-epochs": 2}, "1": {"local-steps": 7}, "2": {"lr": 0.01}}
    settings = {"client_settings": json.dumps(entries), "batch_size": 4, "num_server_rounds": 3, "fraction_train": 0.75}
    done = run(None, make_config("fedavg", model="linear", **settings, **SAMPLE))
    events: dict[int, list[Event]] = {}
    for event, facts in read_ledger((done.directory.path / "privacy.jsonl").read_text(encoding="utf-8")):
        for client in facts["clients"]:
            events.setdefault(client, []).append(event)
    sizes = {0: 21, 1: 12, 2: 8, 3: 1}
    steps = {0: (3 / 21, 2 * 7), 1: (4 / 12, 7), 2: (4 / 8, 2), 3: (1.0, 1)}
    assert events.keys() == sizes.keys()
    spent_by_client = {client: spent(of_client, 1e-5) for client, of_client in events.items()}
    for client, of_client in events.items():
        sampling, (probability, count) = used[sizes[client]], steps[client]
        assert {(e.sampling, e.count, e.noise_multiplier) for e in of_client} == {
            (sampling.probability, sampling.steps, sampling.noise_multiplier)
        }
        assert sampling.steps == count and 0 <= sampling.probability - probability <= 0.1 * probability
        if len(of_client) == most_trainings(done.settings):
            assert 7.9 < spent_by_client[client] <= 8.0
    assert len({sampling.noise_multiplier for sampling in used.values()}) == 4
    assert done.summary["privacy"]["epsilon"] == pytest.approx(max(spent_by_client.values()))


def test_dp_sgd_batches_do_not_depend_on_the_seed() -> None:
    drawn = [tuple(SecureGenerator().chosen(1000, 0.05)) for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.slow
def test_a_larger_epsilon_raises_the_accuracy(make_config: Callable[..., Any], federate: Callable[..., Any]) -> None:
    """A smoke test of the whole path: much noise gives guessing, little noise learns the tiny problem."""
    accuracy = {}
    for epsilon in (0.01, 1e3):
        config = make_config(
            "fedavg",
            num_server_rounds=6,
            local_epochs=4,
            lr=0.3,
            **{**SAMPLE, "dp_epsilon": epsilon},
            dp_scores="exact",
        )
        done = federate(config)
        accuracy[epsilon] = np.mean(
            [row["served_accuracy"] for row in done.records[-1].clients.values() if "served_accuracy" in row]
        )
    assert accuracy[1e3] > 0.8 > accuracy[0.01] + 0.1
