"""A client's stored model, ready for predictions: a module with its preprocessing and class names."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from posy.client_app.predictors import Predictor, in_original_unit
from posy.client_app.training.trainer import EVALUATION_BATCH
from posy.client_app.workspace import plain_architecture
from posy.data.inputs import Preprocessing
from posy.metrics import LABELS, VALUES
from posy.storage import DamagedFileError, read_arrays
from posy.strategies.registry import read_settings
from posy.strategies.settings import Settings

FAR = 5.0
"""Distance from the training mean, in standard deviations, beyond which a feature is unusual."""


class Prediction(NamedTuple):
    """The predicted class or comma-separated labels, and the probabilities, keyed by name."""

    label: str
    probabilities: dict[str, float]


class ClientModel(nn.Module):
    """A client's model for predictions: one network or an ensemble, in evaluation mode.

    Attributes
    ----------
    class_names : tuple of str
        The names of the C classes, labels or values, in the order of the outputs.
    client, round : int
        The client that stored the model, and the round.
    site, chosen : str
        The client's name, which may be empty, and the method's choice for the client, such as the index of
        one of the server's models.
    point : str
        ``served`` for the model from the server, or ``local`` for the model after local training.
    preprocessing : Preprocessing
        The mapping from a sample to the network's input.
    settings : Settings
        The settings of the run.
    """

    coefficients: Tensor

    def __init__(
        self, predictor: Predictor, preprocessing: Preprocessing, settings: Settings, about: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.preprocessing, self.settings = preprocessing, settings
        self.class_names = preprocessing.task.class_names
        self.client, self.round = int(about["client"]), int(about["round"])
        self.site, self.point, self.chosen = about["site"], about["point"], about["chosen"]
        self.members = nn.ModuleList()
        for member in predictor.members:
            network = member.architecture.build()
            # Loading is not strict, because a stored model lacks BatchNorm's integer count of batches.
            tensors = member.architecture.layout.views(member.parameters)
            tensors |= {name: torch.from_numpy(array) for name, array in member.fixed.items()}
            network.load_state_dict(tensors, strict=False)
            self.members.append(network)
        self.register_buffer("coefficients", torch.tensor([member.coefficient for member in predictor.members]))
        parameters = torch.empty(0)  # the networks contain them
        self._predictor = replace(predictor, members=[replace(m, parameters=parameters) for m in predictor.members])
        self.eval()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a model that a client has stored.

        Raises
        ------
        DamagedFileError
            If the file is damaged, or was written without settings by an early version of Posy.
        FileNotFoundError
            If the file does not exist.
        """
        arrays, metadata = read_arrays(path)
        try:
            settings = read_settings({}, str(path), json.loads(metadata["settings"]))
            preprocessing = Preprocessing.from_json(metadata["preprocessing"])
            # The file of initial weights is not needed, because the stored model contains all tensors.
            settings_without_file = replace(settings, train=replace(settings.train, weights=""))
            plain = plain_architecture(settings_without_file, preprocessing.task)
            network = settings.method.network(plain, settings.data.num_clients)
            return cls(Predictor.from_arrays(arrays, network, settings.method), preprocessing, settings, metadata)
        except KeyError as error:
            raise DamagedFileError(
                f"{path} lacks {error}; an earlier version of Posy may have written it; run the federation again"
            ) from error

    def forward(self, x: Tensor) -> Tensor:
        """Return the probabilities of classes or labels, or the values, ``(B, C)`` for ``(B, *input_shape)``."""
        outputs = self._predictor.combine([network(x) for network in self.members])
        return in_original_unit(outputs, self.preprocessing.task)

    def client_logits(self, x: Tensor) -> Tensor:
        """Return the network's second output ``(B, M)``: logits over the clients."""
        return _outputs(self.members[0](x))[1]

    def query_embeddings(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the personal layers ``(B, D)`` and the logits over the clients ``(B, M)``."""
        return self.settings.method.query_embeddings(self.members[0], x)

    def answer(self, embeddings: Tensor) -> Tensor:
        """Return the class probabilities ``(B, C)``, given the result ``(B, D)`` of :meth:`query_embeddings`."""
        outputs = self._predictor.combine([self.settings.method.query_logits(self.members[0], embeddings)])
        return in_original_unit(outputs, self.preprocessing.task)

    def client_embeddings(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the embeddings ``(B, D)`` in which distances to the clients' data are measured, if there are any.

        ``x`` has the shape ``(B, *input_shape)``, and at least one sample.
        """
        method, network = self.settings.method, self.members[0]
        batches = [method.client_embeddings(network, batch) for batch in torch.split(x, EVALUATION_BATCH)]
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))

    def prepare(self, samples: Iterable[Any]) -> Tensor:
        """Return preprocessed samples ``(B, *input_shape)``. :class:`Preprocessing` lists the accepted kinds of sample.

        Raises
        ------
        DataError
            If a sample is not of the kind that the network was trained on.
        """
        return torch.cat([self.preprocessing(sample) for sample in samples]).to(self.coefficients.device)

    def unusual(self, samples: Iterable[Any]) -> list[tuple[int, str, float]]:
        """Return the samples' features or channels whose values are unusually far from the training mean.

        Parameters
        ----------
        samples : iterable
            Samples, as for :meth:`prepare`.

        Returns
        -------
        list of (int, str, float)
            The sample's index, the feature's or channel's name (or index), and its distance from the training mean in
            standard deviations, which exceeds :data:`FAR`. The distance of a channel is the largest distance in a time
            series, and the distance of an image's mean. The list is empty for text, and if the run has not measured the
            mean and the standard deviation.
        """
        inputs = list(samples)
        return self.unusual_in(self.prepare(inputs)) if inputs else []

    def unusual_in(self, x: Tensor) -> list[tuple[int, str, float]]:
        """Return the result of :meth:`unusual` for preprocessed samples ``(B, *input_shape)``."""
        preprocessing = self.preprocessing
        if preprocessing.task.kind == "text" or not preprocessing.is_measured:
            return []
        distances = self._distances(x)
        names = preprocessing.features or tuple(map(str, range(len(preprocessing.mean))))
        return [
            (number, names[feature], float(distances[number, feature]))
            for number, feature in (distances > FAR).nonzero().tolist()
        ]

    def _distances(self, x: Tensor) -> Tensor:
        """Return the distance ``(B, F)`` of each sample's features or channels from the training mean."""
        kind = self.preprocessing.task.kind
        if kind == "image":
            return x.mean(dim=(2, 3)).abs()
        return x.abs().amax(dim=1) if kind == "series" else x.abs()

    def warnings(self, samples: Iterable[Any]) -> list[list[str]]:
        """Return the warnings about each sample: unusual values, unseen categories, and images of a single colour."""
        inputs, kind = list(samples), self.preprocessing.task.kind
        texts: list[list[str]] = [[] for _ in inputs]
        part = {"features": "", "series": "channel ", "image": "the mean of channel "}.get(kind, "")
        x = self.prepare(inputs)
        for number, name, distance in self.unusual_in(x):
            texts[number].append(
                f"{part}{name} is {distance:.3g} standard deviations from the mean of the training samples, so the "
                "prediction may be meaningless; check the unit"
            )
        for number, sample in enumerate(inputs):
            for column, value in self.preprocessing.unseen(sample):
                texts[number].append(f"{column} is {value!r:.40}, which is not a category of the run")
            if kind == "image" and bool((pixels := x[number].flatten(1)).eq(pixels[:, :1]).all()):
                texts[number].append("all pixels are equal, so the prediction may be meaningless")
        return texts

    def predict(self, sample: Any) -> Any:
        """Return the prediction for one sample, or raise :class:`DataError` if the sample is of the wrong kind."""
        return self.predict_all([sample])[0]

    @torch.no_grad()
    def predict_all(self, samples: Iterable[Any]) -> list[Any]:
        """Return each sample's :class:`Prediction` or, for a regression, its values in their original unit, by name."""
        inputs = list(samples)
        rows: list[list[float]] = []
        for first in range(0, len(inputs), EVALUATION_BATCH):
            rows += self(self.prepare(inputs[first : first + EVALUATION_BATCH])).tolist()
        return [self._prediction(row) for row in rows]

    def _prediction(self, outputs: list[float]) -> Prediction | dict[str, float]:
        """Return the prediction for a sample, given the model's outputs ``(C,)``."""
        names, target = self.class_names, self.preprocessing.task.target
        by_name = dict(zip(names, outputs, strict=True))
        if target == VALUES:
            return by_name
        if target == LABELS:
            return Prediction(", ".join(self.predicted_labels(by_name)), by_name)
        return Prediction(names[outputs.index(max(outputs))], by_name)

    def predicted_labels(self, probabilities: Mapping[str, float]) -> list[str]:
        """Return the labels whose probability is at least ``threshold``, given all labels' probabilities."""
        return [name for name, probability in probabilities.items() if probability >= self.settings.run.threshold]


def _outputs(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
