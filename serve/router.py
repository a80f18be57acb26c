"""Guide each query to the client whose data it most resembles, and answer with this client's model."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from posy.client_app.schema import TensorSpec, output_specs
from posy.client_app.stored import ClientModel
from posy.serve.endpoints import Endpoint, client_spec
from posy.serve.tensors import Array
from posy.server_app.none_fits import Calibration
from posy.server_app.system import routing_scores

NONE_FITS = TensorSpec("none_fits", "BOOL", (-1,), "whether the sample is far from every client's data")
DISTANCE = TensorSpec("distance", "FP32", (-1,), "distance to the closest client's data; above 1, none fits")


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
        self._priors, self._calibration = priors, calibration
        self._absent: Collection[int] = [client for client in range(len(priors)) if client not in self.models]
        self._members = np.array(list(self.models))

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The chosen client, its prediction, the ranking of the clients, and whether the query fits no client."""
        count = len(self.models)
        return (
            client_spec("the client that most likely has such samples; its model predicts the class"),
            *output_specs(self.first.preprocessing),
            TensorSpec("clients", "BYTES", (-1, count), "all clients, the most probable first"),
            TensorSpec("client_probabilities", "FP32", (-1, count), "probability of each client in `clients`"),
            *(() if isinstance(self._calibration, str) else (NONE_FITS, DISTANCE)),
        )

    @property
    def card(self) -> dict[str, Any]:
        """The model card, with the calibration of the distance."""
        calibration = self._calibration
        facts = {"reason": calibration} if isinstance(calibration, str) else dict(calibration.facts)
        return super().card | {"none_fits": facts}

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        x = next(iter(samples.values()))
        logits = self.first.client_logits(x)
        scores = routing_scores(self.first.settings.method, logits, self._priors, self._absent)
        probabilities = scores.softmax(dim=-1)[:, self._members]
        order = probabilities.argsort(dim=-1, descending=True, stable=True)
        ranked = order.numpy(force=True)
        outputs = self._predictions(x, ranked[:, 0])
        probability_spec, class_spec = output_specs(self.first.preprocessing)
        return {
            "client": self._client_names[ranked[:, 0]],
            probability_spec.name: outputs,
            class_spec.name: self._named(outputs.argmax(axis=1)),
            "clients": self._client_names[ranked],
            "client_probabilities": probabilities.gather(1, order).numpy(force=True),
            **self._distances(x),
        }

    def _distances(self, x: Tensor) -> dict[str, Array]:
        """Return the outputs that exist if the distance is calibrated."""
        if isinstance(self._calibration, str):
            return {}
        distances = self._calibration.relative(self.first, x)
        return {NONE_FITS.name: distances > 1, DISTANCE.name: distances.astype(np.float32)}

    def _predictions(self, x: Tensor, chosen: Array) -> Array:
        """Return the outputs ``(n, C)`` of the chosen clients' models, given the position of each in ``models``."""
        outputs = np.empty((len(x), len(self.class_names)), np.float32)
        for position in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == position)
            outputs[rows] = self._forward(self.models[int(self._members[position])], x[rows])
        return outputs
