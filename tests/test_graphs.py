"""Training of stacked clients on a GPU: schedules indexed on the device, CUDA graphs, unfolded convolutions."""

import copy
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.client_app.training import unfolded as unfolded_module
from posy.client_app.training.batches import Samples, Schedule, Share
from posy.client_app.training.graphs import Captured, Graphs
from posy.client_app.training.networks import Network
from posy.client_app.training.rules import MetaGradient, Mixed, MoreauEnvelope, SharpnessAware
from posy.client_app.training.trainer import Trainer
from posy.client_app.training.unfolded import unfold_convolutions
from posy.client_app.training.work import Job, Train, Trained
from posy.data.task import Task
from posy.models.architecture import Architecture
from posy.strategies.run_settings import TrainSettings

COUNTS = (90, 37, 61, 5)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RULES: dict[str, Any] = {
    "plain": None,
    "SAM": SharpnessAware(0.1),
    "Per-FedAvg": MetaGradient(0.01, 0.01),
    "pFedMe": MoreauEnvelope(1.0, 3, 0.05),
    "APFL": Mixed(0.3),
}


def samples(count: int, seed: int, device: torch.device) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 20, 20, generator=generator)
    return Samples(x.to(device), torch.randint(0, 5, (count,), generator=generator).to(device))


def train(
    device: torch.device, model: str = "cnn", *, graphs: bool = True, rule: Any = None, rounds: int = 1, **settings: Any
) -> Any:
    architecture = Architecture(model, Task("image", (1, 20, 20), tuple("abcde")))
    network = Network(architecture.build, architecture.layout, device, settings.pop("criterion", None))
    trainer = Trainer(TrainSettings(batch_size=4, local_epochs=2, momentum=0.5, stack="vmap", **settings), device)
    if not graphs:
        trainer._graphs = None
    models = 2 if isinstance(rule, Mixed) else 1
    start = torch.stack([torch.from_numpy(architecture.initial(k)) for k in range(models)]).to(device)
    starts = [start if models > 1 else start[0]] * len(COUNTS)
    for _ in range(rounds):
        inputs = [(samples(n, n, device), torch.Generator().manual_seed(n)) for n in COUNTS]
        works = [Train(parameters, rule=rule) for parameters in starts]
        jobs = [Job(work, data, generator, 0.05) for work, (data, generator) in zip(works, inputs, strict=True)]
        results = trainer.train_together(jobs, network)
        assert all(isinstance(result, Trained) for result in results)
        starts = [result.parameters for result in results if isinstance(result, Trained)]
    return trainer, torch.stack([parameters.cpu() for parameters in starts])


def test_schedule_at_a_device_index_equals_iteration() -> None:
    device = torch.device("cpu")

    def schedule() -> Schedule:
        shares = []
        for count in COUNTS:
            weight = torch.linspace(0.5, 2.0, count)
            shares.append(Share(samples(count, 0, device), [None, 2], torch.Generator().manual_seed(0), 4, 1, weight))
        return Schedule(shares)

    indexed, steps = schedule(), list(schedule())
    assert list(indexed.runs()) == [(0, 4, 4), (4, 12, 3), (12, 18, 2), (18, 25, 1)]  # 25, 18, 12 and 4 steps
    for begin, end, active in indexed.runs():
        for number in range(begin, end):
            (batch, count), (expected_batch, expected_count) = indexed.at(torch.tensor([number]), active), steps[number]
            assert len(batch.y) == active and torch.equal(count, expected_count)
            for tensor, expected in zip(batch, expected_batch, strict=True):
                if tensor is None or expected is None:
                    assert tensor is expected
                else:
                    assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 5),
        nn.Conv2d(3, 1, 2),
        nn.Conv2d(3, 4, (3, 2), stride=2, padding=(1, 0), bias=False),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 3, 3, groups=3),
        nn.Conv2d(3, 4, 3, dilation=2),
    ],
    ids=repr,
)
def test_unfolded_convolution_equals_the_convolution(layer: nn.Conv2d) -> None:
    x, weights = torch.randn(2, 6, 3, 9, 8), torch.randn(2, *layer.weight.shape)
    unfolded = unfold_convolutions(copy.deepcopy(layer))

    def outputs_and_gradients(module: nn.Module) -> tuple[Tensor, Tensor]:
        def squares(weight: Tensor, inputs: Tensor) -> Tensor:
            return torch.func.functional_call(module, {"weight": weight}, (inputs,)).square()

        gradients = torch.func.grad(lambda weight, inputs: squares(weight, inputs).sum(), argnums=(0, 1))
        return torch.func.vmap(squares)(weights, x), *torch.func.vmap(gradients)(weights, x)

    for output, expected in zip(outputs_and_gradients(unfolded), outputs_and_gradients(layer), strict=True):
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_large_convolutions_are_not_unfolded(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(unfolded_module, "COLUMNS", limit)
    layer, calls = nn.Conv2d(3, 4, 5), []

    def count_calls(*inputs: Any) -> Tensor:
        calls.append(inputs)
        return F.conv2d(*inputs)

    monkeypatch.setattr(layer, "_conv_forward", count_calls)
    x = torch.randn(2, 3, 9, 9)
    assert torch.allclose(unfold_convolutions(layer)(x), F.conv2d(x, layer.weight, layer.bias), atol=1e-5)
    assert len(calls) == (limit == 0)


class Replayed:
    """A substitute on the CPU for the graph of a step. Each replay runs the next step."""

    def __init__(self, step: Any, number: int, clients: int) -> None:
        self._step, self._numbers, self._clients = step, itertools.count(number), clients

    def replay(self) -> None:
        self._step(next(self._numbers), self._clients)


def test_each_step_runs_once_and_known_kinds_need_no_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = Graphs(torch.device("cpu"))
    done: list[tuple[int, int]] = []
    captures: list[int] = []

    def captured(kind: Any, step: Any, number: int, clients: int) -> Captured:
        captures.append(number)
        return Captured(Replayed(step, number, clients), torch.tensor([number]))  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_capture", captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    runs = [(0, 10, 3), (10, 14, 2), (14, 30, 1)]  # two clients take too few steps after the warm-up for a capture
    for expected in ([2, 16], [1, 14], [1, 14]):  # the first step of a training always runs without a capture
        done.clear()
        captures.clear()
        graphs.replay("plain", runs, lambda number, clients: done.append((int(number), clients)), lambda: None)
        assert done == [(number, clients) for begin, end, clients in runs for number in range(begin, end)]
        assert captures == expected


@needs_gpu
@pytest.mark.parametrize("name", RULES)
def test_captured_steps_equal_launched_steps(name: str) -> None:
    device = torch.device("cuda")
    trainer, captured = train(device, rule=RULES[name])
    assert trainer._graphs._stream is not None and not trainer._graphs._refused
    _, launched = train(device, rule=RULES[name], graphs=False)
    assert torch.allclose(captured, launched, rtol=0, atol=1e-5)
    alone = train(torch.device("cpu"), rule=RULES[name])[1]
    assert (captured - alone).norm() < 5e-3 * captured.norm()  # rounding errors grow over forty steps


@needs_gpu
def test_later_rounds_capture_steps_without_warm_up() -> None:
    trainer, captured = train(torch.device("cuda"), rounds=3)
    # Four clients take only four steps together, too few for a capture after the warm-up.
    assert not trainer._graphs._refused and sorted(clients for _, clients in trainer._graphs._captures) == [1, 2, 3]
    _, launched = train(torch.device("cuda"), rounds=3, graphs=False)
    assert torch.allclose(captured, launched, rtol=0, atol=1e-4)


@needs_gpu
def test_synchronising_step_is_launched_without_capture(caplog: pytest.LogCaptureFixture) -> None:
    def waiting(logits: Tensor, labels: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    with caplog.at_level(logging.WARNING):
        trainer, synchronised = train(torch.device("cuda"), criterion=waiting)
    assert len(trainer._graphs._refused) == 1 and "cannot be captured" in caplog.text
    _, plain = train(torch.device("cuda"), graphs=False)
    assert torch.allclose(synchronised, plain, rtol=0, atol=1e-5)
