"""The part of a client that all methods share.

A method writes its round as a generator that yields :class:`~posy.client_app.training.work.Train` and
:class:`~posy.client_app.training.work.Forward` requests and receives their results, so that it reads like the paper's
algorithm while the training loop, evaluation, state and reply stay in one place.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from flwr.client import NumPyClient
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.privacy import noised
from posy.client_app.state import State
from posy.client_app.training.batches import Samples
from posy.client_app.training.networks import Network
from posy.client_app.training.work import Forward, Job, Train, Trained
from posy.client_app.workspace import Workspace
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Layout
from posy.randomness import model_seed, torch_generator
from posy.storage import write_arrays

Config = Mapping[str, Any]
Arrays = list[npt.NDArray[np.generic]]
R = TypeVar("R")
Steps = Generator[Train | Forward, Any, R]


@dataclass
class Member:
    """One model of an ensemble: parameters ``(d,)``, its network and its coefficient."""

    parameters: Tensor
    architecture: Architecture
    coefficient: float = 1.0


@dataclass
class Predictor:
    """What a client predicts with: one model, or several whose probabilities are summed.

    Attributes
    ----------
    members : list of Member
        The models.
    chosen : str
        What the method chose for this client, for the record (FedFew: the server model's number).
    """

    members: list[Member]
    chosen: str = ""


@dataclass
class Update:
    """What a client hands in after a round.

    Attributes
    ----------
    arrays : list of numpy.ndarray
        Arrays for the server.
    loss : float
        Mean training loss of the last local epoch.
    local : Predictor or None
        The local model, after training; None where the method makes it only in an evaluation.
    metrics : dict
        Further numbers for the server.
    """

    arrays: Arrays
    loss: float
    local: Predictor | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Mean loss and accuracy on n samples."""

    loss: float
    accuracy: float
    count: int


class PersonalClient(NumPyClient):
    """A NumPyClient for one client of a method.

    Subclasses write :meth:`local_round` and, where it is not the plain model, :meth:`served_model`.

    Parameters
    ----------
    client : int
        Index of the client, 0..M-1: its partition.
    workspace : Workspace
        Data, networks and trainer of this process.
    state : State
        What this client has kept.
    """

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        self.client = client
        self.workspace = workspace
        self.state = state
        self.settings = workspace.settings
        self.method: Any = workspace.settings.method
        self.device = workspace.device
        self.data = workspace.client_data(client)
        self.architecture = self.network_for(workspace.architecture)
        self.round = 0
        self.lr = 0.0
        self.acknowledgement: dict[str, float] = {}
        """What the server is told with every reply, after training and evaluation alike."""

    # -- what a method contributes -----------------------------------------------------------------

    personal_in_every_evaluation = False
    """Whether the local model is scored in evaluations, not in the training round itself."""

    def network_for(self, plain: Architecture) -> Architecture:
        """Return the network that the method trains; by default the plain one."""
        return plain

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train for one round on what the server sent."""
        raise NotImplementedError

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Return the model that the client holds after the server's message, before training."""
        yield from ()
        return self.plain(received[0])

    def personal_model(self, received: list[Tensor], config: Config) -> Steps[Predictor | None]:
        """Return the local model of a client that has not trained in this round, if there is one."""
        yield from ()
        return None

    def noised_from(self, received: Arrays) -> Arrays:
        """Return what the first arrays of a reply are changes of, for clipping and noise; the others stay as they are.

        By default a reply is what was received, trained on.
        """
        return received

    # -- NumPyClient ---------------------------------------------------------------------------------

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        """Train; and score the local model on the client's test split when the config asks for it."""
        return self.drive(self.fit_steps(parameters, config))

    def evaluate(self, parameters: Arrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score the served model, and the personal model if one is kept, on the client's test split."""
        return self.drive(self.evaluate_steps(parameters, config))

    # -- helpers for methods -------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Order of the tensors in the method's flat vector."""
        return self.architecture.layout

    @property
    def num_train(self) -> int:
        """Number of training samples n_i."""
        return len(self.data.y_train)

    def plain(self, parameters: Tensor, chosen: str = "") -> Predictor:
        """Return a single model of the method's network as a predictor."""
        return Predictor([Member(parameters, self.architecture)], chosen)

    def initial(self, number: int = 0) -> Tensor:
        """Return the common start ``(d,)`` of one of several models, as the server has it; not to be changed."""
        return self.workspace.initial(self.architecture, model_seed(self.settings.run.seed, number))

    def recall(self, name: str) -> Tensor | None:
        """Return a kept array as a tensor, or None."""
        array = self.state.get(name)
        return None if array is None else torch.from_numpy(array).to(self.device)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor in the client's state."""
        self.state[name] = array_of(tensor)

    def class_distribution(self) -> Tensor:
        """Return the empirical class distribution p_i ``(C,)`` of the training samples."""
        counts = torch.bincount(self.data.y_train, minlength=self.data.num_classes)
        return counts / counts.sum()

    def samples(self, split: str) -> Samples:
        """Return the samples of a split."""
        if split == "train":
            return Samples(self.data.x_train, self.data.y_train)
        return Samples(self.data.x_test, self.data.y_test)

    def predict(self, predictor: Predictor, split: str) -> Steps[Tensor]:
        """Return log-probabilities ``(n, C)``; an ensemble averages probabilities by coefficient.

        If all coefficients are zero the members count alike.
        """
        outputs = []
        for member in predictor.members:
            logits = yield Forward(member.parameters, split, member.architecture)  # type: ignore[arg-type]
            outputs.append(F.log_softmax(logits[0] if isinstance(logits, tuple) else logits, dim=-1))
        if len(outputs) == 1:
            return outputs[0]
        coefficients = torch.tensor([member.coefficient for member in predictor.members], device=self.device)
        if not bool(coefficients.any()):
            coefficients = torch.ones_like(coefficients)
        mixture = torch.einsum("t,tnc->nc", coefficients / coefficients.abs().sum(), torch.stack(outputs).exp())
        # Where a coefficient is negative, the missing mass is spread evenly, which leaves the order of the classes.
        mixture += (1 - mixture.sum(dim=-1, keepdim=True)) / mixture.shape[-1]
        return mixture.clamp_min(1e-12).log()

    def train_losses(self, models: Tensor) -> Steps[Tensor]:
        """Return the training loss of each of K models ``(K, d)`` as ``(K,)``; that of a diverged one is infinite."""
        logits = yield Forward(models, "train", self.architecture)
        k, n, _ = logits.shape
        losses = F.cross_entropy(logits.flatten(0, 1), self.data.y_train.repeat(k), reduction="none").view(k, n).mean(1)
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def score(self, predictor: Predictor, split: str) -> Steps[Scores]:
        """Return loss and accuracy of a predictor on a split."""
        log_probabilities = yield from self.predict(predictor, split)
        return scores(log_probabilities, self.samples(split).y)

    # -- one round -----------------------------------------------------------------------------------

    def fit_steps(self, parameters: Arrays, config: Config) -> Steps[tuple[Arrays, int, dict[str, Any]]]:
        """Do what :meth:`fit` does, asking whoever drives the generator for training and outputs."""
        self._begin(config)
        update = yield from self.local_round(self._received(parameters), config)
        if not np.isfinite(update.loss):
            raise ArithmeticError(f"client {self.client}: the training loss is {update.loss}")
        metrics: dict[str, Any] = {**update.metrics, "train-loss": update.loss, "num-test": len(self.data.y_test)}
        if update.local is not None:
            if config.get("evaluate-local"):
                metrics |= yield from self._test_scores("local", update.local)
            self._save(update.local, config)
        sent = noised(update.arrays, self.noised_from(parameters), self.settings.train)
        return sent, self.num_train, metrics | self.acknowledgement

    def evaluate_steps(self, parameters: Arrays, config: Config) -> Steps[tuple[float, int, dict[str, Any]]]:
        """Do what :meth:`evaluate` does, asking whoever drives the generator for training and outputs."""
        self._begin(config)
        metrics: dict[str, Any] = {"num-train": self.num_train}
        received = self._received(parameters)
        best = None
        if received:
            best = served = yield from self.served_model(received, config)
            metrics["chosen"] = served.chosen
            metrics |= yield from self._test_scores("served", served)
        if self.personal_in_every_evaluation or config.get("evaluate-personal"):
            try:
                personal = yield from self.personal_model(received, config)
            except ArithmeticError as error:  # what was measured of the served model stands
                log(WARNING, "client %s has no local model in round %s: %s", self.client, self.round, error)
                personal = None
            if personal is not None:
                best = personal
                metrics |= yield from self._test_scores("local", personal)
            if best is not None:
                self._save(best, config)
        return metrics.get("served-loss", 0.0), len(self.data.y_test), metrics | self.acknowledgement

    def _test_scores(self, point: str, predictor: Predictor) -> Steps[dict[str, float]]:
        """Return a predictor's scores on the test split by key; none where the client has no test samples."""
        if not len(self.data.y_test):
            return {}
        result = yield from self.score(predictor, "test")
        return {f"{point}-accuracy": result.accuracy, f"{point}-loss": result.loss}

    def _received(self, parameters: Arrays) -> list[Tensor]:
        return [self.workspace.tensor(np.asarray(array)) for array in parameters]

    def drive(self, steps: Steps[R]) -> R:
        """Carry out a method's requests one after the other; it hears of one that fails."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self.carry_out(request)
                except Exception as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as finished:
            return finished.value

    def carry_out(self, work: Train | Forward) -> Trained | Any:
        """Do what the client's generator asks for."""
        network, trainer = self.network(work), self.workspace.trainer
        if isinstance(work, Forward):
            return trainer.forward(work, network, self.samples(work.split))
        return trainer.train(self.job(work), network)

    def _begin(self, config: Config) -> None:
        self.round = int(config["server-round"])
        self.lr = float(config.get("lr", self.settings.train.lr))

    def network(self, work: Train | Forward) -> Network:
        """Return the resident network that a request is about."""
        return self.workspace.network(work.network or self.architecture)

    def job(self, work: Train) -> Job:
        """Return a training with the client's samples and its random streams of this round."""

        def stream(purpose: str) -> torch.Generator:
            return torch_generator(self.settings.run.seed, purpose, self.round, self.client, work.stream)

        return Job(work, self.samples("train"), stream("batches"), self.lr, self.workspace.augment(stream("augment")))

    def _save(self, predictor: Predictor, config: Config) -> None:
        """Write the personal model to the folder that the config names (simulation: the run's own)."""
        folder = config.get("save-models-to")
        if not folder:
            return
        path = Path(str(folder))
        path.mkdir(parents=True, exist_ok=True)
        several = len(predictor.members) > 1
        arrays: dict[str, FloatArray] = {}
        for number, member in enumerate(predictor.members, start=1):
            named = member.architecture.named_arrays(array_of(member.parameters))
            prefix = f"stage{number}." if several else ""
            arrays |= {prefix + name: array for name, array in named.items()}
            if several:
                arrays[f"{prefix}coefficient"] = np.array([member.coefficient], np.float32)
        metadata = {"client": str(self.client), "chosen": predictor.chosen}
        write_arrays(path / f"client-{self.client}.safetensors", arrays, metadata)


def scores(log_probabilities: Tensor, labels: Tensor) -> Scores:
    """Return mean cross-entropy and accuracy of log-probabilities ``(n, C)``.

    Raises
    ------
    ArithmeticError
        If a log-probability is NaN: a diverged model has no accuracy.
    """
    if bool(torch.isnan(log_probabilities).any()):
        raise ArithmeticError("the model's outputs are not numbers (it has diverged)")
    loss = F.nll_loss(log_probabilities, labels)
    accuracy = (log_probabilities.argmax(dim=-1) == labels).float().mean()
    return Scores(float(loss), float(accuracy), len(labels))


def array_of(tensor: Tensor) -> FloatArray:
    """Return a tensor as a NumPy array on the host."""
    return tensor.detach().cpu().numpy()
