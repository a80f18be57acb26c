"""FedFew's client: it trains all K models over the same batches and reports their losses."""

import numpy as np
import torch
from torch import Tensor

from posy.client_app.base import Arrays, Config, PersonalClient, Predictor, Steps, Update, array_of
from posy.client_app.training.work import Train, Trained
from posy.models.parameters import Part


class FedFewClient(PersonalClient):
    """Train θ_1..θ_K, send Δ_ik = θ_k^local − θ_k and L_ik (Algorithm 1, lines 3-11)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the K models in one pass."""
        start = self.whole(received[0])
        trained: Trained = yield Train(start)
        if self.method.personal_head:
            self.keep("heads", self.layout.part(["head"]).take(trained.parameters).clone())
        delta = self.body.take(trained.parameters - start)
        best = int(trained.loss.argmin())
        local = self.plain(trained.parameters[best], str(best))
        return Update([array_of(delta), array_of(trained.loss)], float(trained.loss[best]), local)

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Choose k_i = argmin_k of the training loss of the served models (Algorithm 1, lines 19-24)."""
        models = self.whole(received[0])
        best = int((yield from self.train_losses(models)).argmin())
        return self.plain(models[best], str(best))

    def noised_from(self, received: Arrays) -> Arrays:
        """Return zeros: the updates Δ ``(K, d)`` are changes already; the losses ``(K,)`` get no noise."""
        return [np.zeros_like(received[0])]

    @property
    def body(self) -> Part:
        """The part of the models that is aggregated."""
        return self.layout.without(["head"] if self.method.personal_head else [])

    def whole(self, shared: Tensor) -> Tensor:
        """Return the K whole models ``(K, d)``: what was received, with the client's own heads if it keeps any."""
        if not self.method.personal_head:
            return shared
        heads = self.recall("heads")
        distinct = self.method.initialisation == "distinct"
        rows = [self.initial(k if distinct else 0) for k in range(len(shared))] if heads is None else []
        models = torch.stack(rows) if rows else torch.empty(len(shared), self.layout.size, device=self.device)
        if heads is not None:
            self.layout.part(["head"]).put(models, heads)
        return self.body.put(models, shared)
