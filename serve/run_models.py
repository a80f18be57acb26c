"""Load the models of a run for the service."""

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log

from posy.client_app.stored import ClientModel
from posy.metrics import CLASSES
from posy.serve.endpoints import ClientEndpoint, ConfidenceEndpoint, Endpoint, EnsembleEndpoint, VoteEndpoint, name_of
from posy.serve.router import RouterEndpoint
from posy.server_app.record import Record
from posy.server_app.routing import candidates_of, voters_of
from posy.storage import read_metadata

SERVED, ENSEMBLE, ROUTER, VOTE, CONFIDENCE = "served", "ensemble", "router", "majority-vote", "confidence"
"""Names of the models that combine clients. A client with such a name is offered as ``client-N``."""
_RESERVED = (SERVED, ENSEMBLE, ROUTER, VOTE, CONFIDENCE)


def load_endpoints(record: Record) -> dict[str, Endpoint]:
    """Return the models of a run, keyed by name.

    These are the models of the clients, the model that all clients share, and combinations of the clients' models.

    Raises
    ------
    SettingsError
        If the run has no clients' models.
    DamagedFileError
        If a file cannot be read.
    """
    run = record.name
    models = {client: record.predictor(client) for client in record.names}
    endpoints: dict[str, Endpoint] = {}
    for client, model in models.items():
        name = name_of(client, model)
        name = f"client-{client}" if name in _RESERVED or name in endpoints else name
        endpoints[name] = ClientEndpoint({client: model}, run, record.scores(model))
    first = next(iter(models.values()))
    if shared := _shared_model(record, models):
        endpoints[SERVED] = ClientEndpoint(shared, run, {})
    if len(models) == 1 or first.preprocessing.task.target != CLASSES:
        return endpoints
    if len(first.members) > 1:
        endpoints[ENSEMBLE] = EnsembleEndpoint(models, run, {})
    if not first.settings.method.routes:
        voters = {client: record.predictor(client, "local") for client in voters_of(record, first.settings)}
        endpoints |= {VOTE: VoteEndpoint(voters, run, {}), CONFIDENCE: ConfidenceEndpoint(voters, run, {})}
    elif first.settings.data.scaling == "client":
        log(WARNING, "the service has no router, because with scaling = client the clients' inputs are not comparable")
    else:
        candidates, priors = candidates_of(record, first.settings)
        members = {client: model for client, model in models.items() if client in candidates}
        endpoints[ROUTER] = RouterEndpoint(members, run, {}, priors)
    return endpoints


def _shared_model(record: Record, models: Mapping[int, ClientModel]) -> dict[int, ClientModel]:
    """Return the model that all clients receive, keyed by a client, or an empty dictionary if their models differ."""
    paths = [record.models / f"served-{client}.safetensors" for client in models]
    if not all(path.is_file() for path in paths):
        return {}
    if len({_identity(path) for path in paths}) > 1:
        return {}
    client = next(iter(models))
    return {client: ClientModel.load(paths[0])}


def _identity(path: Path) -> str:
    """Return text that is equal for files with the same tensors and preprocessing."""
    metadata = read_metadata(path)
    return metadata.get("crc32", str(path)) + metadata["preprocessing"]
