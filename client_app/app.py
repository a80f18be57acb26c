"""The ClientApp: from Flower's messages to the NumPyClient of the method, and back."""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.base import PersonalClient
from client_app.workspace import Workspace, workspace_for
from posy.flower import absolute, isolate_simulation
from posy.methods import client_class
from posy.state import ContextStore, DirectoryStore, Moment, StateStore, run_folder

isolate_simulation()
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    return answer(message, store_for(message, context))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the served model of one client."""
    return answer(message, store_for(message, context))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which clients this node hosts, and how many samples they have."""
    config = message.content.config_records["config"]
    workspace = workspace_for(str(config["settings"]))
    clients = hosted_clients(context, workspace)
    part = workspace.partition
    answer = ConfigRecord(
        {
            "clients": clients,
            "num-train": [len(part.train[c]) for c in clients],
            "num-test": [len(part.test[c]) for c in clients],
        }
    )
    return Message(RecordDict({"config": answer}), reply_to=message)


def hosted_clients(context: Context, workspace: Workspace) -> list[int]:
    """Return the clients of this node: every N-th of M, beginning with its partition-id."""
    node = context.node_config
    first, step = int(node["partition-id"]), int(node["num-partitions"])
    return list(range(first, workspace.settings.data.num_clients, step))


def store_for(message: Message, context: Context) -> StateStore:
    """Return where this node keeps its clients' states.

    That is the node's own ``state-dir``; or, in a simulation whose run has checkpoints, the directory in the
    run's own that the server names; or else Flower's context.
    """
    config: dict[str, Any] = dict(message.content.config_records["config"])
    if own := context.node_config.get("state-dir"):
        return DirectoryStore(run_folder(absolute(str(own)), str(config["run"])))
    if told := config.get("state-directory"):
        return DirectoryStore(Path(str(told)))
    return ContextStore(context)


def answer(message: Message, store: StateStore) -> Message:
    """Let the client that a message is for train or evaluate, with its state from a store."""
    workspace, received, config = open_message(message)
    number, moment = int(config["client"]), Moment.of(message)
    client: PersonalClient = client_class(workspace.settings.run.method)(number, workspace, store.load(number, moment))
    result: list[Any] = []
    if message.metadata.message_type == MessageType.TRAIN:
        result, num_examples, metrics = client.fit(received, config)
    else:
        _, num_examples, metrics = client.evaluate(received, config)
    store.save(number, moment, client.state)
    return reply_to(message, result, num_examples, metrics)


def open_message(message: Message) -> tuple[Workspace, list[Any], dict[str, Any]]:
    """Return the workspace for a message, the arrays, in the order in which they were sent, and the config."""
    config: dict[str, Any] = dict(message.content.config_records["config"])
    workspace = workspace_for(config.pop("settings"))
    return workspace, [array.numpy() for array in message.content.array_records["arrays"].values()], config


def client_of(message: Message) -> int:
    """Return the client that a message is for."""
    number: Any = message.content.config_records["config"]["client"]
    return int(number)


def reply_to(message: Message, arrays: list[Any], num_examples: int, metrics: dict[str, Any]) -> Message:
    """Pack a reply: arrays, numbers, and the texts and ids, which Flower would average among the metrics."""
    numbers = {k: v for k, v in metrics.items() if not isinstance(v, str)}
    texts = {k: v for k, v in metrics.items() if isinstance(v, str)}
    content = RecordDict(
        {
            "arrays": ArrayRecord({str(i): Array(np.asarray(a, order="C")) for i, a in enumerate(arrays)}),
            "metrics": MetricRecord({**numbers, "num-examples": num_examples}),
            "config": ConfigRecord({**texts, "client": client_of(message)}),
        }
    )
    return Message(content, reply_to=message)
