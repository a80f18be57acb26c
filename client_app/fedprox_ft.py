"""FedProx with fine-tuning: FedProx's client, whose local model is the served model after some plain local training."""

from posy.client_app.fedavg_ft import FedAvgFTClient
from posy.client_app.fedprox import FedProxClient
from posy.strategies.fedprox_ft import FedProxFTSettings


class FedProxFTClient(FedAvgFTClient, FedProxClient):
    """Train as FedProx's client does, and fine-tune."""

    method: FedProxFTSettings
