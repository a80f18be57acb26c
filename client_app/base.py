"""The client that all methods share: FedAvg, with hooks that a method overrides.

A method writes its round as a generator. It yields :class:`~posy.client_app.training.work.Train` and
:class:`~posy.client_app.training.work.Forward` requests and receives their results, so that it reads like the paper's
algorithm. The training loop, evaluation, state and reply are written once, outside the methods. A hook without requests
is a plain function.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from flwr.client import NumPyClient
from flwr.common.logger import log
from flwr.common.typing import NDArrays
from torch import Tensor

from posy.client_app.privacy import UnprotectedError, noised
from posy.client_app.secure_aggregation import Masking
from posy.client_app.state import State
from posy.client_app.training.batches import DropoutNumbers, Samples, Share
from posy.client_app.training.networks import Network
from posy.client_app.training.work import (
    Forward,
    Job,
    Moments,
    Split,
    Train,
    Trained,
    TrainingDivergedError,
    advice_on_divergence,
)
from posy.client_app.workspace import Workspace
from posy.models.architecture import Architecture, reduced_like
from posy.models.parameters import FloatArray, Layout
from posy.randomness import model_seed, torch_generator
from posy.settings import SettingsError
from posy.storage import write_arrays
from posy.strategies.masking import OutOfRangeError, Words
from posy.strategies.pooled import numbers_of
from posy.strategies.privacy import BELOW, sampling_of
from posy.strategies.replies import Update
from posy.strategies.settings import CENTRAL, LOCAL, OFF, SAMPLE

Config = Mapping[str, Any]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""The splits of a client's samples."""
LARGEST_LOSS = 1e6
"""Largest loss in a masked sum. A larger loss counts as missing."""
R = TypeVar("R")
Steps = Generator[Train | Forward, Any, R]


@dataclass
class Member:
    """One model of an ensemble: its parameters ``(d,)``, its network and its coefficient.

    ``fixed`` contains the fixed tensors of the network by name, if the model was read from a file.
    """

    parameters: Tensor
    architecture: Architecture
    coefficient: float = 1.0
    fixed: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass
class Predictor:
    """One model, or an ensemble whose probabilities are summed (log-probabilities with ``logarithms``).

    ``chosen`` is the method's choice for this client, such as the number of the server's model, for the record.
    """

    members: list[Member]
    chosen: str = ""
    logarithms: bool = False

    def as_arrays(self) -> dict[str, FloatArray]:
        """Return the tensors by name; in an ensemble with the prefix ``stage<t>.``, and with each coefficient."""
        several = len(self.members) > 1
        arrays: dict[str, FloatArray] = {}
        for number, member in enumerate(self.members, start=1):
            prefix = f"stage{number}." if several else ""
            named = {**member.architecture.layout.views(array_of(member.parameters)), **member.architecture.fixed}
            arrays |= {prefix + name: array for name, array in named.items()}
            if several:
                arrays[f"{prefix}coefficient"] = np.array([member.coefficient], np.float32)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, FloatArray], architecture: Architecture, method: Any) -> Self:
        """Return the predictor whose :meth:`as_arrays` is ``arrays``.

        Parameters
        ----------
        arrays : mapping
            The tensors of the members by name.
        architecture : Architecture
            The method's network, without reduced ranks.
        method : MethodSettings
            The settings of the method.
        """
        members = []
        for stage in sorted({name.partition(".")[0] for name in arrays if name.startswith("stage")}) or [""]:
            prefix = f"{stage}." if stage else ""
            tensors = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
            coefficient = float(tensors.pop("coefficient", np.ones(1))[0])
            reduced = reduced_like(architecture, tensors)
            fixed = {name: tensors[name] for name in reduced.fixed}
            members.append(Member(torch.from_numpy(reduced.layout.flatten(tensors)), reduced, coefficient, fixed))
        return cls(members, logarithms=method.sums_logarithms)


Result = tuple[Update, Predictor | None]
"""The result of a round: the update for the server, and the local model. None if an evaluation computes the model."""


class PersonalClient(NumPyClient):
    """A NumPyClient for one client of a method.

    Parameters
    ----------
    client : int
        Index of the client, 0 to M − 1.
    workspace : Workspace
        Data, networks and trainer of this process.
    state : State
        Arrays that the client stored in earlier rounds.
    """

    personal_in_every_evaluation = False
    """Whether the local model is scored in evaluations instead of the training round."""

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        self.client = client
        self.workspace = workspace
        self.state = state
        self.settings = workspace.settings
        self.method: Any = workspace.settings.method
        self.device = workspace.device
        self.data = workspace.client_data(client)
        self.architecture: Architecture = self.method.network(workspace.architecture, self.settings.data.num_clients)
        self.shared, self.personal = self.architecture.divided(self.method.personal(self.architecture))
        self.masking: Masking | None = None
        """The masks of the update in a run with secure aggregation."""
        self.round = 0
        self.lr = 0.0
        self.processed = 0
        """Samples that models were trained on in this call. K models count each sample K times."""
        self._samples_private = False  # whether trainings are DP-SGD: the replies depend on them
        self._moments: dict[str, Moments] | None = None  # of the round's trainings, with optimizer-state = kept
        self.acknowledgement: dict[str, float] = {}
        """Metrics of every reply, to training and to evaluation."""

    # -- hooks of a method: by default FedAvg, with the method's personal layers -----------------------

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train the served model for one round (FedAvg, ClientUpdate)."""
        served = yield from _result(self.served_model(received, config))
        trained: Trained = yield self.work(served.members[0].parameters)
        return self.share(trained)

    def work(self, start: Tensor) -> Train:
        """Return the local training that starts from a model ``(d,)``."""
        return Train(start)

    def served_model(self, received: list[Tensor], config: Config) -> Predictor | Steps[Predictor]:
        """Return the served model: the client's model after the server's message and before training."""
        return self.plain(self.assembled(received))

    def personal_model(
        self, received: list[Tensor], config: Config
    ) -> Predictor | Steps[Predictor | None] | Steps[Predictor] | None:
        """Return the local model of a client that has not trained in this round.

        The default is the stored model, or None if the client has not stored one.
        """
        stored = self.recall("model")
        return None if stored is None else self.plain(stored)

    def assembled(self, received: list[Tensor]) -> Tensor:
        """Return the model ``(d,)`` of the received shared layers and the client's personal layers."""
        shared = received[0]
        models = int(getattr(self.method, "models", 1))
        if shared.shape not in ((self.shared.size,), (models, self.shared.size)):
            raise SettingsError(
                f"the server's message has a model of shape {tuple(shared.shape)}; the client expects "
                f"{self.shared.size} numbers, at most {models} times"
            )
        if not self.personal.size:
            return shared
        stored = self.recall("personal")
        model = torch.empty(*shared.shape[:-1], self.layout.size, device=self.device)
        self.personal.put(model, self.personal.take(self.fresh(shared)) if stored is None else stored)
        return self.shared.put(model, shared)

    def fresh(self, shared: Tensor) -> Tensor:
        """Return the model ``(d,)`` with the initial personal layers; by default the common initialisation."""
        return self.initial()

    def share(self, trained: Trained) -> Result:
        """Store the personal layers of a trained model, and return its shared layers and itself as the local model."""
        self.keep_personal(trained.parameters)
        update = Update([self.shared.take(trained.parameters)], trained.loss)
        return update, self.plain(trained.parameters)

    def weight(self, config: Config) -> int:
        """Return the client's weight in the mean of the round. The strategy uses the same weight."""
        return 1 if self.settings.run.client_weights == "uniform" else len(self.data.y_train)

    def common(self, received: NDArrays, config: Config) -> NDArrays:
        """Return the arrays that all clients of a round have in common; with secure aggregation they bind the masks.

        By default all arrays of the message. A method that sends clients different arrays overrides this method, and
        ``common`` of its strategy.
        """
        return received

    def unchanged(self, parameters: NDArrays) -> NDArrays:
        """Return the arrays of an update that changes nothing, where an error would reveal that a training diverged.

        By default the arrays of the message. A method whose update has other arrays overrides this method.
        """
        return list(parameters)

    # -- NumPyClient ---------------------------------------------------------------------------------

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train, and score the local model on the client's test split if the config has ``evaluate-local``."""
        return self.drive(self.fit_steps(parameters, config))

    def evaluate(  # type: ignore[override]  # NumPyClient has no masked scores
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float | NDArrays, int, dict[str, Any]]:
        """Score the served model, and with ``evaluate-personal`` the local model, on the client's test split."""
        return self.drive(self.evaluate_steps(parameters, config))

    # -- helpers for methods -------------------------------------------------------------------------

    def kept_model(self, otherwise: Tensor) -> Tensor:
        """Return the model that the client has stored, or ``otherwise`` if it has not stored one."""
        stored = self.recall("model")
        return otherwise if stored is None else stored

    def keep_model(self, parameters: Tensor) -> Predictor:
        """Store the client's model ``(d,)`` and return it as a predictor."""
        self.keep("model", parameters)
        return self.plain(parameters)

    def keep_personal(self, parameters: Tensor) -> None:
        """Store the personal layers, if any, of one model ``(d,)`` or of several ``(K, d)``."""
        if self.personal.size:
            self.keep("personal", self.personal.take(parameters).clone())

    def best_of(self, models: Tensor) -> Steps[Predictor]:
        """Return the model with the lowest training loss of K models ``(K, d)``."""
        best = int((yield from self.losses(models)).argmin())
        return self.plain(models[best], str(best))

    @property
    def layout(self) -> Layout:
        """Order of the tensors in the method's flat vector."""
        return self.architecture.layout

    def plain(self, parameters: Tensor, chosen: str = "") -> Predictor:
        """Return a single model of the method's network as a predictor."""
        return Predictor([Member(parameters, self.architecture)], chosen)

    def initial(self, number: int = 0) -> Tensor:
        """Return the initial parameters ``(d,)`` of one of several models, as on the server. Do not change them."""
        return self.workspace.initial(self.architecture, model_seed(self.settings.run.seed, number))

    def recall(self, name: str) -> Tensor | None:
        """Return a stored array as a tensor, or None if the client has not stored it."""
        array = self.state.get(name)
        return None if array is None else torch.from_numpy(array).to(self.device)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Store a tensor in the client's state. A view is copied, so that its larger tensor can be freed."""
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        self.state[name] = array_of(tensor.clone() if is_view else tensor)

    @cached_property
    def class_weight(self) -> Tensor | None:
        """Class weight of each training sample ``(n,)``, with mean 1; None if all samples have the same weight."""
        return self.class_weights("train")

    def class_weights(self, split: Split) -> Tensor | None:
        """Return the class weight of each sample of a split ``(n,)``, with mean 1; None if all weights are equal.

        The weight of a class is inversely proportional to its number of training samples.
        """
        if self.settings.train.class_weights == "none":
            return None
        counts = torch.bincount(self.data.y_train, minlength=self.data.num_classes).clamp_min(1)
        weight = 1 / counts[self.samples(split).y]
        return weight / weight.mean()

    def class_distribution(self) -> Tensor:
        """Return the empirical class distribution p_i ``(C,)`` of the training samples."""
        counts = torch.bincount(self.data.y_train, minlength=self.data.num_classes)
        return counts / counts.sum()

    def steps_of(self, work: Train) -> int:
        """Return the number of steps of a local training."""
        return self._share(self._job(work)).steps

    def samples(self, split: Split) -> Samples:
        """Return the samples of a split."""
        return Samples(getattr(self.data, f"x_{split}"), getattr(self.data, f"y_{split}"))

    def predict(self, predictor: Predictor, split: Split) -> Steps[Tensor]:
        """Return log-probabilities ``(n, C)``. :func:`combined` computes them for an ensemble."""
        outputs = []
        for member in predictor.members:
            logits = yield Forward(member.parameters, split, member.architecture)
            outputs.append(F.log_softmax(logits[0] if isinstance(logits, tuple) else logits, dim=-1))
        if len(outputs) == 1:
            return outputs[0]
        coefficients = torch.tensor([member.coefficient for member in predictor.members], device=self.device)
        return combined(torch.stack(outputs), coefficients, predictor.logarithms)

    def losses(self, models: Tensor, split: Split = "train") -> Steps[Tensor]:
        """Return the loss ``(K,)`` of each of K models ``(K, d)`` on a split. A diverged model has an infinite loss.

        This is the loss that training minimises, with the run's class weights.
        """
        logits, labels = (yield Forward(models, split, self.architecture)), self.samples(split).y
        k, n, _ = logits.shape
        criterion = self.workspace.criterion or (lambda logits, y: F.cross_entropy(logits, y, reduction="none"))
        losses = criterion(logits.flatten(0, 1), labels.repeat(k)).view(k, n)
        weight = self.class_weights(split)
        losses = (losses if weight is None else losses * weight).mean(1)
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    # -- one round -----------------------------------------------------------------------------------

    def fit_steps(self, parameters: NDArrays, config: Config) -> Steps[tuple[NDArrays, int, dict[str, Any]]]:
        """Run :meth:`fit` as a generator, which yields requests for training and outputs."""
        self._begin(config)
        self._moments = {} if self.settings.train.optimizer_state == "kept" else None
        self._samples_private = self.settings.train.dp == SAMPLE
        train = self.settings.train
        update: Update
        local: Predictor | None
        try:
            update, local = yield from self.local_round(self._received(parameters), config)
        except TrainingDivergedError as error:
            if not (self.masking or train.withholds_scores):
                raise
            log(WARNING, "client %s sends no change in round %s: %s", self.client, self.round, error)
            update, local = Update(self.unchanged(parameters), np.nan), None  # an error would reveal the divergence
        loss = float(update.loss)
        if not (np.isfinite(loss) or train.withholds_scores or self.masking):
            advice = advice_on_divergence(train)
            raise TrainingDivergedError(f"training diverged: the training loss is {loss}; {advice}")
        self._keep_moments()
        metrics: dict[str, Any] = {**update.metrics, "num-test": len(self.data.y_test)}
        if not train.withholds_scores:
            metrics["train-loss"] = loss
        if local is not None:
            if config.get("evaluate-local"):
                metrics |= yield from self._scores("local", local)
            self._save(local, config, "local")
        arrays = [array_of(array) for array in update.arrays]
        metrics |= {"samples": self.processed}
        if train.dp != OFF or self.masking:
            reference = self.method.reference(self.architecture, parameters, arrays)
            if train.dp in (LOCAL, CENTRAL):
                arrays, metrics = self._protected(arrays, reference, metrics, update.metrics, config)
            if self.masking:
                if update.metrics:
                    raise ValueError(f"masks do not cover {', '.join(update.metrics)}, which the method sends")
                reference = [*reference, *parameters[len(reference) :]]  # the reference of statistics is the message
                weight = self.weight(config)
                try:
                    numbers = self._numbers(metrics, training=True)
                    words = self._masked(arrays, reference, weight, parameters, config, numbers)
                except OutOfRangeError as error:  # raised before the masks are used
                    log(WARNING, "client %s sends no change in round %s: %s", self.client, self.round, error)
                    arrays = self.unchanged(parameters)
                    numbers = self._numbers({"samples": self.processed}, training=True)
                    words = self._masked(arrays, reference, weight, parameters, config, numbers)
                arrays = [words]
                metrics = {}
        return arrays, len(self.data.y_train), {**metrics, **self.acknowledgement}

    def _protected(
        self,
        arrays: NDArrays,
        reference: NDArrays,
        metrics: dict[str, Any],
        further: Mapping[str, float],
        config: Config,
    ) -> tuple[NDArrays, dict[str, Any]]:
        """Return the arrays and metrics of a reply with local or central differential privacy.

        Raises :class:`UnprotectedError` if the method sends ``further`` numbers, which have no noise.
        """
        if further or self.acknowledgement:
            raise UnprotectedError(
                f"method = {self.settings.run.method!r}: its clients send numbers without noise; the method must "
                f"refuse dp = {self.settings.train.dp!r}"
            )
        train = self.settings.train
        adaptive = train.dp == CENTRAL and train.dp_clip_quantile > 0
        # With local noise a norm of the server's choice would break the guarantee.
        clip = float(config["dp-clip"]) if adaptive else train.dp_clip
        threshold = self.masking.threshold if self.masking else 0
        arrays, norm = noised(arrays, reference, self.settings, clip=clip, threshold=threshold)
        if adaptive:
            metrics[BELOW] = float(norm <= clip)
        return arrays, metrics

    def evaluate_steps(
        self, parameters: NDArrays, config: Config
    ) -> Steps[tuple[float | NDArrays, int, dict[str, Any]]]:
        """Run :meth:`evaluate` as a generator, which yields requests for training and outputs.

        With secure aggregation it returns masked words instead of the loss, and no numbers of this client.
        """
        self._begin(config)
        metrics: dict[str, Any] = {"num-train": len(self.data.y_train)}
        received, best, point = self._received(parameters), None, "served"
        if received:
            best = served = yield from _result(self.served_model(received, config))
            if not self.settings.train.withholds_scores:
                metrics["chosen"] = served.chosen
            metrics |= yield from self._scores("served", served)
            if self.method.point == "served":
                self._save(served, config, "served", "served")
        if self.personal_in_every_evaluation or config.get("evaluate-personal"):
            try:
                personal = yield from _result(self.personal_model(received, config))
            except TrainingDivergedError as error:  # the scores of the served model stay valid
                log(WARNING, "client %s has no local model in round %s: %s", self.client, self.round, error)
                personal = None
            if personal is not None:
                best, point = personal, "local"
                metrics |= yield from self._scores("local", personal)
            if best is not None:
                self._save(best, config, point)
        metrics |= {"samples": self.processed}
        if self.masking:
            if not self.personal_in_every_evaluation:  # the sum would cover the clients that have a local model
                metrics = {key: value for key, value in metrics.items() if not key.startswith("local")}
            numbers = self._numbers(metrics, training=False)
            return [self._masked([], [], 1, parameters, config, numbers)], 0, dict(self.acknowledgement)
        metrics |= self.acknowledgement
        return metrics.get("served-loss", 0.0), len(self.data.y_test), metrics

    def _numbers(self, metrics: Mapping[str, Any], *, training: bool) -> list[int]:
        """Return the client's scores as whole numbers for the masked sum.

        A loss that is not a number of the sum counts as missing, because an error would reveal it.
        """
        wrong = {key for key, value in metrics.items() if key.endswith("-loss") and not 0 <= value <= LARGEST_LOSS}
        valid = {key: value for key, value in metrics.items() if key not in wrong}
        sizes: dict[str, int] = {split: len(self.samples(split).y) for split in SPLITS}
        return numbers_of(self.settings, valid, sizes, training=training)

    def _masked(
        self,
        arrays: NDArrays,
        references: NDArrays,
        weight: int,
        received: NDArrays,
        config: Config,
        numbers: Sequence[int],
    ) -> Words:
        """Return an update and scores under masks."""
        assert self.masking is not None
        common, limit = self.common(received, config), self.settings.run.secure_range
        return self.masking.put_on(arrays, references, weight, limit, common, numbers)

    def _scores(self, point: str, predictor: Predictor) -> Steps[dict[str, float]]:
        """Return a predictor's scores by key, on each split with samples.

        The training split is scored only with ``evaluate-training``. A run with noise has no scores by default.
        """
        measured: dict[str, float] = {}
        if self.settings.train.withholds_scores:
            return measured
        advice = advice_on_divergence(self.settings.train)
        splits: dict[str, Split] = {point: "test"}
        if self.settings.data.validation_fraction:
            splits[f"{point}-validation"] = "validation"
        if self.settings.run.evaluate_training:
            splits[f"{point}-training"] = "train"
        for key, split in splits.items():
            if len(labels := self.samples(split).y):
                outputs = yield from self.predict(predictor, split)
                if self.masking and bool(torch.isnan(outputs).any()):
                    log(WARNING, "client %s has no %s scores in round %s: NaN", self.client, key, self.round)
                    continue  # an error would reveal it
                loss, accuracy = scores(outputs, labels, advice)
                measured |= {f"{key}-accuracy": accuracy, f"{key}-loss": loss}
        return measured

    def _received(self, parameters: NDArrays) -> list[Tensor]:
        return [self.workspace.tensor(np.asarray(array)) for array in parameters]

    def drive(self, steps: Steps[R]) -> R:
        """Run a method's requests in order and return its result. An error is raised inside the method."""
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
        """Run a request of the client's generator."""
        network, trainer = self.network(work), self.workspace.trainer
        if isinstance(work, Forward):
            return trainer.forward(work, network, self.samples(work.split))
        return trainer.train(self.job(work), network)

    def _begin(self, config: Config) -> None:
        self.round = int(config["server-round"])
        self.lr = float(config.get("lr", self.settings.train.lr))
        self._moments = None
        self._samples_private = False

    def network(self, work: Train | Forward) -> Network:
        """Return the resident network of a request."""
        return self._default_network if work.network is None else self.workspace.network(work.network)

    @cached_property
    def _default_network(self) -> Network:
        return self.workspace.network(self.architecture)

    def job(self, work: Train) -> Job:
        """Return a local training with the client's samples and its random streams of this round."""
        job = self._job(work)
        for number, of_model in enumerate(job.models or (job,)):
            if self._moments is not None and of_model.moments is not None:
                self._moments[f"optimiser-{work.stream}-{number}"] = of_model.moments
        if not work.measures:
            self.processed += self._share(job).total * (1 if work.start.dim() == 1 else len(work.start))
        return job

    def _share(self, job: Job) -> Share:
        return self.workspace.trainer.share(job, self.network(job.work).smallest_batch)

    def _job(self, work: Train) -> Job:
        if work.own_batches and work.start.dim() > 1:
            models = tuple(self._job_of(work.of_model(number), number) for number in range(len(work.start)))
            return models[0]._replace(work=work, models=models)
        return self._job_of(work)

    def _job_of(self, work: Train, model: int = 0) -> Job:
        """Return the job of one of several models. Model 0 has the same random streams as a single model."""

        def stream(purpose: str) -> torch.Generator:
            key = (self.round, self.client, work.stream, model)
            order_key = self.workspace.order_key
            return torch_generator(self.settings.run.seed, purpose, *(key if model else key[:-1]), *order_key)

        augment = self.workspace.augment(lambda: stream("augment"))
        width = self.network(work).dropout_width
        dropout = DropoutNumbers(width, stream("dropout")) if width else None
        rate = self.lr if work.lr is None else work.lr
        samples, batches = self.samples("train"), stream("batches")
        if work.measures:
            return Job(work, samples, batches, rate)
        moments = self.moments(work, model)
        sampling = sampling_of(self.settings, len(samples.y)) if self._samples_private else None
        weight = self.class_weight
        return Job(work, samples, batches, rate, augment, dropout, weight, moments=moments, sampling=sampling)

    def moments(self, work: Train, model: int = 0) -> Moments | None:
        """Return the optimiser's state that a training continues from; None for a fresh optimiser."""
        if self._moments is None or work.plain:
            return None
        name = f"optimiser-{work.stream}-{model}"
        means, squares, steps = (self.recall(f"{name}-{part}") for part in ("means", "squares", "steps"))
        if means is None or steps is None or means.shape != work.start.shape:  # first round, or another network
            return Moments()
        return Moments(int(steps), means, squares)

    def _keep_moments(self) -> None:
        for name, moments in (self._moments or {}).items():
            for part, tensor in (("means", moments.means), ("squares", moments.squares)):
                if tensor is not None:
                    self.keep(f"{name}-{part}", tensor)
            if moments.means is not None:
                self.state[f"{name}-steps"] = np.array(moments.steps, np.int64)

    def _save(self, predictor: Predictor, config: Config, point: str, file: str = "client") -> None:
        """Write a model with its settings and preprocessing to the folder ``save-models-to``, if the config has one.

        ``client-<i>`` is the local model, or the served model of a client without one. ``served-<i>`` is the served
        model of a method whose ``point`` is ``served``.
        """
        folder = config.get("save-models-to")
        if not folder:
            return
        path = Path(str(folder)) / f"{file}-{self.client}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"client": str(self.client), "site": str(config.get("site", "")), "round": str(self.round)}
        about |= {"point": point, "chosen": predictor.chosen}
        needed = {"settings": self.settings.to_json(), "preprocessing": self.workspace.preprocessing}
        write_arrays(path, predictor.as_arrays(), about | needed)


def scores(log_probabilities: Tensor, labels: Tensor, advice: str = "a smaller lr may help") -> tuple[float, float]:
    """Return mean cross-entropy and accuracy of log-probabilities ``(n, C)``.

    NaN raises :class:`TrainingDivergedError`, whose message ends with the advice.
    """
    if bool(torch.isnan(log_probabilities).any()):
        raise TrainingDivergedError(f"the model has diverged: its outputs contain NaN; {advice}")
    loss = F.nll_loss(log_probabilities, labels)
    accuracy = (log_probabilities.argmax(dim=-1) == labels).float().mean()
    return float(loss), float(accuracy)


def combined(outputs: Tensor, coefficients: Tensor, logarithms: bool = False) -> Tensor:
    """Return the log-probabilities ``(n, C)`` of an ensemble of T members.

    The members' probabilities, or with ``logarithms`` their logarithms, are averaged with the coefficients as weights.
    If all coefficients are zero, all members have the same weight.

    Parameters
    ----------
    outputs : Tensor, (T, n, C)
        Log-probabilities of the members.
    coefficients : Tensor, (T,)
        Weights of the members, which may be negative.
    logarithms : bool
        Whether to average log-probabilities.
    """
    if not bool(coefficients.any()):
        coefficients = torch.ones_like(coefficients)
    coefficients = coefficients / coefficients.abs().sum()
    if logarithms:
        return F.log_softmax(torch.einsum("t,tnc->nc", coefficients, outputs), dim=-1)
    mixture = torch.einsum("t,tnc->nc", coefficients, outputs.exp())
    # Negative coefficients leave a sum below 1. The difference is spread evenly, which keeps the order of the classes.
    mixture += (1 - mixture.sum(dim=-1, keepdim=True)) / mixture.shape[-1]
    return mixture.clamp_min(1e-12).log()


def array_of(values: Any) -> npt.NDArray[Any]:
    """Return a tensor, or another array-like value, as a NumPy array in host memory."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _result(returned: R | Steps[R]) -> Steps[R]:
    """Return the result of a hook, which may be a generator or a plain function."""
    return (yield from returned) if isinstance(returned, Generator) else returned
