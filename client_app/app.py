"""The ClientApp: from Flower's messages to the NumPyClient of the method, and back."""

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from posy.client_app import secure_aggregation
from posy.client_app.base import PersonalClient, Steps
from posy.client_app.node_config import TRUSTED, check_node_config
from posy.client_app.registry import client_class
from posy.client_app.site import check_unchanged, describe, enrol, workspace_of
from posy.client_app.state import ContextStore, DirectoryStore, MissingStateError, State, StateStore, Versions
from posy.client_app.workspace import Workspace
from posy.data.errors import DataError
from posy.flower import (
    PING,
    content_of,
    entries_of,
    isolate_simulation,
    of_simulation,
    record_in,
    record_of,
    versions,
    with_entries,
)
from posy.folding import answer_in_kind
from posy.forked import Parcel
from posy.paths import absolute
from posy.settings import SettingsError
from posy.storage import is_folder_name

Result = tuple[Any, int, dict[str, Any]]
"""What a NumPyClient returns: arrays, or a loss; a number of samples; metrics."""

isolate_simulation()
app = ClientApp(mods=[answer_in_kind])


@app.train()
@app.evaluate()
def work(message: Message, context: Context) -> Message:
    """Let one client train for a round, or score the model that it is served."""
    return Call(message, context, trusting=of_simulation()).answer()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell which clients this node hosts, how many samples they have, and what is installed here.

    A site may be asked what it holds, and a client for its part in a stage of secure aggregation. To be asked for
    nothing but an answer tells the server that the node has done what it was asked before.
    """
    config = record_in(message.content, "config", ConfigRecord)
    if config.get(PING):
        return Message(RecordDict(), reply_to=message)
    if "secure-round" in config:
        answer = ConfigRecord({"answer": secure_aggregation.answer(message, context)})
        return Message(RecordDict({"config": answer}), reply_to=message)
    settings = str(config["settings"])
    check_node_config(context.node_config)
    if config.get("describe"):
        told = describe(settings, context)
    else:
        workspace = workspace_of(settings, context)
        told = enrol(workspace, context) if workspace.of_sites else hosted(workspace, context)
        _ = workspace.criterion  # what this node lacks is told before the first round
        if fingerprint := workspace.architecture.fingerprint:
            told["fixed-tensors"] = fingerprint
    told["versions"] = [f"{name} {version}" for name, version in versions().items()]
    return Message(RecordDict({"config": ConfigRecord(told)}), reply_to=message)


def hosted(workspace: Workspace, context: Context) -> dict[str, Any]:
    """Return the name of this node, and the clients that it hosts with their numbers of samples."""
    clients, part = hosted_clients(context, workspace), workspace.partition
    return {
        "name": str(context.node_config.get("name", "")),
        "clients": clients,
        "num-train": [len(part.train[c]) for c in clients],
        "num-test": [len(part.test[c]) for c in clients],
    }


def hosted_clients(context: Context, workspace: Workspace) -> list[int]:
    """Return the clients that a node's config gives it: every N-th of M, beginning with its partition-id."""
    try:
        first, step = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    except (KeyError, TypeError, ValueError):
        first, step = -1, 0
    if first < 0 or step < 1:
        raise DataError(
            "its node config must have partition-id from 0 on and num-partitions from 1 on, as in partition-id=0 "
            "num-partitions=5; a node with data of its own takes part in runs with dataset=sites"
        )
    return list(range(first, workspace.settings.data.num_clients, step))


def own_places(config: dict[str, Any], context: Context) -> None:
    """Replace the places in a message's config, which are the server's, by those that the node's config names.

    The client's state goes to ``state-dir``, the personal model to ``models``, or else beside the state: each
    in a folder of the run.
    """
    wanted = config.pop("save-models-to", "")
    config.pop("state-directory", None)
    state, models = (str(context.node_config.get(key, "")) for key in ("state-dir", "models"))
    if not state and not (wanted and models):
        return
    run = str(config["run"])
    if not is_folder_name(run):
        raise SettingsError(f"run = {run!r} in the server's message: it must be the name of a folder")
    if state:
        config["state-directory"] = str(absolute(state) / run)
    if wanted:
        config["save-models-to"] = str(absolute(models) / run if models else absolute(state) / run / "models")


class Call:
    """A message that asks one client to train or to evaluate.

    ``store`` keeps the client's state; by default it is the directory that the config names, or else the context.
    ``trusting`` lets the server say where this process writes, as in a simulation; else the node's config does.
    """

    def __init__(
        self, message: Message, context: Context, store: StateStore | None = None, *, trusting: bool = False
    ) -> None:
        self.message = message
        self._config: dict[str, Any] = dict(entries_of(record_in(message.content, "config", ConfigRecord)))
        self.workspace = workspace_of(self._config.pop("settings"), context)
        if self.workspace.of_sites:
            check_unchanged(self.workspace, context)
        if not trusting:
            own_places(self._config, context)
        folder = self._config.pop("state-directory", None)
        self._store = store or (DirectoryStore(Path(folder)) if folder else ContextStore(context))
        self._versions = Versions.take(self._config)
        self._training = message.metadata.message_type == MessageType.TRAIN
        self._masking: secure_aggregation.Masking | None = None
        if self._training and (self.workspace.settings.run.secure_aggregation or TRUSTED in context.node_config):
            self._masking = secure_aggregation.Masking(self._config, message, context)
        self._state = State()
        self.number = int(self._config["client"])
        arrays = entries_of(record_in(message.content, "arrays", ArrayRecord))
        self.received = [array.numpy() for array in arrays.values()]
        """What the server has sent, by reference."""
        # Imported here, not where the client is made: that may be on one of several threads.
        self._make: type[PersonalClient] = client_class(self.workspace.settings.run.method)

    @property
    def num_train(self) -> int:
        """Training samples of the client."""
        return len(self.workspace.partition.train[self.workspace.part_of(self.number)])

    @property
    def travels(self) -> bool:
        """Whether another process may carry it out; the keys of secure aggregation stay in this one."""
        return self._masking is None

    def open(self) -> tuple[PersonalClient, Steps[Any]]:
        """Return the client, with its state, and the generator of what it is to do."""
        client = self._make(self.number, self.workspace, self._store.load(self.number, self._versions))
        self._state = client.state
        client.masking = self._masking
        return client, (client.fit_steps if self._training else client.evaluate_steps)(self.received, self._config)

    def packed(self) -> Parcel:
        """Return all that another process needs to carry it out: see :func:`unpacked`."""
        self._state = self._store.load(self.number, self._versions)
        head = self.number, self._training, self._config, list(self._state)
        return Parcel(head, [*self._state.values(), *self.received])

    def take_up(self, answer: Parcel) -> Result:
        """Return a result that another process has :func:`packed`, and take up the client's state."""
        (names, num_examples, metrics), arrays = answer
        if names is not None:
            self._state = State(dict(zip(names, arrays, strict=False)))
            self._state.changed = True
        return list(arrays[len(names or ()) :]), num_examples, metrics

    def close(self, result: Result | Exception) -> Message:
        """Keep the client's state and return the reply, or raise what the client has raised.

        The reply of a client whose state is missing says just that.
        """
        state, self._state = self._state, State()  # from here on the store alone holds it in memory
        if isinstance(result, MissingStateError):
            told = ConfigRecord({"client": self.number, "state-missing": self._versions.start})
            return Message(RecordDict({"config": told}), reply_to=self.message)
        if isinstance(result, Exception):
            raise result
        arrays, num_examples, metrics = result
        version = self._store.save(self.number, self._versions, state)
        return reply_to(self.message, arrays if self._training else [], num_examples, {**metrics, "state": version})

    def answer(self) -> Message:
        """Let the client do what it is asked, and return the reply."""
        try:
            client, steps = self.open()
        except MissingStateError as error:
            return self.close(error)
        return self.close(client.drive(steps))


def unpacked(workspace: Workspace, parcel: Parcel) -> tuple[PersonalClient, Steps[Result]]:
    """Return what :meth:`Call.open` returns of a packed call, in another process."""
    (number, training, config, names), arrays = parcel
    state = State(dict(zip(names, arrays, strict=False)))
    client: PersonalClient = client_class(workspace.settings.run.method)(number, workspace, state)
    return client, (client.fit_steps if training else client.evaluate_steps)(list(arrays[len(names) :]), config)


def packed(client: PersonalClient, result: Result) -> Parcel:
    """Return the result of a packed call, with the client's state if that has changed."""
    arrays, num_examples, metrics = result
    replied = arrays if isinstance(arrays, list) else []  # an evaluation's is its loss
    kept = list(client.state) if client.state.changed else None
    own = [client.state[name] for name in kept or ()]
    return Parcel((kept, num_examples, metrics), [np.asarray(array) for array in (*own, *replied)])


def reply_to(message: Message, arrays: list[Any], num_examples: int, metrics: dict[str, Any]) -> Message:
    """Pack a reply: arrays, numbers, and the texts and ids, which Flower would average among the metrics."""
    numbers = {key: value for key, value in metrics.items() if not isinstance(value, str)}
    texts = {key: value for key, value in metrics.items() if isinstance(value, str)}
    client = record_in(message.content, "config", ConfigRecord)["client"]
    content = content_of(
        arrays=record_of({str(i): np.asarray(a) for i, a in enumerate(arrays)}),
        metrics=with_entries(MetricRecord(), {**numbers, "num-examples": num_examples}),
        config=with_entries(ConfigRecord(), {**texts, "client": client}),
    )
    return Message(content, reply_to=message)
