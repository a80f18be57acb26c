"""The pFedMe client moves its copy of the global model step by step towards a personal model."""

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.rules import MoreauEnvelope
from posy.client_app.training.work import Train, Trained
from posy.strategies.pfedme import PFedMeSettings
from posy.strategies.replies import Update


class PFedMeClient(PersonalClient):
    """Descend along lambda (w - theta) with theta = argmin F_i + lambda/2 ||theta - w||^2 (pFedMe, Algorithm 1)."""

    method: PFedMeSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train w, send it if the client is in the round's sample, and store the personal model."""
        method, train = self.method, self.settings.train
        rule = MoreauEnvelope(
            method.strength, method.steps, method.personal_lr, train.weight_decay, train.max_grad_norm
        )
        trained: Trained = yield Train(received["model"], rule=rule)
        assert trained.auxiliary is not None  # the rule stores theta in it
        sent = {"model": trained.parameters} if config.get("sampled", True) else {}
        personal = trained.auxiliary if method.scored == "theta" else trained.parameters
        return Update(sent, trained.loss), self.keep_model(personal)
