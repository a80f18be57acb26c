"""ConFREE's client is FedRep's: only what the server makes of its body differs."""

from posy.client_app.fedrep import FedRepClient


class ConFREEClient(FedRepClient):
    """Train the head, then the body; send the body."""
