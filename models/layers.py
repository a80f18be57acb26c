"""Building blocks of the networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.models.parameters import fixed_tensors


class Convolution(nn.Module):
    """Square convolution without padding, optional GroupNorm, 2×2 max-pooling, ReLU.

    Pooling precedes the ReLU: the result is the same, but the ReLU processes only a quarter of the values.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, norm_groups: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel)
        self.norm = nn.GroupNorm(norm_groups, out_channels) if norm_groups else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, C_in, H, W)`` to ``(B, C_out, (H-k+1)//2, (W-k+1)//2)``."""
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        return F.relu(F.max_pool2d(x, 2))


class FullyConnected(nn.Module):
    """Flatten, linear layer (dense or low-rank), optional LayerNorm, ReLU, optional dropout."""

    def __init__(
        self, in_features: int, out_features: int, rank: int | None = None, norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.linear = linear(in_features, out_features, rank)
        self.norm = nn.LayerNorm(out_features) if norm else None
        self.dropout = Dropout(out_features, dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, ...)`` to ``(B, out_features)``."""
        x = self.linear(x.flatten(1))
        if self.norm is not None:
            x = self.norm(x)
        x = F.relu(x)
        return x if self.dropout is None else self.dropout(x)


class Dropout(nn.Module):
    """Dropout that zeroes features with probability p, and divides the others by 1 − p (Srivastava et al., 2014).

    A feature is zeroed where the random ``numbers`` ``(B, features)``, uniform in [0, 1), are below p. The trainer sets
    ``numbers`` for each batch, so that the mask depends only on the client and its round. Without ``numbers``, or in
    evaluation mode, the layer returns its input unchanged.
    """

    numbers: Tensor | None

    def __init__(self, features: int, probability: float) -> None:
        super().__init__()
        self.features = features
        self.probability = probability
        self.register_buffer("numbers", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, features)`` to ``(B, features)``."""
        if not self.training or self.numbers is None:
            return x
        return x * (self.numbers >= self.probability) / (1 - self.probability)


class LowRankLinear(nn.Module):
    """Linear layer ``y = (x Vᵀ) Uᵀ + b`` with two dense factors (PPFE, Section 4 and Appendix A.3).

    V ``(rank, in_features)`` is the weight of ``down``. U ``(out_features, rank)`` and b are the weight and bias of
    ``up``. With ``bias=False``, b is omitted.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias)

    @property
    def weight(self) -> Tensor:
        """The product U V, ``(out_features, in_features)``."""
        return self.up.weight @ self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, in_features)`` to ``(B, out_features)``."""
        return self.up(self.down(x))


class CosineLinear(nn.Linear):
    """Layer whose outputs are scaled cosines between the input and one direction per output (FedNH, Section 3)."""

    def __init__(self, in_features: int, out_features: int, scale: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.scale = scale

    def reset_parameters(self) -> None:
        """Draw new directions from the global generator."""
        with torch.no_grad():
            self.weight.copy_(spread_directions(self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, in_features)`` to ``(B, out_features)``."""
        return self.scale * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))


SHARPNESS, STEP, STEPS = 20.0, 0.1, 500
"""Repulsion of directions: inverse temperature of the softmax over cosines, step size, number of steps."""


def spread_directions(count: int, size: int) -> Tensor:
    """Draw unit vectors ``(count, size)`` from the global generator such that their largest cosine is small.

    Up to ``size + 1`` directions are the vertices of a randomly rotated regular simplex, whose cosines are the smallest
    possible, -1 / (count - 1). Larger sets start from random directions, which repel each other for :data:`STEPS`
    steps.
    """
    if not 2 <= count <= size + 1:
        directions = F.normalize(torch.randn(count, size))
        for _ in range(STEPS if count > 1 else 0):
            weights = (SHARPNESS * directions @ directions.T).fill_diagonal_(-torch.inf).softmax(dim=1)
            directions = F.normalize(directions - STEP * weights @ directions)
        return directions
    steps = torch.arange(1.0, count)
    helmert = (torch.ones(count - 1, count).tril() - torch.diag(steps, 1)[:-1]) / (steps * (steps + 1)).sqrt()[:, None]
    rotation, _ = torch.linalg.qr(torch.randn(size, count - 1))
    return F.normalize(helmert.T @ rotation.T)


class SingleLogit(nn.Linear):
    """Layer that computes the logit of the second of two classes; the logit of the first class is 0."""

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, in_features)`` to ``(B, 2)``."""
        return F.pad(super().forward(x), (1, 0))


def linear(
    in_features: int, out_features: int, rank: int | None = None, bias: bool = True
) -> nn.Linear | LowRankLinear:
    """Return a low-rank linear layer, capped as in :func:`capped_rank`, or a dense one if no rank saves parameters."""
    capped = None if rank is None else capped_rank(in_features, out_features, rank)
    if capped is None:
        return nn.Linear(in_features, out_features, bias)
    return LowRankLinear(in_features, out_features, capped, bias)


def capped_rank(in_features: int, out_features: int, rank: int) -> int | None:
    """Return the largest rank up to ``rank`` that saves parameters, or None; a rank < 1 raises :class:`ValueError`."""
    if rank < 1:
        raise ValueError(f"rank = {rank}: the rank of a layer must be >= 1")
    largest = (in_features * out_features - 1) // (in_features + out_features)
    return min(rank, largest) if largest > 0 else None


def low_rank_factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors (V, U) of the best low-rank approximation of a weight matrix.

    The factors are computed from the truncated singular value decomposition, weight ≈ U V (PPFE, Section 4). Each
    factor includes the square roots of the singular values, so that both have gradients of the same scale. The entry
    with the largest absolute value in each row of V is made positive, because signs could otherwise differ between CPU
    and GPU.

    Parameters
    ----------
    weight : Tensor, (out_features, in_features)
        The weight matrix.
    rank : int
        At most the smaller dimension of the matrix.

    Returns
    -------
    Tensor, (rank, in_features)
        V.
    Tensor, (out_features, rank)
        U.
    """
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    u, root, vh = u[:, :rank], s[:rank].sqrt(), vh[:rank]
    sign = vh.gather(1, vh.abs().argmax(dim=1, keepdim=True)).sign()
    return root[:, None] * sign * vh, u * sign.t() * root


def kaiming_linear(module: nn.Module) -> None:
    """Draw the weights of all linear layers by Kaiming-normal initialisation (fan-in), and set their biases to 0.

    The weights are drawn from the global generator. Cosine heads and frozen parameters keep their values.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            if part.weight.requires_grad:
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None and part.bias.requires_grad:
                nn.init.zeros_(part.bias)


def reset_parameters(module: nn.Module) -> None:
    """Draw new initial values from the global generator for a module's parameters that have a gradient."""
    names = fixed_tensors(module)
    fixed = [t for name, t in (*module.named_parameters(), *module.named_buffers()) if name in names]
    values = [tensor.detach().clone() for tensor in fixed]
    # Submodules are reset before their parent, so that the parent's initialisation overrides theirs.
    for part in reversed(list(module.modules())):
        reset = getattr(part, "reset_parameters", None)
        parameters = list(part.parameters())
        if reset is not None and (not parameters or any(parameter.requires_grad for parameter in parameters)):
            reset()
    with torch.no_grad():
        for tensor, value in zip(fixed, values, strict=True):
            tensor.copy_(value)
