"""A method's client-side hooks, and the helpers that they use."""

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from posy.client_app.predictors import Member, Predictor
from posy.client_app.state import State, StoredTensors
from posy.client_app.training.work import Forward, Split, Train, Trained
from posy.client_app.workspace import Workspace
from posy.models.architecture import Architecture
from posy.randomness import model_seed
from posy.settings import SettingsError
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings

R = TypeVar("R")
Steps = Generator[Train | Forward, Any, R]
"""A generator that yields requests and returns a result."""
Config = Mapping[str, Any]
Received = Mapping[str, Tensor]
"""The arrays of the server's message on the device, keyed by name. Do not write to them."""
Result = tuple[Update, Predictor | Tensor | None]
"""The result of a round: the update for the server, and the local model, as a predictor or as parameters ``(d,)``. The
local model is None if it is computed later, during evaluation."""


class ClientHooks:
    """The functions that a method may override on a client, and helpers for them.

    Parameters
    ----------
    client : int
        Index of the client, 0 to M − 1.
    workspace : Workspace
        This process's data, networks and trainer.
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
        The part of the flat vector that the client sends, and the part that it stores. ``shared.take(model)`` returns a
        part of a model ``(d,)``, and ``shared.put(model, values)`` replaces it.
    round, lr : int, float
        The round and its learning rate.
    """

    method: MethodSettings
    personal_in_every_evaluation = False
    """Whether evaluations, rather than training rounds, score the local model."""

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        self.client = client
        self.workspace = workspace
        self.state = state
        self.stored = StoredTensors(state, workspace.device)
        """The client's state as tensors. For example, ``self.stored["control"]`` persists between rounds."""
        self.settings = workspace.settings_of(client)
        self.method = workspace.settings.method
        self.device = workspace.device
        self.data = workspace.client_data(client)
        self.num_train = len(self.data.y_train)
        """Number of training samples that the client reported when it joined."""
        self.architecture: Architecture = self.method.network(workspace.architecture, self.settings.data.num_clients)
        self.layout = self.architecture.layout
        self.shared, self.personal = self.architecture.divided(self.method.personal(self.architecture))
        self.round = 0
        self.lr = 0.0

    # -- defaults: FedAvg, with the method's personal layers -------------------------------------------

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the served model for one round (FedAvg, ClientUpdate)."""
        served = yield from result_of(self.served_model(received, config))
        trained: Trained = yield self.work(served.members[0].parameters)
        return self.share(trained)

    def work(self, start: Tensor) -> Train:
        """Return the request for local training from a model ``(d,)``."""
        return Train(start)

    def served_model(self, received: Received, config: Config) -> Predictor | Steps[Predictor]:
        """Return the served model: the client's model after the server's message and before local training."""
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
        """Return the model ``(d,)`` with the received shared layers and the client's personal layers."""
        shared = received["model"]
        if shared.shape != (self.shared.size,):
            raise SettingsError(
                f"the server's message has a model of shape {tuple(shared.shape)}; the client expects "
                f"{self.shared.size} parameters"
            )
        if not self.personal.size:
            return shared
        return self.shared.put(self.with_personal(self.initial()), shared)

    # -- helpers for methods -------------------------------------------------------------------------

    def share(self, trained: Trained) -> Result:
        """Store a trained model's personal layers, and return its shared layers as the update, with the full model.

        ``local_round`` can end with ``return self.share(trained)``.

        Parameters
        ----------
        trained : Trained
            The result of ``yield Train(...)``.

        Returns
        -------
        tuple
            The :class:`~posy.strategies.replies.Update`, and the model for predictions.
        """
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
        """Return a predictor for a single model ``(d,)`` of the method's network."""
        return Predictor([Member(parameters, self.architecture)], chosen)

    def initial(self, number: int = 0) -> Tensor:
        """Return the initial parameters ``(d,)`` of a model, the same as on the server. Do not write to them."""
        return self.workspace.initial(self.architecture, model_seed(self.settings.run.seed, number))

    def predict(self, predictor: Predictor, split: Split) -> Steps[Tensor]:
        """Return a predictor's output ``(n, C)`` on a split, computed by :meth:`Predictor.combine`."""
        outputs = []
        for member in predictor.members:
            outputs.append((yield Forward(member.parameters, split, member.architecture)))
        return predictor.combine(outputs)


def result_of(returned: R | Steps[R]) -> Steps[R]:
    """Return a hook's result, whether the hook is a generator or a plain function."""
    return (yield from returned) if isinstance(returned, Generator) else returned
