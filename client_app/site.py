"""A node that holds its own data: who it is, what it tells of its data, and that the data stays the same."""

import zlib
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from client_app.workspace import Workspace, data_path, workspace_for
from data.errors import DataError
from data.sites import describe_site
from posy.config import from_json
from posy.settings import SITES

_RECORD = "site-data"


def workspace_of(settings_json: str, context: Context) -> Workspace:
    """Return this process's workspace for some settings and the data of this node."""
    own = from_json(settings_json).data.dataset == SITES
    return workspace_for(settings_json, str(context.node_config.get("data", "")) if own else "")


def identity(context: Context) -> dict[str, Any]:
    """Return the name of this node, and its client index if it has a partition-id."""
    told = {"name": str(context.node_config.get("name", ""))}
    if "partition-id" in context.node_config:
        return {**told, "client": int(context.node_config["partition-id"])}
    return told


def describe(settings_json: str, context: Context) -> dict[str, Any]:
    """Tell what this node's data is like, as far as the settings leave that open.

    Raises
    ------
    DataError
        If the node has no data, or it cannot be used.
    """
    settings = from_json(settings_json)
    path = data_path(str(context.node_config.get("data", "")))
    return {**identity(context), **describe_site(path, settings.data, settings.run.seed).as_answer()}


def enrol(workspace: Workspace, context: Context) -> dict[str, Any]:
    """Check this node's data against the task of the run; tell who it is and how many samples it has.

    Raises
    ------
    DataError
        If the node has no data, or it does not suit the run.
    """
    check_unchanged(workspace, context)
    part, y = workspace.partition, workspace.dataset.y
    told = {**identity(context), "num-train": len(part.train[0]), "num-test": len(part.test[0])}
    if workspace.settings.data.share_class_counts:
        told["class-counts"] = part.counts(y, workspace.task.num_classes)[0].tolist()
    return told


def check_unchanged(workspace: Workspace, context: Context) -> None:
    """Raise :class:`DataError` if the data has changed since the node's first message of this run.

    Another order or number of samples would mean another split, and test samples that were trained on.
    """
    y = workspace.dataset.y
    mark = f"{len(y)} samples, {zlib.crc32(np.ascontiguousarray(y).tobytes()):08x}"
    before = context.state.config_records.get(_RECORD)
    if before is None:
        context.state[_RECORD] = ConfigRecord({"mark": mark})
    elif before["mark"] != mark:
        raise DataError(f"{workspace.site}: the data has changed during the run; start a new one")
