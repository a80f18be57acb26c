"""Load the models of a run for the service."""

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log

from posy.client_app.library import Library
from posy.client_app.none_fits import Calibration
from posy.client_app.stored import ClientModel
from posy.metrics import CLASSES
from posy.serve.endpoints import ClientEndpoint, ConfidenceEndpoint, Endpoint, EnsembleEndpoint, VoteEndpoint, name_of
from posy.serve.federation import FederationRouter, Link
from posy.serve.router import Ranking, RouterEndpoint
from posy.server_app.record import Record
from posy.server_app.routing import candidates_of, router_of, settings_of, voters_of
from posy.settings import SettingsError
from posy.storage import is_locked, read_metadata

SERVED, ENSEMBLE, ROUTER, VOTE, CONFIDENCE = "served", "ensemble", "router", "majority-vote", "confidence"
"""Names of the models that combine clients. A client with such a name is offered as ``client-N``."""
_RESERVED = (SERVED, ENSEMBLE, ROUTER, VOTE, CONFIDENCE)


def load_endpoints(record: Record) -> dict[str, Endpoint]:
    """Return the models of a run, keyed by name.

    These are the models of the clients, the model that all clients share, and combinations of the clients' models. In a
    node's folder, it is only the current model of each site.

    Raises
    ------
    SettingsError
        If the run has no clients' models, or is replacing them.
    DamagedFileError
        If a file cannot be read.
    """
    if record.library is not None:
        return _site_endpoints(record.library)
    run = record.name
    recorded = _last_round(record)  # before the models, which the run may replace meanwhile
    if not any(record.models.glob("client-*.safetensors")) and settings_of(record).method.routes:
        raise SettingsError(
            f"{record.path} has no clients' models; if they are on the nodes of a federation, add --superlink "
            "HOST:PORT so that the nodes answer"
        )
    models = {client: record.predictor(client) for client in record.names}
    endpoints: dict[str, Endpoint] = {}
    for client, model in models.items():
        name = name_of(client, model)
        name = f"client-{client}" if name in _RESERVED or name in endpoints else name
        endpoints[name] = ClientEndpoint({client: model}, run, record.scores(model))
    if recorded is None:
        return endpoints
    # A combination contains one round, and omits clients that missed it.
    latest = _latest_round(record, models, recorded)
    current = {client: model for client, model in models.items() if model.round == latest}
    first = next(iter(current.values()))
    if shared := _shared_model(record, current):
        endpoints[SERVED] = ClientEndpoint(shared, run, {})
    if len(current) == 1 or first.preprocessing.task.target != CLASSES:
        return endpoints
    if len(first.members) > 1:
        endpoints[ENSEMBLE] = EnsembleEndpoint(current, run, {})
    if not first.settings.method.routes:
        # A client that has not trained in the last round has no local model, and votes with its served model.
        numbers = [client for client in voters_of(record, first.settings) if client in current]
        voters = {
            client: current[client] if current[client].point == "local" else ClientModel.load(record.files[client])
            for client in numbers
        }
        _check_round(record, voters, latest)
        if voters:
            endpoints |= {VOTE: VoteEndpoint(voters, run, {}), CONFIDENCE: ConfidenceEndpoint(voters, run, {})}
    elif first.settings.data.scaling == "client":
        log(WARNING, "the service has no router, because with scaling = client the clients' inputs are not comparable")
    else:
        candidates, priors = candidates_of(record, first.settings)
        routed = {client: model for client, model in current.items() if client in candidates}
        if routed:
            calibration = Calibration.read(record.models, latest) or _reason(record)
            endpoints[ROUTER] = RouterEndpoint(routed, run, {}, priors, calibration)
    return endpoints


def load_router(record: Record, link: Link) -> dict[str, Endpoint]:
    """Return the router of a run whose clients' models stay on their nodes.

    Raises
    ------
    SettingsError
        If the run's method does not route queries to clients.
    DamagedFileError
        If a file cannot be read.
    """
    if not settings_of(record).method.routes:
        raise SettingsError(
            f"{record.path}: method = {record.settings['method']!r} does not route queries to clients, so nodes cannot "
            "answer them; use method = 'feddrm', or serve the models at the sites"
        )
    model = router_of(record)
    candidates, priors = candidates_of(record, model.settings)
    sites = dict(enumerate(record.summary.get("sites", ())))
    names = {client: sites.get(client) or f"client-{client}" for client in sorted(candidates)}
    return {ROUTER: FederationRouter(model, record.name, Ranking(names, priors), link)}


def _site_endpoints(library: Library) -> dict[str, Endpoint]:
    """Return the current model of each site in a node's folder, keyed by the site's name, and warn about its age."""
    endpoints: dict[str, Endpoint] = {}
    for run, stored in library.current_models:
        model = ClientModel.load(stored.path)
        name = name_of(stored.client, model)
        endpoints[name] = ClientEndpoint({stored.client: model}, run.name, stored.scores)
        if stored.age:
            log(WARNING, "%s: %s", name, stored.age)
    return endpoints


def _last_round(record: Record) -> int | None:
    """Return the last round in the record of a run, or None before the run has recorded a round."""
    if not (record.path / "clients.csv").is_file():
        return None
    return int(record.clients["round"].max()) if len(record.clients) else 0


def _latest_round(record: Record, models: Mapping[int, ClientModel], recorded: int) -> int:
    """Return the latest round of which the models are complete, given the last round in the record.

    Raise :class:`SettingsError` if the run is replacing the models.
    """
    rounds = {model.round for model in models.values()}
    if max(rounds) > recorded and (is_locked(record.path) or _last_round(Record(record.path)) != recorded):
        raise _unfinished(record, max(rounds))
    return max((number for number in rounds if number <= recorded), default=max(rounds))


def _check_round(record: Record, models: Mapping[int, ClientModel], expected: int) -> None:
    """Raise :class:`SettingsError` if a model is of another round, because the run is replacing the models."""
    if wrong_rounds := [model.round for model in models.values() if model.round != expected]:
        raise _unfinished(record, wrong_rounds[0])


def _unfinished(record: Record, number: int) -> SettingsError:
    return SettingsError(f"{record.path}: the run is writing the models of round {number}; try again after the round")


def _shared_model(record: Record, models: Mapping[int, ClientModel]) -> dict[int, ClientModel]:
    """Return the model that all clients receive, keyed by a client, or an empty dictionary if their models differ."""
    paths = [record.models / f"served-{client}.safetensors" for client in models]
    if not all(path.is_file() for path in paths):
        return {}
    if len({_identity(path) for path in paths}) > 1:
        return {}
    client, model = next(iter(models.items()))
    return {client: model}


def _identity(path: Path) -> str:
    """Return text that is equal for files with the same tensors and preprocessing."""
    metadata = read_metadata(path)
    return metadata.get("crc32", str(path)) + metadata["preprocessing"]


def _reason(record: Record) -> str:
    """Return why the distance to the clients' data is not calibrated."""
    reason: str = record.summary.get("none-fits", {}).get("reason", "")
    return reason or "the distance is calibrated at the end of a completed run; resume the run, or repeat it"
