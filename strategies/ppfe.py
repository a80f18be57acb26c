"""PPFE: progressive personalised federated ensembles.

"Federated Ensemble Learning with Progressive Model Personalization": training goes through T stages. Stage 1 is
FedAvg; in stage t the last t − 1 layers are personal. Fully connected layers are made smaller on the way. Between
stages each client reweights its samples by the errors of the ensemble so far, as AdaBoost does, and gives the finished
stage its coefficient.

The paper tells of two ways to make layers smaller, and Posy has both. In Algorithm 1 (lines 11 and 12) and Section 4.1
layers go on from the stage before, and one that becomes personal is factorised: ``svd``. In Appendix A.4 stage 2 is
dense, and in each later stage all fully connected layers, also those still shared, are a factorisation of the FedAvg
model's, while the convolutions go on: ``svd-fedavg``. The second one transmits what Section 6.3.3 says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.common.logger import log
from flwr.common.typing import NDArrays
from torch import Tensor

from posy import figures
from posy.models.architecture import Architecture
from posy.models.layers import capped_rank, low_rank_factors
from posy.models.parameters import FloatArray, Layout, Part
from posy.settings import Search, SettingsError, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings
from posy.strategies.replies import BadReplyError, Update, mean_of, stacked, weighted_mean
from posy.strategies.settings import Settings

PAPER_ROUNDS = (30, 50, 40, 40)
"""Rounds of the stages in the paper."""


class PPFESettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of PPFE."""

    follows_number_of_rounds = True

    stages: int = setting(4, "stages T; at most one more than the network has layers to personalise", minimum=1)
    stage_rounds: str = setting(
        "", "rounds of each stage, as in 30,50,40,40; empty: num-server-rounds in the paper's proportions"
    )
    reduction: str = setting(
        "svd",
        "what makes fully connected layers smaller; svd: newly personal ones are factorised; svd-fedavg: from stage 3 "
        "on all are factors of stage 1's (Appendix A.4); sparse: weights of personal ones are masked",
        choices=("svd", "svd-fedavg", "sparse", "none"),
    )
    ranks: str = setting(
        "100,50,24;80,40,16",
        "ranks of the last fully connected layers, a list for each stage: from stage 2 on with svd, from stage 3 on "
        "with svd-fedavg (the last list goes on)",
    )
    body_lr_factor: float = setting(
        0.1,
        "factor on lr for the shared layers, from stage ppfe-body-lr-stage on",
        minimum=0,
        search=Search(0.01, 1.0, log=True),
    )
    body_lr_stage: int = setting(2, "first stage in which ppfe-body-lr-factor applies", minimum=2)
    beta: str = setting(
        "samme",
        "coefficient of a stage: the paper's (`adaboost`), that or 0 if it is negative (`adaboost-positive`), or "
        "that for several classes (`samme`)",
        choices=("samme", "adaboost", "adaboost-positive"),
    )
    loss: str = setting(
        "zero-one",
        "loss of a sample in the reweighting: 0/1, 1 - p(label), or cross-entropy over the client's largest",
        choices=("zero-one", "probability", "cross-entropy"),
    )
    weighting: str = setting(
        "loss",
        "how samples' weights enter the training: as factors on their losses, or by drawing them in proportion, "
        "which spares steps as large as the largest weight",
        choices=("loss", "resample"),
    )
    reweighting: bool = setting(True, "reweight samples between stages (off: ablation WPW)")
    ensemble: bool = setting(
        True, "predict with all stages (off: with the current one alone; ablations M1-M3, without reweighting)"
    )
    outputs: str = setting(
        "probabilities",
        "what the ensemble adds up (Eq. 8); log-probabilities: as of networks that end in a log-softmax, like FedRep's",
        choices=("probabilities", "log-probabilities"),
    )
    final_epochs: int = setting(
        0,
        "epochs of the personal layers alone in the last round of a stage, as FedRep's program ends; 0: a round like "
        "the others",
        minimum=0,
    )
    fixed_head: int = setting(
        0, "0: one more personal layer a stage; h: the last h from stage 2 on (ablations WP, M1-M3)", minimum=0
    )

    @property
    def sums_logarithms(self) -> bool:
        """Follow the setting ``outputs``."""
        return self.outputs == "log-probabilities"


@dataclass(frozen=True)
class Stage:
    """One stage: its network, its personal layers, and those that become personal with it.

    ``restarted`` are the layers that start from stage 1's model, not from that of the stage before.
    """

    number: int
    architecture: Architecture
    personal: tuple[str, ...]
    newly: tuple[str, ...]
    rounds: int
    restarted: tuple[str, ...] = ()

    @property
    def shared_part(self) -> Part:
        """The shared layers in the flat vector."""
        return self.architecture.layout.without(self.personal)

    @property
    def personal_part(self) -> Part:
        """The personal layers in the flat vector."""
        return self.architecture.layout.part(self.personal)


class PPFE(PersonalisedStrategy):
    """Average the shared layers of the stage, uniformly over its clients (Algorithm 1, line 18).

    The state holds the shared layers of this stage and of the finished ones, how many of its rounds are done, how
    many finished stages each client has ``(M,)``, and the coefficients ``(M, T)``.
    """

    state = ("rounds_done", "informed", "betas")

    def initialise(self) -> None:
        """Begin stage 1."""
        self.stages = plan_stages(self.settings, self.architecture)
        self.rounds_done = np.zeros((), np.int64)
        self.model: FloatArray = self.initial()
        self.finished: list[FloatArray] = []
        self.informed = np.zeros(self.num_clients, np.int64)
        self.betas = np.full((self.num_clients, len(self.stages)), np.nan)
        self.ends: list[int] = np.cumsum([stage.rounds for stage in self.stages]).tolist()
        planned, wanted = len(self.stages), self.method.stages
        if planned < wanted:
            few = "PPFE: %s has too few layers for %s stages, so there are %s"
            log(INFO, few, self.architecture.model, wanted, planned)
        for s in self.stages:
            ranks = dict(s.architecture.ranks)
            log(INFO, "PPFE: stage %s: %s rounds, personal %s, ranks %s", s.number, s.rounds, s.personal, ranks)

    def takes_all(self, server_round: int) -> bool:
        """Take all clients at the end of a stage too."""
        return self._is_end(server_round) or super().takes_all(server_round)

    def serve(self, client: int) -> NDArrays:
        """Send the shared layers of this stage, and those of finished stages that the client lacks."""
        return [self.model, *self.finished[self.informed[client] :]]

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Tell the stage, which finished stages come along, and whether the stage has been trained yet, or ends."""
        return {
            "stage": self.stage.number,
            "stage-ends": self._is_end(server_round),
            "first-finished": int(self.informed[client]) + 1,
            "rounds-done": int(self.rounds_done),
        }

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the shared layers of this stage."""
        return [self.model.shape]

    def check_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Refuse a number of closed stages that is impossible, and a reply that lacks a coefficient."""
        closed = int(metrics["stages-closed"])
        if not 0 <= closed <= len(self.finished):
            raise BadReplyError(f"{closed} stages closed of {len(self.finished)}")
        for number in range(1, closed + 1):
            float(metrics[f"beta-{number}"])

    def acknowledged(self, client: int, metrics: Mapping[str, Any]) -> None:
        """Remember which finished stages a client has."""
        self.informed[client] = closed = int(metrics["stages-closed"])
        for number in range(1, closed + 1):
            self.betas[client, number - 1] = metrics[f"beta-{number}"]

    def lost(self, client: int) -> None:
        """Send all finished stages again: the client may have lost what it had."""
        self.informed[client] = 0

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average; at the end of a stage keep its shared layers and begin the next one."""
        first = self.stage.number == 1
        self.model = mean_of(updates) if first else weighted_mean(stacked(updates), np.ones(len(updates)))
        self.rounds_done += 1
        quantities = {"stage": self.stage.number, "shared_parameters": self.model.size}
        if self._is_end(server_round):
            before = self.stage
            self.finished.append(self.model)
            self.rounds_done[...] = 0
            if self.stage is not before:
                whole = before.shared_part.put(np.zeros(before.architecture.layout.size, np.float32), self.model)
                begun = open_stage(before, self.stage, torch.from_numpy(whole), torch.from_numpy(self.finished[0]))
                self.model = np.ascontiguousarray(self.stage.shared_part.take(begun.numpy()))
        return quantities

    def exchanged(self) -> tuple[Layout, Part]:
        """Return the layout of the stage's network and its shared part."""
        return self.stage.architecture.layout, self.stage.shared_part

    def weight(self, client: int) -> int:
        """Count the clients alike from stage 2 on."""
        return super().weight(client) if self.stage.number == 1 else 1

    def draw(self, folder: Path) -> None:
        """Draw the coefficients of the clients' stages."""
        names = [f"stage {stage.number}" for stage in self.stages]
        panel = figures.Panel(self.betas, ylabel="client", label="beta", xticks=names)
        figures.heatmaps([panel], folder / "coefficients.png", title="Coefficients of the stages")

    @property
    def stage(self) -> Stage:
        """The stage that is being trained; the last one when all are finished."""
        return self.stages[min(len(self.finished), len(self.stages) - 1)]

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the state; the models' sizes differ between the stages."""
        models = {f"finished-{i}": model for i, model in enumerate(self.finished, start=1)} | {"model": self.model}
        return super().server_state() | models

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up the state."""
        super().load_server_state(arrays)
        count = sum(name.startswith("finished-") for name in arrays)
        names = ("model", *(f"finished-{number}" for number in range(1, count + 1)))
        self.model, *self.finished = (np.asarray(arrays[name], np.float32) for name in names)

    def _is_end(self, server_round: int) -> bool:
        """Tell whether a round ends the stage; if it fails, the next one with enough replies does."""
        return server_round >= self.ends[self.stage.number - 1]


def plan_stages(settings: Settings, plain: Architecture) -> list[Stage]:
    """Return the stages of a run; raise :class:`SettingsError` if their rounds do not fit, or numbers are malformed."""
    own: PPFESettings = settings.method
    names = plain.layer_names
    if own.fixed_head >= len(names) + 1:
        raise SettingsError(f"ppfe-fixed-head = {own.fixed_head}: {plain.model} has the layers {', '.join(names)}")
    possible = own.stages if own.fixed_head else min(own.stages, len(names))
    rounds = stage_rounds(own.stage_rounds, possible, settings.run.num_server_rounds)
    rank_lists = [_numbers("ppfe-ranks", text) for text in own.ranks.split(";")]
    stages = [Stage(1, plain, (), (), rounds[0])]
    for number in range(2, possible + 1):
        before = stages[-1]
        depth = own.fixed_head or number - 1
        personal = names[len(names) - depth :]
        newly = tuple(layer for layer in personal if layer not in before.personal)
        restarted = plain.fully_connected if own.reduction == "svd-fedavg" and number > 2 else ()
        ranks = dict(before.architecture.ranks)
        if own.reduction == "svd":
            ranks |= reduced_ranks(plain, newly, rank_lists[min(number - 2, len(rank_lists) - 1)])
        elif restarted:
            ranks = reduced_ranks(plain, restarted, rank_lists[min(number - 3, len(rank_lists) - 1)])
        network = replace(plain, ranks=tuple(ranks.items()))
        stages.append(Stage(number, network, personal, newly, rounds[number - 1], restarted))
    return stages


def open_stage(before: Stage, after: Stage, whole: Tensor, fedavg: Tensor | None = None) -> Tensor:
    """Return the parameters ``(d',)`` with which a stage begins.

    All is taken over from ``whole`` ``(d,)``, the model at the end of the stage before, but the layers that restart:
    those are taken from stage 1's model ``fedavg`` (Appendix A.4). A layer that is now of lower rank is replaced by the
    two factors of its best approximation (Section 4.1). Layers that ``whole`` does not hold come out as they came in:
    the server knows the shared ones, and takes none but these.
    """
    layout = before.architecture.layout
    sources = layout.views(whole)
    if after.restarted:
        assert fedavg is not None
        first = replace(after.architecture, ranks=()).layout
        dense = first.views(fedavg)
        sources = {e.name: sources[e.name] for e in layout.entries if e.layer not in after.restarted}
        sources |= {e.name: dense[e.name] for e in first.entries if e.layer in after.restarted}
    result = torch.empty(after.architecture.layout.size, device=whole.device)
    new = after.architecture.layout.views(result)
    for name, view in new.items():
        if name in sources:
            view.copy_(sources[name])
        elif name.endswith("down.weight"):
            stem = name.removesuffix("down.weight")
            down, up = low_rank_factors(sources[stem + "weight"], view.shape[0])
            view.copy_(down)
            new[stem + "up.weight"].copy_(up)
            new[stem + "up.bias"].copy_(sources[stem + "bias"])
    return result


def stage_rounds(text: str, stages: int, total: int) -> list[int]:
    """Return the rounds of each stage: those in ``ppfe-stage-rounds``, or ``total`` in the paper's proportions."""
    if text:
        rounds = _numbers("ppfe-stage-rounds", text)
        if len(rounds) != stages or sum(rounds) != total:
            raise SettingsError(
                f"ppfe-stage-rounds = {text!r}: it must be {stages} numbers that sum to num-server-rounds = {total}"
            )
        return rounds
    if total < stages:
        raise SettingsError(f"num-server-rounds = {total}: PPFE with {stages} stages needs at least {stages}")
    shares = np.array([PAPER_ROUNDS[min(i, len(PAPER_ROUNDS) - 1)] for i in range(stages)], np.float64)
    ends = np.rint(np.cumsum(shares) / shares.sum() * total).astype(int)
    for i in range(stages):  # every stage has a round
        ends[i] = min(max(ends[i], i + 1, ends[i - 1] + 1 if i else 1), total - (stages - 1 - i))
    return np.diff(ends, prepend=0).tolist()


def reduced_ranks(plain: Architecture, reduced: tuple[str, ...], ranks: list[int]) -> dict[str, int]:
    """Return the ranks of layers that are made smaller, each capped at what still saves parameters.

    ``ranks`` belongs to the last fully connected layers in order: its last number to the head.
    """
    layers = plain.fully_connected[-len(ranks) :]
    wanted = dict(zip(layers, ranks[len(ranks) - len(layers) :], strict=True))
    shapes = {layer: plain.weight(layer).shape for layer in reduced if layer in wanted}
    capped = {layer: capped_rank(shape[1], shape[0], wanted[layer]) for layer, shape in shapes.items()}
    return {layer: rank for layer, rank in capped.items() if rank is not None}


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SettingsError(f"{key} holds {text!r}: it must be whole numbers >= 1 with commas between them")
    return numbers
