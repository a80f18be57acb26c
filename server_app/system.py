"""System accuracy: how well the federation as a whole answers a query that names no client."""

from collections.abc import Sequence
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.base import Predictor, combined
from posy.client_app.training.batches import Samples
from posy.client_app.training.work import Forward
from posy.client_app.workspace import Workspace
from posy.metrics import majority_vote
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.server_app.results import RunDirectory
from posy.storage import load_arrays
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.feddrm import FedDRM
from posy.strategies.settings import Settings


def system_accuracy(
    settings: Settings, strategy: PersonalisedStrategy, workspace: Workspace, directory: RunDirectory
) -> float | None:
    """Return the accuracy on the pooled test sets of all clients, or None where it is not asked for or to be had.

    Clients that are set aside have no part in it. FedDRM routes queries. The clients' local models vote with all other
    methods (the FedDRM paper, Section 3.2).
    """
    wanted = settings.run.system_accuracy
    routes = isinstance(strategy, FedDRM)
    if wanted == "off" or (wanted == "auto" and not routes):
        return None
    paths = {c: directory.models / f"client-{c}.safetensors" for c in strategy.members}
    reason = ""
    if settings.run.secure_aggregation:
        reason = "with secure-aggregation the clients keep their models and test samples"
    elif workspace.of_sites:
        reason = "the sites keep their test samples"
    elif not settings.run.save_models:
        reason = "it needs save-models = true"
    elif not any(path.exists() for path in paths.values()):
        reason = "the clients' models stay on their nodes"
    if reason:
        log(WARNING, "system accuracy is not available: %s", reason)
        return None
    # A client that the last round has lost may have left the model of an earlier one.
    stored = [c for c, path in paths.items() if "n_train" in strategy.record.clients.get(c, {}) and path.exists()]
    if missing := sorted(paths.keys() - set(stored)):
        log(WARNING, "system accuracy: the last models of clients %s are missing", missing)
        if routes or not stored:
            return None
    x, y, owner = pooled_test(workspace, strategy.members)
    if isinstance(strategy, FedDRM):
        return routed_accuracy(strategy, workspace, directory.models, x, y, owner)
    outputs = (stored_probabilities(workspace, strategy.architecture, load_arrays(paths[c]), x, y) for c in stored)
    winners = majority_vote((output.argmax(-1).cpu().numpy() for output in outputs), workspace.task.num_classes)
    return float((winners == y.cpu().numpy()).mean())


def routed_accuracy(strategy: FedDRM, workspace: Workspace, models: Path, x: Tensor, y: Tensor, owner: Tensor) -> float:
    """Return the accuracy where each pooled test sample is answered by the classifier of the client it is routed to.

    The classifiers belong to the stored ``models``; ``owner`` ``(n,)`` is the client that each sample is from.
    """
    layout = strategy.architecture.layout
    whole = np.empty(strategy.size, np.float32)
    strategy.shared.put(whole, strategy.model)
    head = layout.part(["head"])
    network = workspace.network(strategy.architecture)
    chosen: Tensor | None = None
    correct = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for client in strategy.members:
        arrays = load_arrays(models / f"client-{client}.safetensors")
        head.put(whole, head.take(layout.flatten(arrays)))
        parameters = torch.from_numpy(whole).to(workspace.device)
        classes, clients = workspace.trainer.forward(Forward(parameters), network, Samples(x, y))
        if chosen is None:  # the same for every classifier: routing uses shared layers alone
            chosen = strategy.choose(clients)
        mine = chosen == client
        correct[mine] = classes[mine].argmax(dim=-1) == y[mine]
    assert chosen is not None
    strategy.note_routing(owner.cpu().numpy(), chosen.cpu().numpy())
    return float(correct.float().mean())


def pooled_test(workspace: Workspace, clients: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the test samples, labels and true client of some clients' test splits."""
    data = {client: workspace.client_data(client) for client in clients}
    x = torch.cat([own.x_test for own in data.values()])
    y = torch.cat([own.y_test for own in data.values()])
    owner = torch.cat([torch.full((len(own.y_test),), client) for client, own in data.items()])
    return x, y, owner


def stored_probabilities(
    workspace: Workspace, architecture: Architecture, arrays: dict[str, FloatArray], x: Tensor, y: Tensor
) -> Tensor:
    """Return the probabilities ``(n, C)`` of a model as :class:`~posy.client_app.base.PersonalClient` stored it."""
    predictor = Predictor.from_arrays(arrays, architecture, workspace.settings.method)
    outputs = []
    for member in predictor.members:
        work = Forward(member.parameters.to(workspace.device))
        logits = workspace.trainer.forward(work, workspace.network(member.architecture), Samples(x, y))
        outputs.append((logits[0] if isinstance(logits, tuple) else logits).log_softmax(dim=-1))
    coefficients = torch.tensor([member.coefficient for member in predictor.members], device=workspace.device)
    return combined(torch.stack(outputs), coefficients, predictor.logarithms).exp()
