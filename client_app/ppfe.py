"""PPFE's client: it trains the stage's model, and reweights its samples between stages."""

import numpy as np
import torch
from torch import Tensor

from posy.client_app.base import Arrays, Config, Member, PersonalClient, Predictor, Steps, Update, array_of
from posy.client_app.state import State
from posy.client_app.training.work import Train, Trained
from posy.client_app.workspace import Workspace
from posy.strategies.ppfe import Stage, open_stage, plan_stages, reweight, sparsity_mask


class PPFEClient(PersonalClient):
    """Local training on weighted samples (Algorithm 1, lines 13-21).

    Kept between rounds: sample weights ω, coefficients β, and for each stage the personal layers and,
    once it is finished, the shared layers that go with them.
    """

    def __init__(self, client: int, workspace: Workspace, state: State) -> None:
        super().__init__(client, workspace, state)
        self.stages = plan_stages(self.settings, self.architecture)

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Update]:
        """Train the shared and the personal layers of the stage; send the shared ones."""
        stage = yield from self.catch_up(received, config)
        start = self.assembled(stage, received[0])
        later = stage.number > 1
        trained: Trained = yield Train(
            start,
            sample_weight=self.recall("weights"),
            resample=self.method.weighting == "resample",
            rates=self.shared_rates(stage) if later else {},
            mask=self.mask(stage) if later else None,
            network=stage.architecture,
        )
        if later:
            self.keep(f"personal-{stage.number}", stage.personal_part.take(trained.parameters).clone())
        local = None
        if config.get("evaluate-local"):
            local = yield from self.ensemble(stage, trained.parameters)
        shared = array_of(stage.shared_part.take(trained.parameters))
        return Update([shared], float(trained.loss), local)

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Return the ensemble of the finished stages and, once it has been trained, the current one."""
        stage = yield from self.catch_up(received, config)
        fresh = not config["rounds-done"] and self.betas.size > 0
        predictor = yield from self.ensemble(stage, None if fresh else self.assembled(stage, received[0]))
        return predictor

    def noised_from(self, received: Arrays) -> Arrays:
        """Return the shared layers of the stage; those of finished stages are not sent back."""
        return received[:1]

    @property
    def betas(self) -> np.ndarray:
        """Coefficients of the finished stages."""
        return np.asarray(self.state.get("betas", np.zeros(0, np.float32)))

    def catch_up(self, received: list[Tensor], config: Config) -> Steps[Stage]:
        """Close the finished stages that came along, and return the current one.

        Raises
        ------
        ValueError
            If stages are missing: the client's state has been lost. The server sends them all next time.
        """
        if int(config["first-finished"]) > len(self.betas) + 1:
            raise ValueError(f"client {self.client} has closed {len(self.betas)} stages, and later ones came")
        for number, shared in enumerate(received[1:], start=int(config["first-finished"])):
            if number == len(self.betas) + 1:
                yield from self.close_stage(self.stages[number - 1], shared)
        betas = {f"beta-{i}": float(beta) for i, beta in enumerate(self.betas, start=1)}
        self.acknowledgement = {"stages-closed": len(betas), **betas}
        return self.stages[int(config["stage"]) - 1]

    def close_stage(self, stage: Stage, shared: Tensor) -> Steps[None]:
        """Take the finished stage into the ensemble and reweight the samples (line 21)."""
        whole = self.assembled(stage, shared)
        beta, weights = yield from self.reweighted(stage, whole)
        self.keep(f"shared-{stage.number}", shared)
        self.state["betas"] = np.append(self.betas, np.float32(beta))
        if self.method.reweighting:
            self.keep("weights", weights)
        if stage.number < len(self.stages):
            after = self.stages[stage.number]
            begun = open_stage(stage, after, whole)
            if (mask := self.mask(after)) is not None:
                begun *= mask
            self.keep(f"personal-{after.number}", after.personal_part.take(begun).clone())

    def reweighted(self, stage: Stage, whole: Tensor) -> Steps[tuple[float, Tensor]]:
        """Return β and the new sample weights for the ensemble so far with this model as its last member.

        The new member's own coefficient is not known before its error is; it enters with the
        coefficient that its own error alone gives it.
        """
        weights = self.recall("weights")
        if weights is None:
            weights = torch.ones(self.num_train, device=self.device)
        classes, rule = self.data.num_classes, self.method.beta
        alone = Predictor([Member(whole, stage.architecture)])
        losses = yield from self.sample_losses(alone)
        beta, new = reweight(losses, weights, classes, rule)
        if self.betas.size and self.method.ensemble:
            members = [*self.finished_members(), Member(whole, stage.architecture, beta)]
            losses = yield from self.sample_losses(Predictor(members))
            beta, new = reweight(losses, weights, classes, rule)
        return beta, new

    def sample_losses(self, predictor: Predictor) -> Steps[Tensor]:
        """Return ℓ_i ``(n,)`` in [0, 1] on the training samples."""
        log_probabilities = yield from self.predict(predictor, "train")
        labels = self.data.y_train
        if self.method.loss == "zero-one":
            return (log_probabilities.argmax(dim=-1) != labels).float()
        return 1 - log_probabilities.gather(1, labels[:, None]).squeeze(1).exp()

    def ensemble(self, stage: Stage, current: Tensor | None) -> Steps[Predictor]:
        """Return Σ_t β_t softmax(model_t); an unfinished stage takes part as if it ended now."""
        members = self.finished_members()
        if current is not None and len(members) < stage.number:
            beta, _ = yield from self.reweighted(stage, current)
            members.append(Member(current, stage.architecture, beta))
        if not self.method.ensemble:
            members = members[-1:]
        return Predictor(members, f"stage {stage.number}")

    def finished_members(self) -> list[Member]:
        """Return the models of the finished stages with their coefficients."""
        members = []
        for stage, beta in zip(self.stages, self.betas, strict=False):
            shared = self.recall(f"shared-{stage.number}")
            assert shared is not None
            members.append(Member(self.assembled(stage, shared), stage.architecture, float(beta)))
        return members

    def assembled(self, stage: Stage, shared: Tensor) -> Tensor:
        """Return a stage's whole model ``(d,)``: shared layers and the client's own."""
        whole = torch.empty(stage.architecture.layout.size, device=self.device)
        stage.shared_part.put(whole, shared)
        personal = self.recall(f"personal-{stage.number}")
        if personal is not None:
            stage.personal_part.put(whole, personal)
        return whole

    def shared_rates(self, stage: Stage) -> dict[str, float]:
        """Return the lower learning rate of the shared layers."""
        layers = stage.architecture.layout.layers
        return {layer: self.method.body_lr_factor for layer in layers if layer not in stage.personal}

    def mask(self, stage: Stage) -> Tensor | None:
        """Return the stage's sparsity mask, if that is the reduction."""
        if self.method.reduction != "sparse" or stage.number == 1:
            return None
        return sparsity_mask(self.stages, stage.number, self.settings.run.seed).to(self.device)
