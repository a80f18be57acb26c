"""FedALA's client: it learns weights with which it aggregates its own model and the global one, and trains the result.

It departs from the paper where a pass ends: each sees samples of its own, and what has to settle is the mean loss of
the passes, which are not more than 50.
"""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train, Trained
from posy.strategies.replies import Update

SETTLED, LAST = 0.1, 10
"""The weights have settled when the losses of so many passes after the first have a smaller standard deviation."""
MOST_PASSES = 50


class FedALAClient(PersonalClient):
    """Train from theta_i + (theta - theta_i) * W with W in [0, 1] (FedALA, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Aggregate, train and send the whole model; keep it and the weights."""
        start, weights = yield from self.aggregated(received[0])
        trained: Trained = yield self.work(start)
        if weights is not None:
            self.keep("weights", weights)
        return Update([trained.parameters], trained.loss), self.keep_model(trained.parameters)

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Aggregate, with weights that are learned anew next time."""
        start, _ = yield from self.aggregated(received[0])
        return self.plain(start)

    def aggregated(self, shared: Tensor) -> Steps[tuple[Tensor, Tensor | None]]:
        """Return where training begins ``(d,)`` and the weights; before the first round that is the global model."""
        own, kept = self.recall("model"), self.recall("weights")
        if own is None:
            return shared, None
        upper = self.method.mixed(self.architecture)
        part = self.layout.part(upper)
        names = [entry.name for entry in self.layout.entries if entry.layer in upper]
        views = {"global": self.layout.views(shared), "gap": self.layout.views(shared - own)}
        context = {f"{which} {name}": views[which][name] for which in views for name in names}
        fixed = {layer: 0.0 for layer in self.layout.layers if layer not in upper}
        steps = max(1, round(self.method.sample * len(self.data.y_train) / self.settings.train.batch_size))
        weights = torch.ones(part.size, device=self.device) if kept is None else kept
        losses: list[Tensor] = []
        while len(losses) < (MOST_PASSES if kept is None else 1) and not settled(losses):
            trained: Trained = yield Train(
                part.put(shared.clone(), weights),
                mixture,
                context,
                rates=fixed,
                bounds=(0.0, 1.0),
                plain=True,
                lr=self.method.eta,
                steps=steps,
                stream=1 + len(losses),
            )
            weights = part.take(trained.parameters)
            losses.append(trained.loss)
        mixed = part.take(shared) - (1 - weights) * part.take(shared - own)
        return part.put(shared.clone(), mixed), weights


def mixture(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the cross-entropy of theta - (1 - W) * (theta - theta_i), where the parameters of some layers are W."""
    mixed = {
        name: context[f"global {name}"] - (1 - tensor) * context[f"gap {name}"] if f"gap {name}" in context else tensor
        for name, tensor in net.tensors.items()
    }
    return net.loss(net.at(mixed)(batch.x), batch)


def settled(losses: list[Tensor]) -> bool:
    """Tell whether the last losses hardly differ."""
    return len(losses) > LAST and bool(torch.stack(losses[-LAST:]).std(correction=0) < SETTLED)
