"""PPFE: progressive personalised federated ensembles.

The paper is "Federated Ensemble Learning with Progressive Model Personalization" (Emrani et al., 2026). Training has T
stages. Stage 1 is FedAvg. In stage t, the last t − 1 layers are personal, and fully connected layers become smaller.
Between stages, each client reweights its samples by the errors of the ensemble so far, as in AdaBoost. It also computes
the coefficient of the finished stage.

The paper describes two reductions, and Posy implements both. ``svd`` follows Algorithm 1 (lines 11 and 12) and Section
4.1: layers continue from the previous stage, and a layer that becomes personal is factorised. ``svd-fedavg`` follows
Appendix A.4: stage 2 is dense. In later stages, all fully connected layers are factorised from stage 1's model, while
the convolutions continue from the previous stage. ``svd-fedavg`` transmits the fractions of parameters that Section
6.3.3 reports.
"""

from dataclasses import dataclass, replace
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.common.logger import log

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Part
from posy.settings import Search, SettingsError, setting
from posy.strategies.arrays import UNIFORM_WEIGHTS, model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings, Settings

if TYPE_CHECKING:
    from torch import Tensor

PAPER_ROUNDS = (30, 50, 40, 40)
"""The paper's number of rounds for each stage."""


class PPFESettings(MethodSettings, robust=True, point="served"):
    """Settings of PPFE."""

    returned = reply(
        model=model(noise="all clients train at the end of a stage, which the noise does not account for", sums=True)
    )

    sent_once = "finished"
    follows_number_of_rounds = True

    stages: int = setting(
        4,
        "number T of stages; at most one per round and, without ppfe-fixed-head, one per layer of the network",
        minimum=1,
        source="Section 6.2.1",
    )
    stage_rounds: str = setting(
        "",
        "rounds of each stage, such as 30,50,40,40; empty: num-server-rounds divided in the paper's proportions",
        source="Appendix A.4: 30, 50, 40 and 40 rounds",
    )
    reduction: str = setting(
        "svd",
        "how fully connected layers are reduced; svd: factorise layers when they become personal; svd-fedavg: from "
        "stage 3 onwards, factorise stage 1's layers (Appendix A.4); sparse: mask the weights of personal layers",
        choices=("svd", "svd-fedavg", "sparse", "none"),
        source="Algorithm 1, lines 11 and 12, and Section 4.1; svd-fedavg: Appendix A.4; sparse: Appendix A.3",
    )
    ranks: str = setting(
        "100,50,24;80,40,16",
        "ranks of the last fully connected layers, one list per stage, from stage 2 onwards with svd and from stage 3 "
        "onwards with svd-fedavg; the last list also applies to all later stages",
        source="Appendix A.3, CIFAR-10",
        needs="ppfe-reduction = svd | svd-fedavg",
    )
    body_lr_factor: float = setting(
        0.1,
        "factor by which lr is multiplied for the shared layers, from stage ppfe-body-lr-stage onwards",
        minimum=0,
        search=Search(0.01, 1.0, log=True),
        source="Appendix A.4: 0.01, and 0.001 for shared layers in the later stages",
    )
    body_lr_stage: int = setting(
        2,
        "first stage in which ppfe-body-lr-factor applies",
        minimum=2,
        source="choice: Appendix A.4 says `the later stages`, which may mean stage 2 or stage 3",
        needs="ppfe-body-lr-factor != 1",
    )
    beta: str = setting(
        "samme",
        "coefficient of a stage: the paper's (`adaboost`), the same but never negative (`adaboost-positive`), or "
        "SAMME's for several classes (`samme`)",
        choices=("samme", "adaboost", "adaboost-positive"),
        source="choice: the paper's rule subtracts models with error above 1/2; SAMME (Zhu et al., 2009) does not",
        needs="ppfe-reweighting = true or ppfe-ensemble = true",
    )
    loss: str = setting(
        "zero-one",
        "loss of a sample for the reweighting and the coefficients: 0/1, 1 - p(label), or cross-entropy divided by "
        "its maximum over the client's samples",
        choices=("zero-one", "probability", "cross-entropy"),
        source="choice: AdaBoost's loss; Algorithm 1, line 2, divides a loss by its maximum, which is `cross-entropy`",
        needs="ppfe-reweighting = true or ppfe-ensemble = true",
    )
    weighting: str = setting(
        "loss",
        "how sample weights enter training: as factors on the losses, or by drawing samples in proportion to their "
        "weights, which avoids very large steps for samples with large weights",
        choices=("loss", "resample"),
        source="Eq. 2 and Section 4.2: the weighted empirical loss",
        needs="ppfe-reweighting = true",
    )
    reweighting: bool = setting(
        True, "reweight samples between stages (off: ablation WPW)", source="Algorithm 1, lines 9 and 21"
    )
    ensemble: bool = setting(
        True,
        "predict with all stages (off: with the current stage alone; ablations M1-M3, without reweighting)",
        source="Eq. 8; Algorithm 1, line 23",
    )
    outputs: str = setting(
        "probabilities",
        "terms of the ensemble's sum (Eq. 8); log-probabilities: the outputs of networks that end in a log-softmax, "
        "such as FedRep's",
        choices=("probabilities", "log-probabilities"),
        needs="ppfe-ensemble = true",
        source="choice: Eq. 8 adds the outputs of the models, and does not say whether they are probabilities",
    )
    final_epochs: int = setting(
        0,
        "number of epochs in the last round of a stage, which then trains only the personal layers, as FedRep's "
        "program does at the end; 0: the last round is an ordinary round",
        minimum=0,
        source="Algorithm 1, which lacks these epochs; FedRep's models/Update.py uses 10",
    )
    fixed_head: int = setting(
        0,
        "0: one more personal layer per stage; h: the last h layers are personal from stage 2 onwards (ablations WP, "
        "M1-M3)",
        minimum=0,
        source="Algorithm 1; the ablations are in Tables 4 and 5",
    )

    card = MethodCard(
        paper=Paper(
            "Emrani, Najafi and Motahari",
            2026,
            "Federated Ensemble Learning with Progressive Model Personalization",
            "arXiv",
            "https://arxiv.org/abs/2602.14244",
        ),
        equations=(
            "stage 1: FedAvg with weights n_k / N (Algorithm 1, line 7)",
            "local SGD on Σ_i (ω_i / n_k) ℓ_i over shared and personal layers (Eq. 2; Algorithm 1, line 16)",
            "ψ ← mean of ψ_k over the clients of the round, uniform from stage 2 onwards (Algorithm 1, line 18)",
            "ε = Σ_i ω_i ℓ_i / (max ℓ · Σ_i ω_i), β = ½ log((1 − ε) / ε) (Algorithm 1, line 2)",
            "ω_i ← ω_i exp(β ℓ_i), rescaled to Σ_i ω_i = n_k (Algorithm 1, lines 4 and 5)",
            "h_k = Σ_t β_k^(t) softmax(model_t) (Eq. 8; Algorithm 1, line 23)",
            "W ≈ U_r Σ_r V_rᵀ, a layer's best approximation of rank r, as two linear layers (Section 4.1)",
            "all clients take part in the last round of a stage (Appendix A.4)",
        ),
        sent={
            "model (d_t,)": "shared layers of the current stage",
            "finished-1, finished-2, … (d_s,)": "shared layers of each finished stage that the client lacks, in order",
        },
        returned={"model (d_t,)": "the trained shared layers of the current stage"},
        reveals="the shared layers; without secure aggregation also a coefficient for each finished stage, which "
        "shows how well the stage fits the client",
        server_state={
            "rounds_done": "number of successful rounds of the current stage",
            "model": "shared layers of the current stage (d_t,)",
            "finished-t": "shared layers of each finished stage t (d_t,)",
            "finished-in": "the round in which each finished stage ended (t,)",
        },
        client_state={
            "weights": "sample weights ω (n_k,)",
            "betas": "coefficients β of the finished stages (t,)",
            "personal-t": "personal layers of stage t (p_t,)",
            "finished-t": "shared layers of each finished stage t (d_t,)",
        },
        scored="The served ensemble, because the paper reports the accuracy of the resulting ensemble, whose shared "
        "layers are averages (Section 6.2.5).",
        deviations=(
            "`ppfe-beta=samme` adds ½ log(C − 1) to the paper's coefficient and never lets it become negative. On "
            "digits, the served ensembles reach an accuracy of 95.6 % with `samme` and 96.4 % with `adaboost` "
            "(docs/benchmarks/choices.md). `adaboost` is the paper's rule, which the settings of the paper's "
            "experiments select.",
            "Algorithm 1 and Appendix A.4 describe different reductions. `ppfe-reduction=svd` is Algorithm 1's. "
            "`svd-fedavg` is the appendix's reduction, which the settings of the paper's experiments select. It "
            "transmits 98.8, 83.8 and 19.5 % of the CIFAR-100 network's parameters, as Section 6.3.3 reports.",
            "Eq. 7 gives hard samples less weight. Posy gives them more weight, as in Algorithm 1 and AdaBoost.",
            "Algorithm 1, line 21, uses the coefficient of the new stage before computing it. In Posy, the new model "
            "enters the ensemble with a coefficient that is computed from this model's error alone.",
            "ε is clipped to [1e-6, 1 − 1e-6], so that β is finite.",
            "The paper covers only classification. As an extension, Posy boosts other tasks with the same formulas. A "
            "label counts as a binary class, and `zero-one` is a sample's share of wrong labels (Hamming loss). For "
            "values, ℓ is the absolute error divided by its maximum, so ε and the weights follow AdaBoost.R2 (Drucker, "
            "1997) with half its exponent. The ensemble is the mean of the values, weighted by β as in Eq. 8, "
            "whereas AdaBoost.R2 uses a weighted median. A stage with ε > ½ has no weight.",
            "With `class-weights=balanced` ω starts at the class weights instead of 1. The paper has no class weights.",
            "A client that misses the end of a stage completes the stage at its next message, with the personal layers "
            "of its last training. A client that loses its state completes all finished stages again, with untrained "
            "personal layers.",
        ),
        no_program="The authors' program was published anonymously (anonymous.4open.science/r/PPFE-6E7C) and cannot be "
        "downloaded. Tests recompute stages, coefficients and sample weights in NumPy.",
    )

    @property
    def sums_logarithms(self) -> bool:
        """Whether the setting ``outputs`` selects log-probabilities."""
        return self.outputs == "log-probabilities"

    def notices(self, settings: Settings, network: Architecture) -> tuple[str, ...]:
        """Warn about a single stage, fewer stages than the user has set, and settings that no stage uses."""
        planned = len(plan_stages(settings, network))
        notices = []
        if planned < self.stages != PPFESettings.stages:
            notices.append(
                f"ppfe-stages = {self.stages}: model = {network.model!r} has {planned} layers, so the run has "
                f"{planned} stages; set ppfe-stages to at most {planned}"
            )
        if planned == 1:
            reason = "ppfe-stages = 1"
            if self.stages > 1:
                shallow = len(network.layer_names) == 1
                reason = f"model = {network.model!r} has one layer" if shallow else "num-server-rounds = 1"
            return (f"{reason}, so the run is equivalent to FedAvg; choose more stages and a deeper network",)
        if self.body_lr_factor != 1 and self.body_lr_stage > planned:
            notices.append(
                f"ppfe-body-lr-stage = {self.body_lr_stage}: there are {planned} stages, so ppfe-body-lr-factor never "
                f"applies; set ppfe-body-lr-stage to at most {planned}"
            )
        if settings.run.full_last_round:
            notices.append("full-last-round = true has no effect: all clients train in the last round of each stage")
        return tuple(notices)


@dataclass(frozen=True)
class Stage:
    """One stage: its network, its personal layers, and the layers that become personal in this stage.

    The ``restarted`` layers start from stage 1's model instead of the previous stage's.
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
    """Average the stage's shared layers over the clients, uniformly from stage 2 onwards (Algorithm 1, line 18).

    The state holds the shared layers of the current and finished stages, and the current stage's number of finished
    rounds.
    """

    state = ("model", "rounds_done")
    resized = frozenset(("model",))
    method: PPFESettings

    def initialise(self) -> None:
        """Plan the stages and begin stage 1."""
        self.stages = plan_stages(self.settings, self.architecture)
        self.rounds_done = np.zeros((), np.int64)
        self.model: FloatArray = self.initial()
        self.finished: list[FloatArray] = []
        """The shared layers of each finished stage."""
        self.influence.exchanged = lambda: (self.stage.architecture.layout, self.stage.shared_part)
        self.ends: list[int] = np.cumsum([stage.rounds for stage in self.stages]).tolist()
        if (planned := len(self.stages)) < self.method.stages:
            log(INFO, "PPFE: %s stages, ppfe-stages is %s", planned, self.method.stages)
        for s in self.stages:
            ranks = dict(s.architecture.ranks)
            log(INFO, "PPFE: stage %s: %s rounds, personal %s, ranks %s", s.number, s.rounds, s.personal, ranks)

    def trains_all(self, server_round: int) -> bool:
        """Return whether all clients train in a round; they do in the last round of each stage."""
        return self._is_end(server_round) or super().trains_all(server_round)

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return the stage's number, its finished rounds, whether the round ends it and whether weights are uniform."""
        return {
            "stage": self.stage.number,
            "stage-ends": self._is_end(server_round),
            "rounds-done": int(self.rounds_done),
            UNIFORM_WEIGHTS: self.stage.number > 1,
        }

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the shared layers; at the end of a stage, store them and begin the next stage."""
        self.model = self.mean(updates)
        self.rounds_done += 1
        quantities = {"stage": self.stage.number, "shared_parameters": self.model.size}
        if self._is_end(server_round):
            before = self.stage
            self.finished.append(self.model)
            self.rounds_done[...] = 0
            if self.stage is not before:
                import torch  # noqa: PLC0415 - the settings do not need PyTorch

                model = before.shared_part.put(np.zeros(before.architecture.layout.size, np.float32), self.model)
                parameters = open_stage(before, self.stage, torch.from_numpy(model), torch.from_numpy(self.finished[0]))
                self.model = np.ascontiguousarray(self.stage.shared_part.take(parameters.numpy()))
        return quantities

    @property
    def stage(self) -> Stage:
        """The current stage; after the last round, the last stage."""
        return self.stages[min(len(self.finished), len(self.stages) - 1)]

    def _is_end(self, server_round: int) -> bool:
        """Return whether a round ends the stage; if that round fails, the next successful round ends it."""
        return server_round >= self.ends[self.stage.number - 1]


def plan_stages(settings: Settings, plain: Architecture) -> list[Stage]:
    """Return the stages of a run; raise :class:`SettingsError` if its stages, ranks or rounds are invalid."""
    method = settings.method
    assert isinstance(method, PPFESettings)
    names = plain.layer_names
    if method.fixed_head >= len(names) + 1:
        raise SettingsError(f"ppfe-fixed-head = {method.fixed_head}: {plain.model} has the layers {', '.join(names)}")
    possible = method.stages if method.fixed_head else min(method.stages, len(names))
    if method.stages == PPFESettings.stages and not method.stage_rounds:  # the default adapts to any number of rounds
        possible = min(possible, settings.run.num_server_rounds)
    rounds = stage_rounds(method.stage_rounds, possible, settings.run.num_server_rounds)
    rank_lists = [_numbers("ppfe-ranks", text) for text in method.ranks.split(";")]
    stages = [Stage(1, plain, (), (), rounds[0])]
    for number in range(2, possible + 1):
        before = stages[-1]
        depth = method.fixed_head or number - 1
        personal = names[len(names) - depth :]
        newly = tuple(layer for layer in personal if layer not in before.personal)
        restarted = plain.fully_connected if method.reduction == "svd-fedavg" and number > 2 else ()
        ranks = dict(before.architecture.ranks)
        if method.reduction == "svd":
            ranks |= reduced_ranks(plain, newly, rank_lists[min(number - 2, len(rank_lists) - 1)])
        elif restarted:
            ranks = reduced_ranks(plain, restarted, rank_lists[min(number - 3, len(rank_lists) - 1)])
        network = replace(plain, ranks=tuple(ranks.items()))
        stages.append(Stage(number, network, personal, newly, rounds[number - 1], restarted))
    return stages


def open_stage(before: Stage, after: Stage, model: "Tensor", fedavg: "Tensor | None" = None) -> "Tensor":
    """Return the initial parameters ``(d',)`` of a stage.

    The parameters continue from the previous stage, except in restarted layers, which start from stage 1's model
    (Appendix A.4). A layer that becomes low-rank is replaced by the two factors of its best low-rank approximation
    (Section 4.1).

    Parameters
    ----------
    before, after : Stage
        The previous stage and the new one.
    model : Tensor, (d,)
        Parameters at the end of the previous stage. On the server, the personal layers are zero, which does not affect
        the shared layers of the result.
    fedavg : Tensor, (d_1,), optional
        Stage 1's model, for restarted layers.
    """
    from posy.models.layers import low_rank_factors  # noqa: PLC0415 - the settings do not need PyTorch

    layout = before.architecture.layout
    sources = layout.views(model)
    if after.restarted:
        assert fedavg is not None
        first = replace(after.architecture, ranks=()).layout
        dense = first.views(fedavg)
        sources = {e.name: sources[e.name] for e in layout.entries if e.layer not in after.restarted}
        sources |= {e.name: dense[e.name] for e in first.entries if e.layer in after.restarted}
    result = model.new_empty(after.architecture.layout.size)
    new = after.architecture.layout.views(result)
    for name, view in new.items():
        if name in sources:
            view.copy_(sources[name])
        elif name.endswith("down.weight"):
            stem = name.removesuffix("down.weight")
            down, up = low_rank_factors(sources[stem + "weight"], view.shape[0])
            view.copy_(down)
            new[stem + "up.weight"].copy_(up)
            if stem + "bias" in sources:
                new[stem + "up.bias"].copy_(sources[stem + "bias"])
    return result


def stage_rounds(text: str, stages: int, total: int) -> list[int]:
    """Return the number of rounds in each stage, from ``ppfe-stage-rounds`` or in the paper's proportions."""
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
    for i in range(stages):  # give every stage at least one round
        ends[i] = min(max(ends[i], i + 1, ends[i - 1] + 1 if i else 1), total - (stages - 1 - i))
    return np.diff(ends, prepend=0).tolist()


def reduced_ranks(plain: Architecture, reduced: tuple[str, ...], ranks: list[int]) -> dict[str, int]:
    """Return the ranks of the reduced layers, each capped at the largest rank that saves parameters.

    ``ranks`` are the ranks of the last fully connected layers in order. The last number is the rank of the head.
    """
    from posy.models.layers import capped_rank  # noqa: PLC0415 - the settings do not need PyTorch

    layers = plain.fully_connected[-len(ranks) :]
    rank_of = dict(zip(layers, ranks[len(ranks) - len(layers) :], strict=True))
    shapes = {layer: plain.weight(layer).shape for layer in reduced if layer in rank_of}
    capped = {layer: capped_rank(shape[1], shape[0], rank_of[layer]) for layer, shape in shapes.items()}
    return {layer: rank for layer, rank in capped.items() if rank is not None}


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise SettingsError(f"{key} contains {text!r}: it must be whole numbers of at least 1, separated by commas")
    return numbers
