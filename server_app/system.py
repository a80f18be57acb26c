"""Compute system accuracy: the accuracy of the federation as a whole on inputs of unknown origin."""

from collections.abc import Collection, Sequence
from logging import WARNING
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.predictors import Predictor
from posy.client_app.training.batches import Samples
from posy.client_app.training.work import Forward
from posy.client_app.workspace import Workspace
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.server_app.results import RunDirectory
from posy.spread import majority_vote
from posy.storage import load_arrays
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.settings import MethodSettings, Settings

ON_NODES = "the clients' models stay on their nodes"
"""Why the server has no models of clients on other machines."""


class SystemAccuracy(NamedTuple):
    """The accuracy of the federation as a whole."""

    accuracy: float
    routed: npt.NDArray[np.int64] | None = None
    """Number of samples per true and chosen client ``(M, M)``, if the method chooses a client for each sample."""

    @property
    def routing_accuracy(self) -> float | None:
        """The fraction of samples for which the method chooses the client to which the sample belongs."""
        return None if self.routed is None else float(np.trace(self.routed) / self.routed.sum())


def system_accuracy(
    settings: Settings, strategy: PersonalisedStrategy, workspace: Workspace, directory: RunDirectory
) -> SystemAccuracy | None:
    """Return the accuracy on the pooled test splits of all members, or None if it is disabled or not available.

    A method with ``routes`` chooses a client for each sample. With any other method, the clients' local models vote.
    """
    setting, routes = settings.run.system_accuracy, settings.method.routes
    if setting == "off" or (setting == "auto" and not routes):
        return None
    paths = {c: directory.models / f"client-{c}.safetensors" for c in strategy.members}
    reason = models_withheld(settings, workspace)
    if not reason and settings.data.scaling == "client":
        reason = "with scaling = client, a query would need the scale of its client"
    if not reason and not any(path.exists() for path in paths.values()):
        reason = ON_NODES
    if reason:
        log(WARNING, "system accuracy is not available: %s", reason)
        return None
    # If a client dropped out of the last round, its stored model may be from an earlier round.
    stored_clients = [
        c for c, path in paths.items() if "n_train" in strategy.record.clients.get(c, {}) and path.exists()
    ]
    if missing := sorted(paths.keys() - set(stored_clients)):
        log(WARNING, "system accuracy: the models of clients %s from the last round are missing", missing)
        if routes or not stored_clients:
            return None
    x, y, owner = pooled_test(workspace, strategy.members)
    if routes:
        return routed_accuracy(strategy, workspace, directory.models, x, y, owner)
    outputs = (
        stored_probabilities(workspace, strategy.architecture, load_arrays(paths[c]), x, y) for c in stored_clients
    )
    winners = majority_vote((output.argmax(-1).cpu().numpy() for output in outputs), workspace.task.num_classes)
    return SystemAccuracy(float((winners == y.cpu().numpy()).mean()))


def models_withheld(settings: Settings, workspace: Workspace) -> str:
    """Return why the clients store no models for the server, or an empty string if they may store them."""
    if settings.run.secure_aggregation:
        return "with secure-aggregation, the clients keep their models and test samples"
    if workspace.of_sites:
        return "the sites keep their models and test samples"
    return "" if settings.run.save_models else "it needs save-models = true"


def routed_accuracy(
    strategy: PersonalisedStrategy, workspace: Workspace, models: Path, x: Tensor, y: Tensor, owner: Tensor
) -> SystemAccuracy:
    """Return the accuracy on the pooled test samples, where the head of the chosen client classifies each sample.

    The folder ``models`` contains the heads. ``owner`` ``(n,)`` is the client to which each sample belongs.
    """
    layout = strategy.architecture.layout
    model = np.empty(strategy.size, np.float32)
    strategy.shared.put(model, strategy.model)
    head = layout.part(["head"])
    network = workspace.network(strategy.architecture)
    chosen: Tensor | None = None
    correct = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for client in strategy.members:
        arrays = load_arrays(models / f"client-{client}.safetensors")
        head.put(model, head.take(layout.flatten(arrays)))
        parameters = torch.from_numpy(model).to(workspace.device)
        classes, clients = workspace.trainer.forward(Forward(parameters), network, Samples(x, y))
        if chosen is None:  # the same for every head, because routing uses only shared layers
            chosen = chosen_clients(strategy, clients)
        routed_here = chosen == client
        correct[routed_here] = classes[routed_here].argmax(dim=-1) == y[routed_here]
    assert chosen is not None
    routed = routing_matrix(owner.cpu().numpy(), chosen.cpu().numpy(), strategy.num_clients)
    return SystemAccuracy(float(correct.double().mean()), routed)


def chosen_clients(strategy: PersonalisedStrategy, outputs: Tensor) -> Tensor:
    """Return the client chosen for each sample, ``(n,)``, given the outputs ``(n, M)`` for the clients."""
    weights = np.ones(strategy.num_clients)  # newcomers may keep this weight, because they are never chosen
    for client in strategy.clients:
        weights[client] = strategy.exchange.weight(client)  # the client's prior in the averaged loss
    return routing_scores(strategy.method, outputs, weights, strategy.newcomers).argmax(dim=-1)


def routing_scores(
    method: MethodSettings, outputs: Tensor, weights: npt.NDArray[np.float64], absent: Collection[int]
) -> Tensor:
    """Return a method's scores ``(n, M)`` for samples and clients; the scores of absent clients are minus infinity."""
    scores: Tensor = method.client_scores(outputs, weights).clone()
    scores[..., list(absent)] = -torch.inf
    return scores


def routing_matrix(
    owner: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64], num_clients: int
) -> npt.NDArray[np.int64]:
    """Return the number of samples per true client (row) and chosen client (column)."""
    matrix = np.zeros((num_clients, num_clients), np.int64)
    np.add.at(matrix, (owner, chosen), 1)
    return matrix


def pooled_test(workspace: Workspace, clients: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples in the clients' test splits, with their labels and the client to which each sample belongs."""
    data = {client: workspace.client_data(client) for client in clients}
    x = torch.cat([split.x_test for split in data.values()])
    y = torch.cat([split.y_test for split in data.values()])
    owner = torch.cat([torch.full((len(split.y_test),), client) for client, split in data.items()])
    return x, y, owner


def stored_probabilities(
    workspace: Workspace, architecture: Architecture, arrays: dict[str, FloatArray], x: Tensor, y: Tensor
) -> Tensor:
    """Return the class probabilities ``(n, C)`` of samples, given the arrays of a stored model."""
    predictor = Predictor.from_arrays(arrays, architecture, workspace.settings.method)
    return outputs_of(workspace, predictor, Samples(x, y)).exp()


def outputs_of(workspace: Workspace, predictor: Predictor, samples: Samples) -> Tensor:
    """Return a predictor's outputs ``(n, C)`` for samples on the device, as :meth:`Predictor.combine` returns them."""
    outputs = []
    for member in predictor.members:
        work = Forward(member.parameters.to(workspace.device))
        outputs.append(workspace.trainer.forward(work, workspace.network(member.architecture), samples))
    return predictor.combine(outputs)
