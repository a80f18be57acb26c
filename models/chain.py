"""The form that all networks share: a chain of named blocks with a linear head."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from posy.models.layers import FullyConnected, LowRankLinear


class ChainModel(nn.Module):
    """A chain of named blocks and a linear head.

    Methods choose layers by these names: what is personal, what is averaged class-wise, what two
    branches share. Every block holds parameters; pooling and activations live inside the blocks.
    Without blocks the head sees the flattened input.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], head: nn.Linear | LowRankLinear) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)
        self.head = head

    def body(self, x: Tensor) -> Tensor:
        """Return the output of the last block, ``(B, embedding_dim)``."""
        return run_blocks(self.blocks.values(), x).flatten(1)

    def forward(self, x: Tensor, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``(B, C)`` of a batch ``(B, *input_shape)``, on demand after what the head has seen."""
        seen = self.body(x)
        logits = self.head(seen)
        return (seen, logits) if features else logits

    def given_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return what tensors are called in the module that somebody has given, by their names here."""
        return {name: name for name in names}

    @property
    def embedding_dim(self) -> int:
        """Number of features that the head sees."""
        return self.head.in_features

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the blocks from input to output, then ``head``."""
        return (*self.blocks, "head")

    @property
    def fully_connected(self) -> tuple[str, ...]:
        """Names of the layers that are fully connected, the head included."""
        return (*(name for name, block in self.blocks.items() if isinstance(block, FullyConnected)), "head")

    def stem(self, name: str) -> str:
        """Return what the names of a fully connected layer's tensors begin with."""
        return "head." if name == "head" else f"blocks.{name}.linear."

    def layer(self, name: str) -> nn.Module:
        """Return a block by its name, or the head."""
        return self.head if name == "head" else self.blocks[name]


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Apply blocks one after the other."""
    for block in blocks:
        x = block(x)
    return x
