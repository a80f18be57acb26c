"""ConFREE's client is FedRep's. Only the server differs."""

from posy.client_app.fedrep import FedRepClient


class ConFREEClient(FedRepClient):
    """Train the head, then the body. Send the body."""
