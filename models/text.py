"""Networks for token sequences: ``fasttext`` and ``textcnn``. Token 0 is padding and counts for nothing."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected, linear

DIMENSION = 64  # of the token embeddings
CHANNELS = 100  # of each of TextCNN's convolutions
WIDTHS = (3, 4, 5)  # of TextCNN's convolutions, in tokens


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


class MeanEmbedding(nn.Module):
    """Mean of the embeddings of a text's tokens; zero for a text that is all padding."""

    def __init__(self, vocabulary: int, dimension: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dimension, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """Map int64 tokens ``(B, L)`` to ``(B, dimension)``."""
        # Masked explicitly: averaging or noise may move the padding row off zero.
        mask = (x != 0).unsqueeze(-1).to(self.tokens.weight.dtype)
        total: Tensor = (self.tokens(x) * mask).sum(1)
        return total / mask.sum(1).clamp(min=1)


class ParallelConvolutions(nn.Module):
    """Convolutions of several widths side by side, each with ReLU and its maximum over time."""

    def __init__(self, in_channels: int, out_channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(in_channels, out_channels, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """Map embeddings ``(B, L, in_channels)`` to ``(B, out_channels * len(widths))``."""
        x = x.transpose(1, 2)
        return F.relu(torch.cat([conv(x).amax(2) for conv in self.convs], 1))
