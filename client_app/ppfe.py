"""The PPFE client trains the model of the current stage, and reweights its samples between stages."""

import math
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Member, Predictor
from posy.client_app.training.work import Train, Trained
from posy.metrics import CLASSES, LABELS, VALUES
from posy.randomness import torch_generator
from posy.strategies.ppfe import PPFESettings, Stage, open_stage, plan_stages
from posy.strategies.replies import Update

FIRST_MASKED, LATER_MASKED = 0.3, 0.1
"""Fractions of weights that the reduction `sparse` masks in the first personal stage and in later stages (App. A.3)."""


class PPFEClient(PersonalClient):
    """Train on weighted samples (Algorithm 1, lines 13-21).

    The client stores the sample weights ω, the coefficients β, the personal layers of each stage, and the shared layers
    of each finished stage. With ``class-weights=balanced``, the initial weights are the class weights, so ω includes
    them.
    """

    method: PPFESettings

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of the run, which are the same as on the server."""
        return plan_stages(self.settings, self.architecture)

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train the layers of the current stage, and send the shared layers.

        With ``final_epochs``, a stage's last round trains only the personal layers.
        """
        stage = yield from self.catch_up(config)
        slower_layers = set(stage.architecture.layout.layers) - set(stage.personal) if stage.personal else ()
        head_only = bool(stage.personal and self.method.final_epochs and config["stage-ends"])
        factor = self.method.body_lr_factor if stage.number >= self.method.body_lr_stage else 1.0
        weights = self.stored.get("weights")
        if weights is not None and self.jobs.class_weight is not None:
            weights = weights / self.jobs.class_weight  # the trainer multiplies by the class weights
        trained: Trained = yield Train(
            self.stage_model(stage, received["model"]),
            epochs=self.method.final_epochs if head_only else None,
            sample_weight=weights,
            resample=self.method.weighting == "resample",
            rates=dict.fromkeys(slower_layers, 0.0 if head_only else factor),
            mask=self.mask(stage),
            network=stage.architecture,
        )
        if stage.personal:
            self.stored[f"personal-{stage.number}"] = stage.personal_part.take(trained.parameters).clone()
        local = None
        if config.get("evaluate-local"):
            local = yield from self.ensemble(stage, trained.parameters)
        return Update({"model": stage.shared_part.take(trained.parameters)}, trained.loss), local

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the ensemble of the finished stages and, if it has been trained, the current stage."""
        stage = yield from self.catch_up(config)
        is_untrained = not config["rounds-done"] and self.betas.size > 0
        return (yield from self.ensemble(stage, None if is_untrained else self.stage_model(stage, received["model"])))

    @property
    def betas(self) -> np.ndarray:
        """Coefficients of the finished stages."""
        return np.asarray(self.state.get("betas", np.zeros(0, np.float32)))

    def catch_up(self, config: Config) -> Steps[Stage]:
        """Close the finished stages that the client has received, and return the current stage."""
        while (shared := self.stored.get(f"finished-{len(self.betas) + 1}")) is not None:
            yield from self.close_stage(self.stages[len(self.betas)], shared)
        return self.stages[int(config["stage"]) - 1]

    def close_stage(self, stage: Stage, shared: Tensor) -> Steps[None]:
        """Add a finished stage to the ensemble, and reweight the samples for the next stage (line 21)."""
        model = self.stage_model(stage, shared)
        beta, weights = yield from self.reweighted(stage, model)
        self.state["betas"] = np.append(self.betas, np.float32(beta))
        if stage.number < len(self.stages):
            if self.method.reweighting:
                self.stored["weights"] = weights
            next_stage = self.stages[stage.number]
            next_model = open_stage(stage, next_stage, model, self.stored.get("finished-1"))
            if (mask := self.mask(next_stage)) is not None:
                next_model *= mask
            self.stored[f"personal-{next_stage.number}"] = next_stage.personal_part.take(next_model).clone()

    def reweighted(self, stage: Stage, model: Tensor) -> Steps[tuple[float, Tensor]]:
        """Return β and the new sample weights after a stage with this model.

        The ensemble contains the models of the earlier stages and ``model``. In this ensemble, the coefficient of
        ``model`` is computed from the model's own error. The final coefficient β is computed from the ensemble's error.
        """
        weights = self.stored.get("weights")
        if weights is None:
            weights = torch.ones(len(self.data.y_train), device=self.device)
            if self.jobs.class_weight is not None:
                weights = weights * self.jobs.class_weight
        task, rule = self.workspace.task, self.method.beta
        classes = task.num_classes if task.target == CLASSES else 2  # a label has two classes; SAMME's bound is 1/2
        losses = yield from self.sample_losses(Predictor([Member(model, stage.architecture)]))
        beta, new_weights = reweight(losses, weights, classes, rule)
        if (earlier_members := self.finished_members()[: stage.number - 1]) and self.method.ensemble:
            members = [*earlier_members, Member(model, stage.architecture, beta)]
            losses = yield from self.sample_losses(self.predictor(members))
            beta, new_weights = reweight(losses, weights, classes, rule)
        return beta, new_weights

    def sample_losses(self, predictor: Predictor) -> Steps[Tensor]:
        """Return the losses ℓ_i ``(n,)`` of the training samples, in [0, 1]."""
        outputs = yield from self.predict(predictor, "train")
        return boosting_losses(outputs, self.jobs.samples("train").y, self.method.loss, self.workspace.task.target)

    def ensemble(self, stage: Stage, current: Tensor | None) -> Steps[Predictor]:
        """Return the ensemble Σ_t β_t softmax(model_t), or the weighted sum of the models' log-probabilities.

        ``current``, the model of the current stage, is included as if the stage ended now. A newcomer trains after the
        last stage has ended, so its trained model replaces its model of the last stage.
        """
        members = self.finished_members()
        if current is not None:
            beta, _ = yield from self.reweighted(stage, current)
            members = [*members[: stage.number - 1], Member(current, stage.architecture, beta)]
        if not self.method.ensemble:
            members = members[-1:]
        return self.predictor(members, f"stage {stage.number}")

    def predictor(self, members: list[Member], chosen: str = "") -> Predictor:
        """Return the ensemble of the members (Eq. 8)."""
        return Predictor(members, chosen, self.method.sums_logarithms)

    def finished_members(self) -> list[Member]:
        """Return the models of the finished stages with their coefficients."""
        members = []
        for stage, beta in zip(self.stages, self.betas, strict=False):
            shared = self.stored.get(f"finished-{stage.number}")
            assert shared is not None
            members.append(Member(self.stage_model(stage, shared), stage.architecture, float(beta)))
        return members

    def stage_model(self, stage: Stage, shared: Tensor) -> Tensor:
        """Return a stage's model ``(d,)``: the shared layers and the client's personal layers."""
        model = torch.empty(stage.architecture.layout.size, device=self.device)
        stage.shared_part.put(model, shared)
        personal = self.stored.get(f"personal-{stage.number}")
        if personal is not None:
            stage.personal_part.put(model, personal)
        return model

    def mask(self, stage: Stage) -> Tensor | None:
        """Return the stage's sparsity mask, or None in the first stage or without the reduction `sparse`."""
        if self.method.reduction != "sparse" or stage.number == 1:
            return None
        return sparsity_mask(self.stages, stage.number, self.settings.run.seed).to(self.device)


def sparsity_mask(stages: list[Stage], number: int, seed: int) -> Tensor:
    """Return the 0/1 mask ``(d,)`` of a stage for the reduction `sparse`.

    The mask removes 30 % of the personal fully connected weights in the first personal stage, and 10 % of each layer
    that becomes personal later (Appendix A.3). The same seed gives every client the same mask.
    """
    layout = stages[number - 1].architecture.layout
    mask = torch.ones(layout.size)
    for stage in stages[1:number]:
        fraction = FIRST_MASKED if stage.number == 2 else LATER_MASKED
        fully_connected = set(stage.newly) & set(stage.architecture.fully_connected)
        for entry in layout.entries:
            if entry.layer in fully_connected and len(entry.shape) == 2:
                count = math.prod(entry.shape)
                generator = torch_generator(seed, "mask", entry.start)
                order = torch.randperm(count, generator=generator)
                mask[entry.start + order[: round(fraction * count)]] = 0.0
    return mask


def boosting_losses(outputs: Tensor, y: Tensor, loss: str, target: str = CLASSES) -> Tensor:
    """Return the losses ℓ_i ``(n,)`` of samples, in [0, 1].

    A label counts as a binary class, and a sample's loss is the mean over its labels: with ``zero-one`` it is the
    Hamming loss. For values, it is the mean absolute error divided by the largest error, as in AdaBoost.R2 (Drucker,
    1997).

    Parameters
    ----------
    outputs : Tensor, (n, C)
        Log-probabilities of classes, logits of labels, or standardised values.
    y : Tensor
        Classes ``(n,)``, or labels or standardised values ``(n, C)``.
    loss : str
        ``zero-one``, ``probability`` or ``cross-entropy``. The setting has no effect on values.
    target : str
        The target of the task (see :mod:`posy.metrics`).
    """
    if target == VALUES:
        return _over_maximum((outputs - y).abs().mean(dim=-1))
    if target == LABELS:
        label_logs = F.logsigmoid(torch.where(y == 1, outputs, -outputs))
        wrong = ((outputs >= 0) != (y == 1)).float().mean(dim=-1)
    else:
        label_logs, wrong = outputs.gather(1, y[:, None]), (outputs.argmax(dim=-1) != y).float()
    if loss == "zero-one":
        return wrong
    return 1 - label_logs.exp().mean(dim=-1) if loss == "probability" else _over_maximum(-label_logs.mean(dim=-1))


def _over_maximum(losses: Tensor) -> Tensor:
    """Return losses ``(n,)``, divided by their maximum (Algorithm 1, line 2)."""
    return losses / losses.max().clamp_min(torch.finfo(losses.dtype).tiny)


def reweight(losses: Tensor, weights: Tensor, num_classes: int, beta_rule: str) -> tuple[float, Tensor]:
    """Return (β, ω') after a stage (Algorithm 1, Reweight).

    ε = Σ ω_i ℓ_i / Σ ω_i is clipped to [1e-6, 1 − 1e-6]. The paper's rule ``adaboost`` is β = ½ log((1 − ε)/ε), which
    is negative for ε > ½. ``adaboost-positive`` replaces negative values with 0. ``samme`` adds ½ log(C − 1) and then
    replaces negative values with 0. The new weights are ω_i exp(β ℓ_i), rescaled to Σ ω_i = n. The paper's Eq. 7 has
    the opposite sign, but Algorithm 1 and AdaBoost give hard samples more weight. Algorithm 1 divides the losses by
    their maximum only in line 2. Posy also does so in line 4, so that a weight grows by a factor of at most e^β.

    Parameters
    ----------
    losses : Tensor, (n,)
        ℓ_i of the ensemble so far, in [0, 1].
    weights : Tensor, (n,)
        Positive sample weights ω_i.
    num_classes : int
        Number of classes C; 2 for labels and values.
    beta_rule : str
        ``adaboost``, ``adaboost-positive`` or ``samme``.
    """
    error = min(max(float((weights * losses).sum() / weights.sum()), 1e-6), 1 - 1e-6)
    beta = 0.5 * math.log((1 - error) / error)
    if beta_rule == "samme":
        beta += 0.5 * math.log(max(num_classes - 1, 1))
    if beta_rule != "adaboost":
        beta = max(0.0, beta)
    new_weights = weights * torch.exp(beta * losses)
    return beta, new_weights * (len(new_weights) / new_weights.sum())
