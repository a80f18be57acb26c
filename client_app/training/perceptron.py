"""Closed-form gradients of perceptrons with cross-entropy loss, for many models at a time.

In a small network, autograd's bookkeeping takes most of a step's time. The matrix products alone take less than
half of this time, and one batched product serves several models.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from posy.client_app.training.batches import Batch
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected


def linear_layers(module: nn.Module) -> list[str]:
    """Return the names of a perceptron's linear layers from input to output, or an empty list for other networks.

    A perceptron has only ReLUs between its linear layers.
    """
    if not isinstance(module, ChainModel):
        return []
    hidden = {f"blocks.{name}.linear": getattr(block, "linear", None) for name, block in module.blocks.items()}
    is_plain = all(
        type(block) is FullyConnected and not block.norm and not block.dropout for block in module.blocks.values()
    )
    layers = {**hidden, "head": module.head}
    has_biases = all(type(layer) is nn.Linear and layer.bias is not None for layer in layers.values())
    return list(layers) if is_plain and has_biases else []


@torch.no_grad()
def gradients(
    layers: Sequence[tuple[Tensor, Tensor]], x: Tensor, y: Tensor, weight: Tensor | None, first: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Differentiate the mean cross-entropy of P perceptrons, each on its own batch.

    Parameters
    ----------
    layers : sequence of (torch.Tensor, torch.Tensor)
        Weight ``(P, out, in)`` and bias ``(P, out)`` of each layer.
    x : torch.Tensor, (P, B, ...)
        Inputs.
    y : torch.Tensor, int64, (P, B)
        Labels.
    weight : torch.Tensor or None, (P, B)
        Weights of the samples' losses. The sum of the weighted losses is divided by B, not by the sum of the weights.
    first : int
        The first layer whose gradients are returned.

    Returns
    -------
    torch.Tensor, (P,)
        The losses.
    list of torch.Tensor
        Gradients of each layer's weight and bias, starting with layer ``first``.
    """
    inputs, hidden = list[Tensor](), x.flatten(2)
    for number, (matrix, bias) in enumerate(layers, start=1):
        inputs.append(hidden)
        hidden = torch.baddbmm(bias.unsqueeze(1), hidden, matrix.transpose(1, 2))
        if number < len(layers):
            hidden = hidden.relu_()
    logs, labels = hidden.log_softmax(dim=2), y.unsqueeze(2)
    losses = -logs.gather(2, labels).squeeze(2)
    losses = (losses if weight is None else losses * weight).mean(dim=1)
    # The gradient with respect to the logits: softmax minus the one-hot label, times the sample's weight in the mean.
    slope = logs.exp_().scatter_add_(2, labels, logs.new_full((), -1.0).expand_as(labels))
    slope = slope.div_(y.shape[1]) if weight is None else slope.mul_(weight.unsqueeze(2) / y.shape[1])
    by_layer: list[Tensor] = []
    for number in reversed(range(first, len(layers))):
        by_layer = [torch.bmm(slope.transpose(1, 2), inputs[number]), slope.sum(dim=1), *by_layer]
        if number > first:
            slope = torch.bmm(slope, layers[number][0])
            slope = slope.mul_(inputs[number] > 0)
    return losses, by_layer


class ClosedForm:
    """Closed-form gradients of a perceptron.

    ``layers`` are its linear layers from input to output. ``names`` are the tensors whose gradients are returned.
    """

    def __init__(self, layers: Sequence[str], names: Sequence[str]) -> None:
        self._layers = [(f"{layer}.weight", f"{layer}.bias") for layer in layers]
        self._first = min(number for number, layer in enumerate(self._layers) if set(layer) & set(names))
        differentiated = [name for layer in self._layers[self._first :] for name in layer]
        self._indices = [differentiated.index(name) for name in names]

    def gradients(
        self,
        tensors: Mapping[str, Tensor],
        shaped: Callable[[Tensor], Tensor],
        batch: Batch,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the losses ``(P,)``, and the gradients in the order of ``names``.

        ``shaped`` reshapes a tensor to ``(P, ...)`` for P models. The batch is ``(P, B, ...)``.
        """
        with torch.no_grad():
            layers = [(shaped(tensors[matrix]), shaped(tensors[bias])) for matrix, bias in self._layers]
        losses, by_layer = gradients(layers, batch.x, batch.y, batch.weight, self._first)
        return losses, [by_layer[index] for index in self._indices]
