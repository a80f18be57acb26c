"""The FedALA client learns the weights that mix its model with the global model, and trains the mixture."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train, Trained
from posy.models.parameters import Entry, Part
from posy.strategies.fedala import FedALASettings
from posy.strategies.replies import Update

LAST = 10
"""Number of recent passes whose losses show whether the weights have converged."""
MOST_PASSES = 50
"""Maximum number of passes when a client learns its weights for the first time. Later rounds make one pass."""
LEARNING = 1
"""Value of ``Train.stream`` while a client learns its weights. All passes of a round see the same batches."""


class FedALAClient(PersonalClient):
    """Train from θ_i + (θ − θ_i) ⊙ W with W in [0, 1] (FedALA, Algorithm 1)."""

    method: FedALASettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Aggregate, train and send the model. Store the model and the weights."""
        start, weights = yield from self.aggregated(received["model"])
        trained: Trained = yield self.work(start)
        if weights is not None:
            self.stored["weights"] = weights
        return Update({"model": trained.parameters}, trained.loss), self.keep_model(trained.parameters)

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the mixture of both models, with weights that are learned only for this evaluation."""
        start, _ = yield from self.aggregated(received["model"])
        return self.plain(start)

    def mixed_part(self) -> tuple[Part, list[Entry]]:
        """Return the mixed part of the model, and the part's entries.

        BatchNorm's running statistics are not mixed. They are taken from the global model.
        """
        upper = self.method.mixed(self.architecture)
        entries = [entry for entry in self.layout.entries if entry.layer in upper and entry.trainable]
        return self.layout.select(lambda entry: entry in entries), entries

    def aggregated(self, shared: Tensor) -> Steps[tuple[Tensor, Tensor | None]]:
        """Return the starting point for training ``(d,)``, and the mixing weights.

        In its first round, a client starts from the global model and has no weights.
        """
        model, weights = self.stored.get("model"), self.stored.get("weights")
        if model is None:
            return shared, None
        part, entries = self.mixed_part()
        views = {"global": self.layout.views(shared), "gap": self.layout.views(shared - model)}
        context = {f"{kind} {entry.name}": views[kind][entry.name] for kind in views for entry in entries}
        upper = {entry.layer for entry in entries}
        fixed = {layer: 0.0 for layer in self.layout.layers if layer not in upper}
        steps = max(1, round(self.method.sample * len(self.data.y_train) / self.settings.train.batch_size))
        passes = MOST_PASSES if weights is None else 1
        weights = torch.ones(part.size, device=self.device) if weights is None else weights
        losses: list[Tensor] = []
        while len(losses) < passes and not settled(losses, self.method.threshold):
            trained: Trained = yield Train(
                part.put(shared.clone(), weights),
                mixture,
                context,
                rates=fixed,
                bounds=(0.0, 1.0),
                plain=True,
                lr=self.method.eta,
                steps=steps,
                stream=LEARNING,
            )
            weights = part.take(trained.parameters)
            losses.append(trained.loss)
        mixed = part.take(shared) - (1 - weights) * part.take(shared - model)
        return part.put(shared.clone(), mixed), weights


def mixture(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the loss of θ − (1 − W) ⊙ (θ − θ_i). In the mixed layers, the net's parameters are W."""
    mixed = {
        name: context[f"global {name}"] - (1 - tensor) * context[f"gap {name}"] if f"gap {name}" in context else tensor
        for name, tensor in net.tensors.items()
    }
    return net.loss(net.at(mixed)(batch.x), batch)


def settled(losses: list[Tensor], threshold: float) -> bool:
    """Return whether there are more than ten losses, and the last ten have a standard deviation below ``threshold``."""
    return len(losses) > LAST and bool(torch.stack(losses[-LAST:]).std(correction=0) < threshold)
