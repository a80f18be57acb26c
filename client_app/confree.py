"""The ConFREE client trains like the FedRep client."""

from posy.client_app.fedrep import FedRepClient


class ConFREEClient(FedRepClient):
    """Train the head, then the body. Send the body."""
