"""FedPer (Arivazhagan et al., 2019): the base layers are shared, and the last layers are personal."""

from typing import TYPE_CHECKING

from posy.settings import Search, SettingsError, setting
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedPerSettings(MethodSettings, dp_sgd=True, robust=True, point="served"):
    """Settings of FedPer."""

    card = MethodCard(
        paper=Paper(
            "Arivazhagan et al.",
            2019,
            "Federated Learning with Personalization Layers",
            "arXiv",
            "https://arxiv.org/abs/1912.00818",
        ),
        equations=(
            "(W_B,j, W_P,j) ← SGD on client j's loss from (W_B, W_P,j), all layers together (FEDPER-CLIENT)",
            "W_B ← Σ_j (n_j / n) W_B,j (FEDPER-SERVER)",
        ),
        sent={"model (s,)": "the base layers W_B"},
        returned={"model (s,)": "the client's base layers after training"},
        reveals="the shared layers; the other layers stay on the client",
        server_state={"model": "the base layers W_B (s,)"},
        client_state={"personal": "the client's personalisation layers W_P,j, flat"},
        scored=(
            "The served model, which combines the averaged base layers with the client's own last layers. FedRep's "
            "program and PFLlib score the same model."
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore/servers/serverper.py, FedPer.train",
            1e-6,
            by_authors=False,
        ),
    )

    layers: int = setting(
        1,
        "number of personal layers, counted from the output",
        minimum=1,
        search=Search(1, 2),
        source="choice: the classifier alone, as in PFLlib; the paper also keeps the blocks before it",
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the last layers on the client.

        Raises
        ------
        SettingsError
            If no layer is left to share.
        """
        names = network.layer_names
        if 1 < len(names) <= self.layers:
            raise SettingsError(
                f"fedper-layers = {self.layers} with model = {network.model!r}: the network has {len(names)} layers, "
                f"so nothing is left to share; set fedper-layers to at most {len(names) - 1}"
            )
        return names[-self.layers :]
