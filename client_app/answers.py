"""Answer the queries of a service with the layers that a client keeps, so that these layers stay on the node."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from posy.client_app.none_fits import FILE_OF_CLIENT, Calibration
from posy.client_app.places import models_folder
from posy.client_app.policy import ANSWERS, PolicyError, Violation, update_today
from posy.client_app.stored import ClientModel
from posy.data.policy import Policy
from posy.flower import content_of, entries_of, record_in, record_of
from posy.settings import SettingsError
from posy.strategies.run_settings import DISTANCES, EMBEDDINGS, MODEL_ROUND, PROBABILITIES, SIZES

MOST_QUERIES = 4096
"""Maximum number of queries in a message."""


def answer_queries(message: Message, context: Context, policy: Policy | None) -> Message:
    """Return the class probabilities ``(n, C)`` and distances ``(n,)`` for the embeddings ``(n, D)`` in a message.

    The message names the client, the run and the round. The node computes the answer with the model of this round that
    the client has stored. If the node has calibrated the distance to its samples, the answer contains the distance of
    each query; above 1, the query does not fit the samples.

    Raises
    ------
    PolicyError
        If the site's policy does not allow the answers.
    SettingsError
        If the node has no model of this round, or the embeddings are not usable.
    """
    config = entries_of(record_in(message.content, "config", ConfigRecord))
    array = entries_of(record_in(message.content, "arrays", ArrayRecord))[EMBEDDINGS].numpy()
    if array.ndim != 2 or array.dtype != np.float32 or len(array) > MOST_QUERIES or not np.isfinite(array).all():
        raise SettingsError(
            f"the message has embeddings {array.dtype} {array.shape}; the node needs at most {MOST_QUERIES} rows of "
            "finite numbers in float32"
        )
    sizes = [int(size) for size in config[SIZES]]
    if min(sizes, default=0) < 1 or sum(sizes) != array.shape[1]:
        raise SettingsError(f"the message has embeddings {array.shape}, which do not have the sizes {sizes}")
    own, *of_clients = np.split(array, np.cumsum(sizes)[:-1], axis=1)
    model, path = _model_for(config, context)
    if policy is not None:
        _count_answers(policy, context.node_config, len(array))
    with torch.inference_mode():
        replied = {PROBABILITIES: model.answer(torch.tensor(own)).numpy()}
    calibration = _calibration(path.with_name(FILE_OF_CLIENT.format(client=model.client)), model.round)
    if calibration is not None and of_clients:
        replied[DISTANCES] = calibration.relative_of(of_clients).astype(np.float32)
    reply_config = ConfigRecord({"client": config["client"]})
    return Message(content_of(arrays=record_of(replied), config=reply_config), reply_to=message)


def _model_for(config: Mapping[str, Any], context: Context) -> tuple[ClientModel, Path]:
    """Return the model that a query names and its file; raise :class:`SettingsError` if the node does not have it."""
    client, number = int(config["client"]), int(config[MODEL_ROUND])
    folder = models_folder(context.node_config, str(config["run"]))
    if folder is None:
        raise SettingsError("this node stores no models; set state-dir in its node config, and repeat the run")
    paths = [folder / f"{kind}-{client}.safetensors" for kind in ("served", "client")]
    path = next((path for path in paths if path.is_file()), None)
    model = None if path is None else _stored(path, path.stat().st_mtime_ns)
    name = str(context.node_config.get("name", ""))
    if path is None or model is None or (name and model.site not in ("", name)):
        raise SettingsError(f"this node has no model of client {client} in run {config['run']!r:.99}")
    if model.round != number:
        raise SettingsError(
            f"this node's model is of round {model.round}, and the service needs round {number}; deliver the final "
            "model with `posy run --superlink HOST:PORT resume=RUN`"
        )
    return model, path


@lru_cache(maxsize=8)
def _stored(path: Path, modified: int) -> ClientModel:
    """Return a stored model. The file is read again if its modification time changes."""
    return ClientModel.load(path)


def _calibration(path: Path, server_round: int) -> Calibration | None:
    """Return the calibrated distance to a client's samples, or None if the node has none."""
    return _stored_calibration(path, server_round, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=8)
def _stored_calibration(path: Path, server_round: int, modified: int) -> Calibration | None:
    return Calibration.read(path.parent, server_round, path.name)


def _count_answers(policy: Policy, node_config: Mapping[str, Any], count: int) -> None:
    """Add answers to today's answers, or raise :class:`PolicyError` if there are too many."""

    def with_answers(answers: int) -> int:
        limit = policy.max_answers_per_day
        if answers + count > limit:
            reason = f"the site answers {limit} queries per day (UTC)" if limit else "the site answers no queries"
            raise PolicyError(Violation("max-answers-per-day", reason))
        return answers + count

    update_today(node_config, ANSWERS, 0, with_answers)
