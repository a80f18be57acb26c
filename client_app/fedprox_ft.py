"""FedProx with fine-tuning: the local model is the served model after local training without the proximal term."""

from posy.client_app.fedavg_ft import FedAvgFTClient
from posy.client_app.fedprox import FedProxClient
from posy.strategies.fedprox_ft import FedProxFTSettings


class FedProxFTClient(FedAvgFTClient, FedProxClient):
    """Train as the FedProx client does, and fine-tune as the FedAvg-FT client does."""

    method: FedProxFTSettings
