"""Describe a node with local data to the server, and check that the data does not change during a run."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context

from posy.client_app.node_config import TRUSTED, node_settings
from posy.client_app.policy import check_budget
from posy.client_app.secure_aggregation import ProtocolError
from posy.client_app.workspace import DEFAULT_POLICY, Workspace, data_path, workspace_for
from posy.data.agreement import site_notices
from posy.data.dataset import Content
from posy.data.errors import DataError, Note
from posy.data.policy import Policy
from posy.data.settings import SITES, DataSettings
from posy.data.sites import describe_site, read_site, site_numbers
from posy.paths import absolute
from posy.strategies.client_settings import check_allowed, report_of
from posy.strategies.registry import from_json

SECRET_FILE = "site-secret"
"""File in a node's ``state-dir`` that contains the secret key for the fingerprint of the node's data."""
_RECORD = "site-data"


def workspace_of(settings_json: str, context: Context, policy: Policy | None) -> Workspace:
    """Return this process's workspace for the settings, this node's data and the settings in the node config.

    Raise :class:`SettingsError` if the run does not allow the settings in the node config.
    """
    settings, chosen = from_json(settings_json), node_settings(context.node_config)
    policy = policy or DEFAULT_POLICY
    check_allowed(chosen, settings.train.client_bounds, shares_values=policy.share_settings)
    if settings.data.dataset != SITES:
        return workspace_for(settings, "", False, DEFAULT_POLICY, chosen) if chosen else workspace_for(settings, "")
    settings = replace(settings, data=replace(settings.data, data_dir=policy.weights))
    data = str(context.node_config.get("data", ""))
    return workspace_for(settings, data, skips(context.node_config), policy, chosen)


def skips(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node's config allows the node to skip image files that it cannot read."""
    value = str(node_config.get("skip-unreadable", False)).lower()
    if value not in ("true", "false"):
        raise DataError(f"skip-unreadable = {value!r} in the node config: it must be true or false")
    return value == "true"


def identity(context: Context) -> dict[str, Any]:
    """Return the name of this node, and its client index if its config has a partition-id."""
    name = {"name": str(context.node_config.get("name", ""))}
    partition_id = context.node_config.get("partition-id")
    return name if partition_id is None else {**name, "client": int(partition_id)}


def describe(settings_json: str, context: Context, policy: Policy | None) -> dict[str, Any]:
    """Return a description of this node's data: the properties that the settings do not specify.

    With secure aggregation, the description contains neither labels nor statistics. :func:`numbers` returns both for a
    masked sum.

    Raises :class:`DataError` if the data cannot be used.
    """
    settings = from_json(settings_json)
    masked = settings.run.secure_aggregation
    if TRUSTED in context.node_config and not masked:
        raise ProtocolError(f"with {TRUSTED} in its node config, a site joins only runs with secure-aggregation = true")
    content, policy = _read(settings.data, context, policy)
    return {**identity(context), **describe_site(content, settings.data, policy, masked=masked).as_answer()}


def numbers(settings_json: str, context: Context, policy: Policy | None) -> list[int]:
    """Return the labels and statistics of this node's data as numbers for a masked sum.

    Raises :class:`DataError` if the data cannot be used.
    """
    settings = from_json(settings_json).data
    content, rules = _read(settings, context, policy)
    return site_numbers(content, settings, rules)


def _read(settings: DataSettings, context: Context, policy: Policy | None) -> tuple[Content, Policy]:
    """Return this node's data and policy."""
    policy = policy or DEFAULT_POLICY
    path = data_path(str(context.node_config.get("data", "")))
    return read_site(path, settings, policy, skips(context.node_config)), policy


def enrol(workspace: Workspace, context: Context) -> dict[str, Any]:
    """Return this node's name, its sample counts, and warnings about its data.

    Raises an error if the data has changed, or if the run would exceed the site's privacy budget.
    """
    check_unchanged(workspace, context)
    part, dataset = workspace.partition, workspace.dataset
    answer = {
        **identity(context),
        "num-train": len(part.train[0]),
        "num-test": len(part.test[0]),
        "fingerprint": salted(workspace.fingerprint, context.node_config),
        "node-settings": report_of(workspace.node_settings, shares_values=workspace.policy.share_settings),
        **site_notices((*map(Note, workspace.trainer.notes), *dataset.notes), dataset.skipped),
    }
    for settings in workspace.possible_settings():
        check_budget(workspace.policy, settings, context, len(part.train[0]))
    if workspace.settings.data.share_class_counts:
        counts: list[int] = part.counts(dataset.y, workspace.task.num_classes)[0].tolist()
        answer["class-counts"] = [n if n >= workspace.policy.min_rows else 0 for n in counts]
    return answer


def salted(fingerprint: str, node_config: Mapping[str, Any]) -> str:
    """Return the fingerprint that a site sends to the server: 16 hexadecimal digits, keyed with the node's secret.

    The secret, stored in a file in ``state-dir``, prevents the server from recognising a known data set by its
    fingerprint. Without ``state-dir``, the node has no secret that survives a restart, so it sends the fingerprint
    unchanged.
    """
    folder = str(node_config.get("state-dir", ""))
    if not folder:
        return fingerprint
    file = absolute(folder) / SECRET_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(32))
    return hashlib.blake2b(fingerprint.encode(), key=file.read_bytes(), digest_size=8).hexdigest()


def check_unchanged(workspace: Workspace, context: Context) -> None:
    """Raise :class:`DataError` if the data has changed since the node's first message of this run.

    Different samples, or a different order, would change the split, so the model might be tested on training
    samples.
    """
    record = context.state.config_records.setdefault(_RECORD, ConfigRecord({"fingerprint": workspace.fingerprint}))
    if record["fingerprint"] != workspace.fingerprint:
        raise DataError(f"{workspace.site}: the data has changed during the run; start a new run", "changed-data")
