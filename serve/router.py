"""Guide each query to the client whose data it most resembles, and answer with this client's model."""

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from posy.client_app.schema import TensorSpec, output_specs
from posy.client_app.stored import ClientModel
from posy.serve.endpoints import Endpoint, client_names, client_spec
from posy.serve.tensors import Array
from posy.server_app.system import routing_scores


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
    """

    def __init__(
        self,
        models: Mapping[int, ClientModel],
        run: str,
        scores: Mapping[str, float],
        priors: npt.NDArray[np.float64],
    ) -> None:
        super().__init__(models, run, scores)
        self._priors = priors
        self._absent: Collection[int] = [client for client in range(len(priors)) if client not in self.models]
        self._members = np.array(list(self.models))
        self._names = client_names(self.models)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The chosen client, its prediction, and the ranking of the clients."""
        count = len(self.models)
        return (
            client_spec("the client that most likely has such samples; its model predicts the class"),
            *output_specs(self.first.preprocessing),
            TensorSpec("clients", "BYTES", (-1, count), "all clients, the most probable first"),
            TensorSpec("client_probabilities", "FP32", (-1, count), "probability of each client in `clients`"),
        )

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
            "client": self._names[ranked[:, 0]],
            probability_spec.name: outputs,
            class_spec.name: self._named(outputs.argmax(axis=1)),
            "clients": self._names[ranked],
            "client_probabilities": probabilities.gather(1, order).numpy(force=True),
        }

    def _predictions(self, x: Tensor, chosen: Array) -> Array:
        """Return the outputs ``(n, C)`` of the chosen clients' models, given the position of each in ``models``."""
        outputs = np.empty((len(x), len(self.class_names)), np.float32)
        for position in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == position)
            outputs[rows] = self._forward(self.models[int(self._members[position])], x[rows])
        return outputs
