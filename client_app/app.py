"""The ClientApp: from Flower's messages to the NumPyClient of the method, and back."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.base import PersonalClient
from client_app.site import describe, enrol, prepare, workspace_of
from client_app.workspace import Workspace
from posy.flower import isolate_simulation
from posy.methods import client_class
from posy.state import load_state, save_state

isolate_simulation()
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    client, arrays, config = open_message(message, context)
    result, num_examples, metrics = client.fit(arrays, config)
    save_state(context, client.client, client.state)
    return reply_to(message, result, num_examples, metrics)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the served model of one client."""
    client, arrays, config = open_message(message, context)
    _, num_examples, metrics = client.evaluate(arrays, config)
    save_state(context, client.client, client.state)
    return reply_to(message, [], num_examples, metrics)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which clients this node hosts, and how many samples they have; a site may be asked what it holds."""
    config = message.content.config_records["config"]
    if config.get("describe"):
        told = describe(str(config["settings"]), context)
        return Message(RecordDict({"config": ConfigRecord(told)}), reply_to=message)
    workspace = workspace_of(str(config["settings"]), context)
    if workspace.of_sites:
        return Message(RecordDict({"config": ConfigRecord(enrol(workspace, context))}), reply_to=message)
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


def open_message(message: Message, context: Context) -> tuple[PersonalClient, list[Any], dict[str, Any]]:
    """Return the client that a message is for, the arrays and the config that it brings."""
    config: dict[str, Any] = dict(message.content.config_records["config"])
    workspace = workspace_of(config.pop("settings"), context)
    if workspace.of_sites:
        prepare(workspace, context, config)
    number = int(config["client"])
    client = client_class(workspace.settings.run.method)(number, workspace, load_state(context, number))
    arrays = [array.numpy() for array in message.content.array_records["arrays"].values()]
    return client, arrays, config


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
