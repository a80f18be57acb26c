"""pFedMe's client: it moves its copy of the global model towards its personal one, step by step."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.rules import MoreauEnvelope
from posy.client_app.training.work import Pull, Train, Trained

GLOBAL, PERSONAL = 0, 1  # streams of batches


class PFedMeClient(PersonalClient):
    """Descend along lambda (w - theta), theta = argmin F_i + lambda/2 ||theta - w||^2 (pFedMe, Algorithm 1)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train w and send it; the personal model is found once more, from where w has come to."""
        method = self.method
        rule = MoreauEnvelope(method.strength, method.steps, method.personal_lr)
        trained: Trained = yield Train(received[0], rule=rule, stream=GLOBAL)
        update, _ = self.share(trained)
        personal: Trained = yield Train(
            trained.parameters,
            pull=Pull(trained.parameters, method.strength),
            steps=method.steps,
            lr=method.personal_lr,
            plain=True,
            stream=PERSONAL,
        )
        return update, self.keep_model(personal.parameters)
