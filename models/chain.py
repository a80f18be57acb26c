"""The common form of all networks: a chain of named blocks with a linear head."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from posy.models.layers import CosineLinear, FullyConnected, LowRankLinear
from posy.randomness import seed_of, seeded


class ChainModel(nn.Module):
    """A chain of named blocks and a linear head.

    Methods refer to layers by these names, for example to personal layers or to layers that two branches share. Every
    block has parameters and contains its pooling and activation. In a network without blocks, the input of the head is
    the flattened input of the network.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], head: nn.Linear | LowRankLinear) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)
        self.head = head

    def body(self, x: Tensor) -> Tensor:
        """Return the output of the last block, ``(B, embedding_dim)``."""
        return run_blocks(self.blocks.values(), x).flatten(1)

    def forward(self, x: Tensor, features: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits ``(B, C)`` of a batch ``(B, *input_shape)``; with ``features``, the head's inputs first."""
        embedded = self.body(x)
        logits = self.head(embedded)
        return (embedded, logits) if features else logits

    def given_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names of tensors in this network to their names in the user's module."""
        return {name: name for name in names}

    @property
    def embedding_dim(self) -> int:
        """Number D of the head's inputs."""
        return self.head.in_features

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the blocks from input to output, then ``head``."""
        return (*self.blocks, "head")

    @property
    def fully_connected(self) -> tuple[str, ...]:
        """Names of the fully connected layers, including the head."""
        return (*(name for name, block in self.blocks.items() if isinstance(block, FullyConnected)), "head")

    def stem(self, name: str) -> str:
        """Return the prefix of a fully connected layer's tensor names."""
        return "head." if name == "head" else f"blocks.{name}.linear."

    def layer(self, name: str) -> nn.Module:
        """Return a block by its name, or the head."""
        return self.head if name == "head" else self.blocks[name]


def run_blocks(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return the output of a chain of blocks."""
    for block in blocks:
        x = block(x)
    return x


def with_cosine_head(chain: ChainModel, *, classes: int, scale: float, seed: int) -> ChainModel:
    """Replace the head of a network with a :class:`CosineLinear` head, and return the network."""
    with seeded(seed_of(seed, "head")):
        chain.head = CosineLinear(chain.embedding_dim, classes, scale)
    return chain
