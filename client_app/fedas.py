"""FedAS's client: it aligns the received body with what its own features were, then trains the whole network."""

from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.prototypes import class_means, distance_to_prototypes
from posy.client_app.training.batches import Batch
from posy.client_app.training.rules import FisherTrace
from posy.client_app.training.work import Context, Forward, Net, Train, Trained

LOCAL, ALIGNMENT, FISHER = 0, 1, 2  # streams of batches


class FedASClient(PersonalClient):
    """Align, train, and measure the Fisher information (FedAS, Algorithm 1).

    The prototypes of a model are kept in its place: the samples are the same in the next round.
    """

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train, and send the body with the trace of the Fisher information."""
        start = self.assembled(received)
        prototypes, known = self.recall("prototypes"), self.recall("known")
        if self.method.align_epochs and prototypes is not None and known is not None:
            context, epochs = {"prototypes": prototypes, "known": known}, self.method.align_epochs
            near: Trained = yield Train(start, alignment, context, rates={"head": 0.0}, epochs=epochs, stream=ALIGNMENT)
            start = near.parameters
        trained: Trained = yield Train(start, stream=LOCAL)
        features, _ = yield Forward(trained.parameters, "train", features=True)
        means, counts = class_means(features, self.data.y_train, self.data.num_classes)
        self.keep("prototypes", means)
        self.keep("known", (counts > 0).float())
        fisher: Trained = yield Train(trained.parameters, rule=FisherTrace(), plain=True, epochs=1, stream=FISHER)
        update, local = self.share(trained)
        update.arrays.append(fisher.loss)
        return update, local


def alignment(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the distance of the features to the prototypes of the client's last model."""
    return distance_to_prototypes(net.features(batch.x)[0], batch, context)
