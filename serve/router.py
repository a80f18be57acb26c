"""Guide each query to the client whose data it most resembles, and answer with this client's model."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from posy.client_app.none_fits import Calibration
from posy.client_app.schema import TensorSpec, output_specs
from posy.client_app.stored import ClientModel
from posy.serve.endpoints import Endpoint, client_spec, name_of
from posy.serve.tensors import Array, as_objects
from posy.server_app.system import routing_scores

NONE_FITS = TensorSpec("none_fits", "BOOL", (-1,), "whether the sample is far from every client's data")
DISTANCE = TensorSpec("distance", "FP32", (-1,), "distance to the closest client's data; above 1, none fits")


class Ranking:
    """Ranks the clients for queries.

    Parameters
    ----------
    names : mapping of int to str
        The names of the clients that can answer, keyed by client.
    priors : numpy.ndarray, (M,)
        The weights of all M clients of the run in the averaged loss.
    """

    def __init__(self, names: Mapping[int, str], priors: npt.NDArray[np.float64]) -> None:
        self.members = np.array(list(names))
        self.names = as_objects([name.encode() for name in names.values()], (len(names),))
        self._priors = priors
        self._absent: Collection[int] = [client for client in range(len(priors)) if client not in names]

    def rank(self, model: ClientModel, logits: Tensor) -> tuple[Array, dict[str, Array]]:
        """Return the order of the clients ``(n, K)`` as positions in ``members``, and the outputs that describe it.

        Parameters
        ----------
        model : ClientModel
            A model of the run.
        logits : Tensor, (n, M)
            The network's logits over the clients.
        """
        scores = routing_scores(model.settings.method, logits, self._priors, self._absent)
        probabilities = scores.softmax(dim=-1)[:, self.members]
        order = probabilities.argsort(dim=-1, descending=True, stable=True)
        ranked: Array = order.numpy(force=True)
        sorted_probabilities = probabilities.gather(1, order).numpy(force=True)
        return ranked, {"clients": self.names[ranked], "client_probabilities": sorted_probabilities}


def routed_specs(model: ClientModel, ranking: Ranking, description: str) -> tuple[TensorSpec, ...]:
    """Return the outputs of a router without the distance; ``description`` states how it chooses the client."""
    count = len(ranking.members)
    return (
        client_spec(description),
        *output_specs(model.preprocessing),
        TensorSpec("clients", "BYTES", (-1, count), "all clients, the most probable first"),
        TensorSpec("client_probabilities", "FP32", (-1, count), "probability of each client in `clients`"),
    )


def facts_of(calibration: Calibration | str) -> dict[str, Any]:
    """Return the entry of the model card about the calibrated distance."""
    return {"reason": calibration} if isinstance(calibration, str) else dict(calibration.facts)


def distances_of(model: ClientModel, x: Tensor, calibration: Calibration | str) -> dict[str, Array]:
    """Return the outputs that exist if the distance is calibrated."""
    if isinstance(calibration, str):
        return {}
    distances = calibration.relative(model, x)
    return {NONE_FITS.name: distances > 1, DISTANCE.name: distances.astype(np.float32)}


class RouterEndpoint(Endpoint):
    """Ranks the clients for each query, and answers with the model of the first client.

    Parameters
    ----------
    models : mapping of int to ClientModel
        The models of the clients that can answer, keyed by client.
    run : str
        The name of the run.
    scores : mapping
        Scores for the model card.
    priors : numpy.ndarray, (M,)
        The weights of all M clients of the run in the averaged loss.
    calibration : Calibration or str
        The calibrated distance to the clients' data, or why the run has none.
    """

    def __init__(
        self,
        models: Mapping[int, ClientModel],
        run: str,
        scores: Mapping[str, float],
        priors: npt.NDArray[np.float64],
        calibration: Calibration | str,
    ) -> None:
        super().__init__(models, run, scores)
        self._ranking = Ranking({client: name_of(client, model) for client, model in models.items()}, priors)
        self._calibration = calibration

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The chosen client, its prediction, the ranking of the clients, and whether the query fits no client."""
        description = "the client that most likely has such samples; its model predicts the class"
        specs = routed_specs(self.first, self._ranking, description)
        return specs if isinstance(self._calibration, str) else (*specs, NONE_FITS, DISTANCE)

    @property
    def card(self) -> dict[str, Any]:
        """The model card, with the calibration of the distance."""
        return super().card | {"none_fits": facts_of(self._calibration)}

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        x = next(iter(samples.values()))
        order, ranked = self._ranking.rank(self.first, self.first.client_logits(x))
        outputs = self._predictions(x, order[:, 0])
        probability_spec, class_spec = output_specs(self.first.preprocessing)
        return {
            "client": self._ranking.names[order[:, 0]],
            probability_spec.name: outputs,
            class_spec.name: self._named(outputs.argmax(axis=1)),
            **ranked,
            **distances_of(self.first, x, self._calibration),
        }

    def _predictions(self, x: Tensor, chosen: Array) -> Array:
        """Return the outputs ``(n, C)`` of the chosen clients' models, given the position of each in ``models``."""
        outputs = np.empty((len(x), len(self.class_names)), np.float32)
        for position in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == position)
            outputs[rows] = self._forward(self.models[int(self._ranking.members[position])], x[rows])
        return outputs
