"""APFL's client: it trains the global model w, and its own v as part of the mixture of both."""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.rules import Mixed
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update

TOGETHER, SHARE = 0, 1  # streams of batches


class APFLClient(PersonalClient):
    """Minimise F_i(w), and F_i(alpha v + (1 - alpha) w) over v (APFL, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train both over the same batches; send w, keep v and the mixture."""
        kept = self.recall("own")
        own = self.initial() if kept is None else kept
        share = yield from self.share_of_own(own, received[0])
        both: Trained = yield Train(torch.stack([received[0], own]), rule=Mixed(share), stream=TOGETHER)
        shared, own = both.parameters
        if self.method.adaptive:
            self.keep("alpha", torch.tensor(share, dtype=torch.float64))
        self.keep("own", own.clone())
        return Update([shared], both.loss[1]), self.keep_model(torch.lerp(shared, own, share))

    def share_of_own(self, own: Tensor, shared: Tensor) -> Steps[float]:
        """Return alpha, after a step along its gradient <v - w, grad F_i(mixture)> where it is adaptive."""
        kept = self.recall("alpha")
        alpha = self.method.alpha if kept is None else float(kept)
        if not self.method.adaptive:
            return alpha
        mixture = torch.lerp(shared, own, alpha)
        stepped: Trained = yield Train(mixture, steps=1, plain=True, stream=SHARE)
        step = torch.dot(own - shared, stepped.parameters - mixture)  # the gradient times -lr
        return min(1.0, max(0.0, alpha + float(step)))
