"""ConFREE's client, which is the same as FedRep's client."""

from posy.client_app.fedrep import FedRepClient


class ConFREEClient(FedRepClient):
    """Train the head, then the body. Send the body."""
