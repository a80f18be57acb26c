"""The models that the service offers: one client's model, or a combination of the models of several clients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posy.client_app.schema import TensorSpec, model_card, output_specs
from posy.client_app.stored import ClientModel
from posy.client_app.training.trainer import EVALUATION_BATCH
from posy.metrics import CLASSES, LABELS
from posy.serve.samples import SampleReader
from posy.serve.tensors import Array, RequestError, as_objects
from posy.spread import majority_vote, vote_shares

PLATFORM = "posy_torch"
"""The platform in a model's metadata."""
WARNING = TensorSpec("warning", "BYTES", (-1,), "features far outside the range of the training samples, or empty")
LABEL_FLAGS = TensorSpec("labels", "BOOL", (-1, -1), "whether each label's probability reaches the threshold")


class Endpoint(ABC):
    """A model that the service offers.

    Parameters
    ----------
    models : mapping of int to ClientModel
        The clients' models, keyed by client. They share the task.
    scores : mapping
        Scores for the model card.
    """

    def __init__(self, models: Mapping[int, ClientModel], run: str, scores: Mapping[str, float]) -> None:
        self.models, self.run, self._scores = dict(models), run, dict(scores)
        self.first = next(iter(self.models.values()))
        # With scaling = client, each client standardises the samples with its own statistics.
        separate = self.first.settings.data.scaling == "client"
        readers = self.models if separate else [next(iter(self.models))]
        self._readers = {client: SampleReader(self.models[client].preprocessing) for client in readers}

    @property
    def version(self) -> str:
        """The model's version: the round in which it was stored."""
        return str(self.first.round)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the C classes, labels or values."""
        return self.first.class_names

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model."""
        return next(iter(self._readers.values())).specs

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the model."""

    @property
    def card(self) -> dict[str, Any]:
        """The model card, for JSON."""
        card = model_card(self.first, self.run, self._scores)
        specs = {"inputs": self.inputs, "outputs": self.outputs}
        return card | {key: [spec.to_dict() for spec in group] for key, group in specs.items()}

    async def complete(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the final outputs for a request, given the result of :meth:`predict`; by default the same."""
        return outputs

    def predict(self, batch: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | Exception]:
        """Answer several requests at once.

        Parameters
        ----------
        batch : sequence of mapping
            The tensors of each request, keyed by name.

        Returns
        -------
        list
            The outputs for each request, keyed by name, or the exception that the request has caused.

        Raises
        ------
        RequestError
            If the model's output for a sample is not a number.
        """
        reader, groups = next(iter(self._readers.values())), dict[object, list[int]]()
        for number, inputs in enumerate(batch):
            groups.setdefault(reader.joint_format(inputs) or number, []).append(number)
        answers: dict[int, dict[str, Array] | Exception] = {}
        for numbers in groups.values():
            answers |= zip(numbers, self._answer_together([batch[number] for number in numbers]), strict=True)
        return [answers[number] for number in range(len(batch))]

    def _answer_together(self, batch: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | Exception]:
        """Answer requests of the same format. If the samples of one request are wrong, answer each request alone."""
        first = batch[0]
        joined = first if len(batch) == 1 else {name: np.concatenate([each[name] for each in batch]) for name in first}
        try:
            samples = self._read(joined)
        except RequestError as error:
            if len(batch) == 1:
                return [error]
            return [answer for inputs in batch for answer in self._answer_together([inputs])]
        with torch.inference_mode():
            outputs = self._answer(samples)
        if len(batch) == 1:
            return [outputs]
        ends = accumulate((len(next(iter(inputs.values()))) for inputs in batch), initial=0)
        return [{name: array[start:end] for name, array in outputs.items()} for start, end in pairwise(ends)]

    def _read(self, inputs: Mapping[str, Array]) -> dict[int, Tensor]:
        """Return the samples ``(n, *input_shape)``, keyed by client; with a common scale, only for the first client."""
        return {client: read(inputs) for client, read in self._readers.items()}

    @abstractmethod
    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        """Return the outputs for n samples, keyed by name, given the result of :meth:`_read`."""

    def _outputs_of(self, client: int, samples: Mapping[int, Tensor]) -> Array:
        """Return the outputs ``(n, C)`` of a client's model."""
        return self._forward(self.models[client], samples.get(client, next(iter(samples.values()))))

    @staticmethod
    def _forward(model: ClientModel, x: Tensor) -> Array:
        """Return a model's outputs ``(n, C)`` for samples ``(n, *input_shape)``."""
        if not len(x):
            return np.empty((0, len(model.class_names)), np.float32)
        outputs = torch.cat([model(part) for part in torch.split(x, EVALUATION_BATCH)]).numpy(force=True)
        if np.isnan(outputs).any():  # a class would be arbitrary
            raise RequestError("the model's output is not a number; the inputs may be too large")
        return outputs

    def _named(self, indices: Array) -> Array:
        """Return the names of classes, given their indices ``(n,)``."""
        return self._encoded_names[indices]

    @cached_property
    def _encoded_names(self) -> Array:
        return as_objects([name.encode() for name in self.class_names], (len(self.class_names),))

    @cached_property
    def _client_names(self) -> Array:
        """The names of the clients, ``(M,)``."""
        names = [name_of(client, model).encode() for client, model in self.models.items()]
        return as_objects(names, (len(names),))


class ClientEndpoint(Endpoint):
    """The model of one client, or the model that all clients share."""

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Probabilities and class, labels or values, and for features a warning."""
        specs = output_specs(self.first.preprocessing)
        specs += (LABEL_FLAGS,) * (self.first.preprocessing.task.target == LABELS)
        return specs + (WARNING,) * (self.first.preprocessing.task.kind == "features")

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        (client,) = self.models
        return self._described(self._outputs_of(client, samples), samples[client])

    def _described(self, outputs: Array, x: Tensor) -> dict[str, Array]:
        """Return the outputs by name, given the model's outputs ``(n, C)`` and the samples."""
        task = self.first.preprocessing.task
        first, *further = self.outputs
        answer = {first.name: outputs}
        if task.target == CLASSES:
            answer[further[0].name] = self._named(outputs.argmax(axis=1))
        if task.target == LABELS:
            answer[LABEL_FLAGS.name] = outputs >= self.first.settings.run.threshold
        if task.kind == "features":
            answer[WARNING.name] = self._warnings(x)
        return answer

    def _warnings(self, x: Tensor) -> Array:
        """Return a warning for each sample ``(n,)``, which names the features far from the training samples."""
        texts = [b""] * len(x)
        part = "" if self.first.preprocessing.features else "feature "
        for row, name, distance in self.first.unusual_in(x):
            text = f"{part}{name}: {distance:.3g} standard deviations from the training mean"
            texts[row] += b"; " * bool(texts[row]) + text.encode()
        return as_objects(texts, (len(texts),))


class EnsembleEndpoint(ClientEndpoint):
    """The mean of the outputs of all clients' models."""

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        mean = np.stack([self._outputs_of(client, samples) for client in self.models]).mean(axis=0, dtype=np.float32)
        return self._described(mean, next(iter(samples.values())))


class VoteEndpoint(Endpoint):
    """The class that most clients' local models predict, as for system accuracy."""

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The class with the most votes, and each class's fraction of the votes."""
        names = self.class_names
        return (
            TensorSpec("class", "BYTES", (-1,), "the class with the most votes"),
            TensorSpec("votes", "FP32", (-1, len(names)), "fraction of the clients' votes for each class", names),
        )

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        votes = np.stack([self._outputs_of(client, samples).argmax(axis=1) for client in self.models])
        count = len(self.class_names)
        shares = vote_shares(votes, count).astype(np.float32)
        return {"class": self._named(majority_vote(votes, count)), "votes": shares}


class ConfidenceEndpoint(Endpoint):
    """The prediction of the client whose local model gives its class the highest probability."""

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The client and its prediction."""
        return (client_spec("the client with the most confident model"), *output_specs(self.first.preprocessing))

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        probabilities = np.stack([self._outputs_of(client, samples) for client in self.models])
        chosen = probabilities.max(axis=2).argmax(axis=0)
        picked = probabilities[chosen, np.arange(len(chosen))]
        first, second = output_specs(self.first.preprocessing)
        answer = {first.name: picked, second.name: self._named(picked.argmax(axis=1))}
        return {"client": self._client_names[chosen], **answer}


def client_spec(description: str) -> TensorSpec:
    """Return the specification of the output that names a client."""
    return TensorSpec("client", "BYTES", (-1,), description)


def name_of(client: int, model: ClientModel) -> str:
    """Return the name under which the service offers a client's model."""
    return model.site or f"client-{client}"
