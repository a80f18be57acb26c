"""The client that all methods share: FedAvg, with hooks that a method overrides.

A method writes its round as a generator. It yields :class:`~posy.client_app.training.work.Train` and
:class:`~posy.client_app.training.work.Forward` requests and receives their results, so that it reads like the paper's
algorithm. The training loop, evaluation, state and reply are written once, outside the methods. A hook without requests
is a plain function.
"""

from collections.abc import Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from flwr.client import NumPyClient
from flwr.common.typing import NDArrays
from torch import Tensor

from posy.client_app.jobs import Jobs, Steps
from posy.client_app.local_run import LocalRun
from posy.client_app.predictors import Member, Predictor
from posy.client_app.state import State, StoredTensors
from posy.client_app.training.work import Forward, Split, Train, Trained
from posy.client_app.workspace import Workspace
from posy.models.architecture import Architecture
from posy.randomness import model_seed
from posy.settings import SettingsError
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings

Config = Mapping[str, Any]
Received = Mapping[str, Tensor]
"""The arrays of the server's message on the device, by name. Do not write to them."""
Result = tuple[Update, Predictor | Tensor | None]
"""The result of a round: the update for the server, and the local model, as a predictor or as parameters ``(d,)``.
None if an evaluation computes the model."""


class PersonalClient(NumPyClient):
    """A NumPyClient for one client of a method.

    A method overrides the hooks between :meth:`local_round` and :meth:`assembled`.

    Parameters
    ----------
    client : int
        Index of the client, 0 to M − 1.
    workspace : Workspace
        Data, networks and trainer of this process.
    state : State
        Arrays that the client stored in earlier rounds.

    Attributes
    ----------
    settings : Settings
        The settings of the run.
    method : MethodSettings
        The settings of the method.
    data : ClientData
        The client's samples.
    architecture, layout : Architecture, Layout
        The method's network, and the order of its tensors in the flat vector.
    shared, personal : Part
        The parts of the flat vector that the client sends, and that stay with it.
    round, lr : int, float
        The round and its learning rate.
    """

    method: MethodSettings
    personal_in_every_evaluation = False
    """Whether the local model is scored in evaluations instead of the training round."""

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        self.client = client
        self.workspace = workspace
        self.state = state
        self.stored = StoredTensors(state, workspace.device)
        """The client's state as tensors: ``self.stored["control"]`` lasts from round to round."""
        self.settings = workspace.settings
        self.method = workspace.settings.method
        self.device = workspace.device
        self.data = workspace.client_data(client)
        self.num_train = len(self.data.y_train)
        """Number of training samples with which the client has joined."""
        self.architecture: Architecture = self.method.network(workspace.architecture, self.settings.data.num_clients)
        self.layout = self.architecture.layout
        self.shared, self.personal = self.architecture.divided(self.method.personal(self.architecture))
        self.round = 0
        self.lr = 0.0
        self.jobs = Jobs(self)

    # -- hooks of a method: by default FedAvg, with the method's personal layers -----------------------

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the served model for one round (FedAvg, ClientUpdate)."""
        served = self.served_model(received, config)
        if isinstance(served, Generator):
            served = yield from served
        trained: Trained = yield self.work(served.members[0].parameters)
        return self.share(trained)

    def work(self, start: Tensor) -> Train:
        """Return the local training that starts from a model ``(d,)``."""
        return Train(start)

    def served_model(self, received: Received, config: Config) -> Predictor | Steps[Predictor]:
        """Return the served model: the client's model after the server's message and before training."""
        return self.plain(self.assembled(received))

    def personal_model(
        self, received: Received, config: Config
    ) -> Predictor | Steps[Predictor | None] | Steps[Predictor] | None:
        """Return the local model of a client that has not trained in this round.

        The default is the stored model, or None if the client has not stored one.
        """
        stored = self.stored.get("model")
        return None if stored is None else self.plain(stored)

    def assembled(self, received: Received) -> Tensor:
        """Return the model ``(d,)`` of the received shared layers and the client's personal layers."""
        shared = received["model"]
        if shared.shape != (self.shared.size,):
            raise SettingsError(
                f"the server's message has a model of shape {tuple(shared.shape)}; the client expects "
                f"{self.shared.size} numbers"
            )
        if not self.personal.size:
            return shared
        return self.shared.put(self.with_personal(self.initial()), shared)

    # -- helpers for methods -------------------------------------------------------------------------

    def share(self, trained: Trained) -> Result:
        """Store the personal layers of a trained model, and return its shared layers and itself as the local model."""
        self.keep_personal(trained.parameters)
        update = Update({"model": self.shared.take(trained.parameters)}, trained.loss)
        return update, self.plain(trained.parameters)

    def with_personal(self, fresh: Tensor) -> Tensor:
        """Return a copy of a model ``(d,)``, or of several ``(K, d)``, with the stored personal layers, if any."""
        stored = self.stored.get("personal")
        return fresh.clone() if stored is None else self.personal.put(fresh.clone(), stored)

    def kept_model(self, otherwise: Tensor) -> Tensor:
        """Return the model that the client has stored, or ``otherwise`` if it has not stored one."""
        return self.stored.get("model", otherwise)

    def keep_model(self, parameters: Tensor) -> Predictor:
        """Store the client's model ``(d,)`` and return it as a predictor."""
        self.stored["model"] = parameters
        return self.plain(parameters)

    def keep_personal(self, parameters: Tensor) -> None:
        """Store the personal layers, if any, of one model ``(d,)`` or of several ``(K, d)``."""
        if self.personal.size:
            self.stored["personal"] = self.personal.take(parameters).clone()

    def plain(self, parameters: Tensor, chosen: str = "") -> Predictor:
        """Return a single model of the method's network as a predictor."""
        return Predictor([Member(parameters, self.architecture)], chosen)

    def initial(self, number: int = 0) -> Tensor:
        """Return the initial parameters ``(d,)`` of one of several models, as on the server. Do not change them."""
        return self.workspace.initial(self.architecture, model_seed(self.settings.run.seed, number))

    def best_of(self, models: Tensor) -> Steps[Predictor]:
        """Return the model with the lowest training loss of K models ``(K, d)``."""
        best = int((yield from self.losses(models)).argmin())
        return self.plain(models[best], str(best))

    def predict(self, predictor: Predictor, split: Split) -> Steps[Tensor]:
        """Return log-probabilities ``(n, C)`` on a split."""
        outputs = []
        for member in predictor.members:
            outputs.append((yield Forward(member.parameters, split, member.architecture)))
        return predictor.log_probabilities(outputs)

    def losses(self, models: Tensor, split: Split = "train") -> Steps[Tensor]:
        """Return the loss ``(K,)`` of each of K models ``(K, d)`` on a split. A diverged model has an infinite loss.

        This is the loss that training minimises, with the run's class weights.
        """
        logits, labels = (yield Forward(models, split, self.architecture)), self.jobs.samples(split).y
        k, n, _ = logits.shape
        criterion = self.workspace.criterion or (lambda logits, y: F.cross_entropy(logits, y, reduction="none"))
        losses = criterion(logits.flatten(0, 1), labels.repeat(k)).view(k, n)
        weight = self.jobs.class_weights(split)
        losses = (losses if weight is None else losses * weight).mean(1)
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    # -- NumPyClient ---------------------------------------------------------------------------------

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train, and return the arrays of the reply in the order of their declaration."""
        received = dict(zip(self.method.sent, parameters, strict=True))
        arrays, num_examples, metrics = self.jobs.drive(LocalRun(self, received, config).train())
        return list(arrays.values()), num_examples, metrics

    def evaluate(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score the served model, and with ``evaluate-personal`` the local model, on the client's test split."""
        received = dict(zip(self.method.sent, parameters, strict=True))
        loss, num_examples, metrics = self.jobs.drive(LocalRun(self, received, config).evaluate())
        assert isinstance(loss, float)
        return loss, num_examples, metrics
