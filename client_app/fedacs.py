"""FedACS's client: plain local SGD from the mixed model u_i."""

from posy.client_app.fedavg import FedAvgClient


class FedACSClient(FedAvgClient):
    """Start from u_i and take local steps (FedACS, Eq. 5); there is no proximal term."""
