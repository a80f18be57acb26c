"""A client's predictors: a single network, or an ensemble."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.training.losses import binary_cross_entropy, squared_error
from posy.client_app.training.work import TrainingDivergedError
from posy.data.task import Task
from posy.metrics import CLASSES, LABELS, VALUES
from posy.models.architecture import Architecture, reduced_like
from posy.models.parameters import FloatArray
from posy.scores import Predictions
from posy.strategies.columns import predictions_with
from posy.strategies.run_settings import RunSettings

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
    """One model, or an ensemble that averages values or probabilities (log-probabilities if ``logarithms`` is True).

    ``chosen`` is the method's choice for this client, such as the index of one of the server's models.
    """

    members: list[Member]
    chosen: str = ""
    logarithms: bool = False

    def combine(self, outputs: Sequence[Tensor | tuple[Tensor, ...]]) -> Tensor:
        """Return the prediction ``(n, C)``: log-probabilities of classes, logits of labels, or standardised values.

        Parameters
        ----------
        outputs : sequence of Tensor or tuple of Tensor
            Each member's output ``(n, C)``, or a tuple whose first item is this output.
        """
        rows = [output[0] if isinstance(output, tuple) else output for output in outputs]
        target = self.members[0].architecture.task.target
        if target == CLASSES:
            rows = [F.log_softmax(row, dim=-1) for row in rows]
        if len(rows) == 1:
            return rows[0]
        coefficients = torch.tensor([member.coefficient for member in self.members], device=rows[0].device)
        return combined(torch.stack(rows), coefficients, self.logarithms, target)

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


def loss_of(outputs: Tensor, y: Tensor, advice: str = "a smaller lr may help", target: str = CLASSES) -> float:
    """Return the mean cross-entropy of classes or labels, or the mean squared error of standardised values.

    Outputs that contain NaN raise a :class:`TrainingDivergedError` whose message ends with ``advice``.

    Parameters
    ----------
    outputs : Tensor, (n, C)
        Predictions as :meth:`Predictor.combine` returns them.
    y : Tensor
        Classes ``(n,)``, or labels or standardised values ``(n, C)``.
    advice : str
        The end of the error message.
    target : str
        The target of the task (see :mod:`posy.metrics`).
    """
    if bool(torch.isnan(outputs).any()):
        raise TrainingDivergedError(f"the model has diverged: its outputs contain NaN; {advice}")
    if target == CLASSES:
        return float(F.nll_loss(outputs, y))
    return float((binary_cross_entropy if target == LABELS else squared_error)(outputs, y).mean())


def predictions_of(outputs: Tensor, y: Tensor, task: Task, run: RunSettings) -> Predictions:
    """Convert outputs ``(n, C)`` of :meth:`Predictor.combine` to predictions for computing metrics.

    ``y`` contains classes ``(n,)``, labels ``(n, C)``, or values ``(n, C)`` in their original unit.
    """
    final = in_original_unit(outputs.double(), task)
    if task.target == CLASSES:
        final /= final.sum(dim=-1, keepdim=True)  # float32 probabilities sum to 1 only up to rounding errors
    return predictions_with(task, run, array_of(y), array_of(final))


def in_original_unit(outputs: Tensor, task: Task) -> Tensor:
    """Return the probabilities ``(n, C)`` of classes or labels, or the values ``(n, C)`` in their original unit."""
    if task.target == CLASSES:
        return outputs.exp()
    if task.target == LABELS:
        return outputs.sigmoid()
    mean, std = _value_scale(outputs, task)
    return outputs * std + mean


def standardised(y: Tensor, task: Task) -> Tensor:
    """Return targets in the form that a network predicts: values ``(n, C)`` become (value - mean) / std, float32."""
    if task.target != VALUES:
        return y
    mean, std = _value_scale(y, task)
    return ((y - mean) / std).float()


def _value_scale(like: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each value ``(C,)``."""
    mean, std = task.value_mean or (0.0,) * task.num_classes, task.value_std or (1.0,) * task.num_classes
    return like.new_tensor(mean), like.new_tensor(std)


def combined(outputs: Tensor, coefficients: Tensor, logarithms: bool = False, target: str = CLASSES) -> Tensor:
    """Return the prediction ``(n, C)`` of an ensemble of T members, as in :meth:`Predictor.combine`.

    The members' probabilities or, with ``logarithms``, log-probabilities are averaged with the coefficients as weights.
    Values are averaged over the members with positive coefficients. If all coefficients are zero, all members have the
    same weight.

    Parameters
    ----------
    outputs : Tensor, (T, n, C)
        Log-probabilities of classes, logits of labels, or values of the members.
    coefficients : Tensor, (T,)
        Weights of the members, which may be negative.
    logarithms : bool
        Whether to average log-probabilities.
    target : str
        The target of the task (see :mod:`posy.metrics`).
    """
    if target == VALUES:
        coefficients = coefficients.clamp_min(0.0)
    # A branch would depend on the values of a tensor, which the export of a model does not support.
    coefficients = torch.where(coefficients.any(), coefficients, torch.ones_like(coefficients))
    coefficients = coefficients / coefficients.abs().sum()

    def averaged(values: Tensor) -> Tensor:
        return torch.einsum("t,tnc->nc", coefficients, values)

    if target == VALUES:
        return averaged(outputs)
    if logarithms:  # the logit of a label's normalised geometric mean is the mean logit
        return averaged(outputs) if target == LABELS else F.log_softmax(averaged(outputs), dim=-1)
    # With negative coefficients, the sum is below 1. Distributing the rest evenly preserves the order of the classes.
    if target == LABELS:
        present, absent = averaged(outputs.sigmoid()), averaged((-outputs).sigmoid())
        missing = (1 - present - absent) / 2
        return (present + missing).clamp_min(1e-12).log() - (absent + missing).clamp_min(1e-12).log()
    mixture = averaged(outputs.exp())
    mixture += (1 - mixture.sum(dim=-1, keepdim=True)) / mixture.shape[-1]
    return mixture.clamp_min(1e-12).log()


def array_of(values: Any) -> npt.NDArray[Any]:
    """Return a tensor, or another array-like value, as a NumPy array in host memory."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
