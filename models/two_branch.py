"""FedDRM's network: one body, a branch that predicts classes, and a branch that predicts clients."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from posy.models.chain import ChainModel, run_blocks
from posy.models.layers import kaiming_linear, reset_parameters
from posy.models.own import CustomModel
from posy.randomness import seed_of, seeded

STATISTICS_BLOCKS = 2
"""Number of shared blocks whose channels' means and standard deviations embed an image."""
IMAGE_AXES = 4


class TwoBranch(nn.Module):
    """Class branch and client branch on a shared body (FedDRM, Section 3.1 and Fig. 2).

    The class branch is the model itself. After the shared blocks (see :func:`shared_blocks`), the client branch has
    copies of the remaining blocks with separate weights, and a classifier with one output for each of the M clients.
    """

    def __init__(self, model: ChainModel, num_clients: int, sharing: str = "deep", *, seed: int = 0) -> None:
        super().__init__()
        self.shared_blocks = shared_blocks(model, sharing)
        self.model = model
        self.client_blocks = nn.ModuleDict(
            {name: copy.deepcopy(block) for name, block in list(model.blocks.items())[self.shared_blocks :]}
        )
        with seeded(seed_of(seed, "client-branch")):  # a different stream from the class branch's
            reset_parameters(self.client_blocks)
            self.client_head = nn.Linear(model.embedding_dim, num_clients)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The client branch, keyed by its layer name."""
        return {"client-branch": nn.ModuleList([self.client_blocks, self.client_head])}

    def initialise_linear(self) -> None:
        """Apply Kaiming initialisation to the linear layers of the client branch."""
        kaiming_linear(self.client_blocks)
        kaiming_linear(self.client_head)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return class logits ``(B, C)`` and client logits ``(B, M)``."""
        classes, clients = self.shared_part(x)
        return self.class_head(classes), clients

    @property
    def class_head(self) -> nn.Module:
        """The class classifier, which each client keeps."""
        return self.model.head

    def shared_part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the class classifier ``(B, D)`` and client logits ``(B, M)``; shared blocks run once."""
        blocks = list(self.model.blocks.values())
        shared = run_blocks(blocks[: self.shared_blocks], x)
        classes = run_blocks(blocks[self.shared_blocks :], shared).flatten(1)
        clients = run_blocks(self.client_blocks.values(), shared).flatten(1)
        return classes, self.client_head(clients)

    def client_embeddings(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return embeddings in which foreign samples are far from the clients' samples.

        The first embedding is the input of the client classifier ``(B, D)``, scaled to unit length. For images, the
        second one contains the mean and the standard deviation of each channel after the first shared blocks. These
        blocks still distinguish images that a weakly trained network maps to similar inputs of its classifier.
        """
        statistics: list[Tensor] = []
        for number, block in enumerate(list(self.model.blocks.values())[: self.shared_blocks]):
            x = run_blocks([block], x)
            if x.dim() == IMAGE_AXES and number < STATISTICS_BLOCKS:
                statistics += [x.mean((2, 3)), x.std((2, 3), correction=0)]
        clients = normalize(run_blocks(self.client_blocks.values(), x).flatten(1))
        return (clients, torch.cat(statistics, 1)) if statistics else (clients,)


def shared_blocks(model: ChainModel, level: str) -> int:
    """Return how many blocks the branches share at one of FedDRM's levels (Figs. 6 and 12).

    `none` is 0, `shallow` is the first block, and `deep` is all blocks but the last. `mid` is halfway between shallow
    and deep. In networks with fewer than four blocks, some levels coincide. A custom network is a single
    block, which the branches share at every level except `none`.
    """
    if isinstance(model, CustomModel):
        return 0 if level == "none" else 1
    deep = max(len(model.blocks) - 1, 0)
    shallow = min(1, deep)
    return {"none": 0, "shallow": shallow, "mid": (shallow + deep) // 2, "deep": deep}[level]
