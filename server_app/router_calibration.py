"""Calibrate the router's distance after a run, if the clients' samples and models are on the server's machine."""

from pathlib import Path
from typing import Any

from posy.client_app.none_fits import NotCalibratedError, calibrate
from posy.client_app.workspace import Workspace
from posy.server_app.record import Record
from posy.server_app.routing import candidates_of
from posy.server_app.system import ON_NODES, models_withheld
from posy.strategies.run_settings import OFF


def calibrate_run(workspace: Workspace, record: Record) -> dict[str, Any]:
    """Calibrate the distance after a run, write it to the run's models, and return the summary's entry.

    If the distance cannot be calibrated, the entry contains the ``reason``.
    """
    try:
        if reason := _withheld(workspace, record.models):
            raise NotCalibratedError(reason)
        members = sorted(candidates_of(record, workspace.settings)[0] & record.files.keys())
        if not members:
            raise NotCalibratedError(ON_NODES)
        model = record.predictor(members[0]).to(workspace.device)
        calibration = calibrate(model, members, workspace.client_data)
    except NotCalibratedError as error:
        return {"reason": str(error)}
    calibration.write(record.models, model.round)
    return dict(calibration.facts)


def _withheld(workspace: Workspace, models: Path) -> str:
    """Return why the server cannot calibrate the distance, or an empty string if it can."""
    settings = workspace.settings
    if reason := models_withheld(settings, workspace):
        return reason
    if settings.data.scaling == "client":
        return "with scaling = client, the clients' inputs are not comparable"
    if settings.train.dp != OFF:
        return f"with dp = {settings.train.dp}, means of training samples would exceed the privacy guarantee"
    return "" if any(models.glob("client-*.safetensors")) else ON_NODES
