"""pFedMe's client: it moves its copy of the global model towards its personal one, step by step."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.rules import MoreauEnvelope
from posy.client_app.training.work import Train, Trained


class PFedMeClient(PersonalClient):
    """Descend along lambda (w - theta), theta = argmin F_i + lambda/2 ||theta - w||^2 (pFedMe, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train w and send it; the personal model is the last theta, as in the authors' program."""
        method = self.method
        rule = MoreauEnvelope(method.strength, method.steps, method.personal_lr)
        trained: Trained = yield Train(received[0], rule=rule)
        assert trained.beside is not None  # this rule keeps theta there
        update, _ = self.share(trained)
        return update, self.keep_model(trained.beside)
