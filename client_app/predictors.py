"""The models that a client predicts with: one network, or an ensemble."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.training.work import TrainingDivergedError
from posy.data.task import Task
from posy.models.architecture import Architecture, reduced_like
from posy.models.parameters import FloatArray
from posy.scores import Predictions
from posy.strategies.run_settings import RunSettings, positive_class

if TYPE_CHECKING:
    from posy.strategies.settings import MethodSettings


@dataclass
class Member:
    """One model of an ensemble: its parameters ``(d,)``, its network and its coefficient.

    ``fixed`` contains the network's fixed tensors, keyed by name, if the model was read from a file.
    """

    parameters: Tensor
    architecture: Architecture
    coefficient: float = 1.0
    fixed: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass
class Predictor:
    """One model, or an ensemble whose probabilities (with ``logarithms``, log-probabilities) are averaged.

    ``chosen`` is the method's choice for this client, such as the index of one of the server's models.
    """

    members: list[Member]
    chosen: str = ""
    logarithms: bool = False

    def log_probabilities(self, outputs: Sequence[Tensor | tuple[Tensor, ...]]) -> Tensor:
        """Return the log-probabilities ``(n, C)`` from the outputs of the members' networks.

        Parameters
        ----------
        outputs : sequence of Tensor or tuple of Tensor
            Each member's logits ``(n, C)``, alone or as the first of several outputs.
        """
        rows = [F.log_softmax(output[0] if isinstance(output, tuple) else output, dim=-1) for output in outputs]
        if len(rows) == 1:
            return rows[0]
        coefficients = torch.tensor([member.coefficient for member in self.members], device=rows[0].device)
        return combined(torch.stack(rows), coefficients, self.logarithms)

    def as_arrays(self) -> dict[str, FloatArray]:
        """Return the tensors, keyed by name.

        In an ensemble, the names start with ``stage<t>.``, and each member has a coefficient.
        """
        is_ensemble = len(self.members) > 1
        arrays: dict[str, FloatArray] = {}
        for number, member in enumerate(self.members, start=1):
            prefix = f"stage{number}." if is_ensemble else ""
            tensors = {**member.architecture.layout.views(array_of(member.parameters)), **member.architecture.fixed}
            arrays |= {prefix + name: array for name, array in tensors.items()}
            if is_ensemble:
                arrays[f"{prefix}coefficient"] = np.array([member.coefficient], np.float32)
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, FloatArray], architecture: Architecture, method: "MethodSettings"
    ) -> Self:
        """Rebuild the predictor from the ``arrays`` that :meth:`as_arrays` returned.

        Parameters
        ----------
        arrays : mapping
            The members' tensors, keyed by name.
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


def loss_of(log_probabilities: Tensor, labels: Tensor, advice: str = "a smaller lr may help") -> float:
    """Return the mean cross-entropy of log-probabilities ``(n, C)``.

    NaN raises a :class:`TrainingDivergedError`, whose message ends with the advice.
    """
    if bool(torch.isnan(log_probabilities).any()):
        raise TrainingDivergedError(f"the model has diverged: its outputs contain NaN; {advice}")
    return float(F.nll_loss(log_probabilities, labels))


def predictions_of(log_probabilities: Tensor, labels: Tensor, task: Task, run: RunSettings) -> Predictions:
    """Return log-probabilities ``(n, C)`` and labels as predictions, from which metrics are computed."""
    probabilities = log_probabilities.double().exp()
    probabilities /= probabilities.sum(dim=-1, keepdim=True)  # float32 sums to 1 only up to rounding
    positive = positive_class(run, task.class_names)
    return Predictions(
        task.target, array_of(labels), array_of(probabilities), positive, run.threshold, run.fixed_sensitivity
    )


def combined(outputs: Tensor, coefficients: Tensor, logarithms: bool = False) -> Tensor:
    """Return the log-probabilities ``(n, C)`` of an ensemble of T members.

    The members' probabilities or, with ``logarithms``, log-probabilities are averaged with the coefficients as weights.
    If all coefficients are zero, all members get the same weight.

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
    # With negative coefficients, the sum is below 1. Distributing the rest evenly keeps the order of the classes.
    mixture += (1 - mixture.sum(dim=-1, keepdim=True)) / mixture.shape[-1]
    return mixture.clamp_min(1e-12).log()


def array_of(values: Any) -> npt.NDArray[Any]:
    """Return a tensor, or another array-like value, as a NumPy array in host memory."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
