"""Networks for token sequences: ``fasttext``, ``textcnn`` and ``lstm``. Token 0 is padding and has no effect."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected, linear

DIMENSION = 64  # dimension of the token embeddings
CHANNELS = 100  # output channels of each TextCNN convolution
WIDTHS = (3, 4, 5)  # widths of TextCNN's convolutions, in tokens
VECTOR = 300  # dimension of the LSTM's word vectors
UNITS = (128, 64, 32)  # units of the LSTM, and of the fully connected layers after it


def fasttext(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return fastText with one hidden layer (Joulin et al., 2017; cwFedAvg, Table 6)."""
    blocks = {
        "embedding": MeanEmbedding(task.vocabulary, DIMENSION),
        "fc1": FullyConnected(DIMENSION, DIMENSION, ranks.get("fc1")),
    }
    return ChainModel(blocks, linear(DIMENSION, task.num_classes, ranks.get("head")))


def textcnn(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return TextCNN (Kim, 2014; FedFew, Section 5.1)."""
    blocks = {
        "embedding": nn.Embedding(task.vocabulary, DIMENSION, padding_idx=0),
        "convs": ParallelConvolutions(DIMENSION, CHANNELS, WIDTHS),
    }
    return ChainModel(blocks, linear(CHANNELS * len(WIDTHS), task.num_classes, ranks.get("head")))


def lstm(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a network of word vectors, an LSTM and three fully connected layers (PPFE, Appendix A.1).

    The paper gives no widths. The word vectors have dimension 300, and the LSTM has 128 units, as in FedRep's program
    for Sent140.
    """
    blocks = {
        "embedding": WordVectors(task.vocabulary, VECTOR),
        "lstm": LSTM(VECTOR, UNITS[0]),
        "fc1": FullyConnected(UNITS[0], UNITS[1], ranks.get("fc1")),
        "fc2": FullyConnected(UNITS[1], UNITS[2], ranks.get("fc2")),
    }
    return ChainModel(blocks, linear(UNITS[2], task.num_classes, ranks.get("head")))


class MeanEmbedding(nn.Module):
    """Mean of the embeddings of a text's tokens; zero for a text that contains only padding."""

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dimension, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map int64 tokens ``(B, L)`` to ``(B, dimension)``."""
        mask = (x != 0).unsqueeze(-1)
        total: Tensor = masked(self.tokens(x), mask).sum(1)
        return total / mask.sum(1).clamp(min=1)


class WordVectors(nn.Module):
    """Embedding of each token of a text; padding has a zero vector."""

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dimension, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map int64 tokens ``(B, L)`` to ``(B, L, dimension)``."""
        return masked(self.tokens(x), (x != 0).unsqueeze(-1))


class LSTM(nn.Module):
    """LSTM that returns its output after the last token (Hochreiter and Schmidhuber, 1997; Gers et al., 2000).

    Tokens whose vector is zero are skipped. The weights have PyTorch's layout: the rows of the gates i, f, g and o are
    stacked in this order. ``nn.LSTM`` does not work with ``vmap``.

        i, f, o = sigmoid(W x + U h + b),  g = tanh(W x + U h + b);  c = f c + i g;  h = o tanh(c)
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.input = nn.Parameter(torch.empty(4 * units, inputs))
        self.recurrent = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.empty(4 * units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly from ±1 / sqrt(units), as PyTorch does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.units), 1 / math.sqrt(self.units))

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors ``(B, L, inputs)`` to ``(B, units)``."""
        present = (x != 0).any(-1, keepdim=True)
        inputs = F.linear(x, self.input, self.bias)  # one product for all tokens
        h = c = inputs[:, 0, : self.units] * 0
        for token in range(x.shape[1]):
            i, f, g, o = (inputs[:, token] + F.linear(h, self.recurrent)).chunk(4, dim=-1)
            memory = f.sigmoid() * c + i.sigmoid() * g.tanh()
            c = torch.where(present[:, token], memory, c)
            h = torch.where(present[:, token], o.sigmoid() * memory.tanh(), h)
        return h


class ParallelConvolutions(nn.Module):
    """Convolutions of several widths in parallel, each with a ReLU and a maximum over time."""

    def __init__(self, in_channels: int, out_channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(in_channels, out_channels, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings ``(B, L, in_channels)`` to ``(B, out_channels * len(widths))``."""
        x = x.transpose(1, 2)
        return F.relu(torch.cat([conv(x).amax(2) for conv in self.convs], 1))


def masked(vectors: Tensor, mask: Tensor) -> Tensor:
    """Return vectors ``(B, L, D)`` with zeros where the mask ``(B, L, 1)`` is false.

    The mask is necessary because averaging or noise may make the embedding of padding nonzero.
    """
    return vectors * mask.to(vectors.dtype)
