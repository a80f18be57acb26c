"""The ClientApp, which passes Flower's messages to the method's NumPyClient and packs the replies."""

import json
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from posy.client_app import secure_aggregation
from posy.client_app.answers import answer_queries
from posy.client_app.audit import record_reply
from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Steps
from posy.client_app.local_run import LocalRun
from posy.client_app.node_config import TRUSTED, check_node_config
from posy.client_app.places import own_places
from posy.client_app.policy import (
    admit,
    check_once,
    check_place,
    check_requested,
    guarded,
    limited_scores,
    pin_state,
    site_policy,
    spend_budget,
)
from posy.client_app.registry import client_class
from posy.client_app.run_check import check_run
from posy.client_app.site import check_unchanged, describe, enrol, numbers, workspace_of
from posy.client_app.state import ContextStore, DirectoryStore, MissingStateError, State, StateStore, Versions
from posy.client_app.workspace import DEFAULT_POLICY, Workspace
from posy.data.errors import DataError
from posy.data.policy import Policy
from posy.extensions import key_prefix
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
from posy.settings import SettingsError
from posy.strategies.arrays import Arrays
from posy.strategies.client_settings import method_notices, report_of
from posy.strategies.masking import Words
from posy.strategies.run_settings import DELIVERY, MODEL_ROUND
from posy.strategies.secure_aggregation import EVALUATION, STATISTICS, TRAINING

Result = tuple[Any, int, dict[str, Any]]
"""Result of a call: the arrays (keyed by name) or the loss, the number of samples, and the metrics."""

isolate_simulation()
app = ClientApp(mods=[answer_in_kind, record_reply])


@app.train()
@app.evaluate()
@guarded
def work(message: Message, context: Context) -> Message:
    """Run a client's training round or evaluation, and return the reply."""
    if message.metadata.message_type not in (MessageType.TRAIN, MessageType.EVALUATE):
        # Flower also sends `train.default` to this function, and check_once() would accept it as a separate phase.
        raise SettingsError(f"the message type {message.metadata.message_type!r} is neither train nor evaluate")
    return Call(message, context, trusting=of_simulation()).answer()


@app.query()
@guarded
def query(message: Message, context: Context) -> Message:
    """Return this node's clients, their sample counts, and the versions of the installed packages.

    A query can also request a description of a site's data, belong to a stage of secure aggregation, or contain queries
    of a service. A ping receives an empty reply, which shows that the node has finished processing earlier messages.
    """
    config = record_in(message.content, "config", ConfigRecord)
    if config.get(PING):
        return Message(RecordDict(), reply_to=message)
    policy = site_policy(context.node_config)
    if MODEL_ROUND in config:
        return answer_queries(message, context, policy)
    if "secure-round" in config:
        rules = policy or DEFAULT_POLICY
        if config["secure-stage"] == STATISTICS:
            answers = [masked_statistics(message, context, policy).tobytes()]
        else:
            least = rules.min_clients or secure_aggregation.smallest_sum(context.node_config)
            answers = secure_aggregation.answer(message, context, least)
        return Message(RecordDict({"config": ConfigRecord({"answer": answers})}), reply_to=message)
    settings, describes = str(config["settings"]), bool(config.get("describe"))
    check_node_config(context.node_config)
    if policy:
        admit(policy, settings, context, message.metadata.run_id, pin=not describes)
    if describes:
        description = describe(settings, context, policy)
    else:
        workspace = workspace_of(settings, context, policy)
        if policy:
            check_run(workspace)
        description = enrol(workspace, context) if workspace.of_sites else hosted(workspace, context)
        _ = workspace.criterion  # raises an error for an invalid loss function before the first round
        _warn_about_node_settings(workspace)
        if fingerprint := workspace.architecture.fingerprint:
            description["fixed-tensors"] = fingerprint
    # In a container, Posy may run without being installed, so its version is unknown.
    description["versions"] = [f"{name} {version}" for name, version in versions().items() if version]
    return Message(RecordDict({"config": ConfigRecord(description)}), reply_to=message)


def _warn_about_node_settings(workspace: Workspace) -> None:
    """Log the method's warnings that only the settings in the node config cause, which the server may not see."""
    if not workspace.node_settings:
        return
    settings, source = workspace.settings, {"the node config": workspace.node_settings}
    shared = method_notices(settings, workspace.architecture)
    for notice in method_notices(settings, workspace.architecture, source)[len(shared) :]:
        log(WARNING, "%s: %s", key_prefix(settings.run.method), notice)


def masked_statistics(message: Message, context: Context, policy: Policy | None) -> Words:
    """Return the masked statistics of this node's data."""
    config = dict(entries_of(record_in(message.content, "config", ConfigRecord)))
    settings = str(config["settings"])
    if policy:
        admit(policy, settings, context, message.metadata.run_id, pin=False)
    masking = secure_aggregation.Masking(config, message, context, purpose=STATISTICS)
    return masking.mask_reply([], [], 1, 1.0, [], numbers(settings, context, policy))


def hosted(workspace: Workspace, context: Context) -> dict[str, Any]:
    """Return this node's name, its clients, their sample counts, and warnings."""
    clients, part = hosted_clients(context, workspace), workspace.partition
    return {
        "name": str(context.node_config.get("name", "")),
        "clients": clients,
        "num-train": [len(part.train[c]) for c in clients],
        "num-test": [len(part.test[c]) for c in clients],
        "node-settings": report_of(workspace.node_settings),
        "warnings": list(workspace.trainer.notes),
    }


def hosted_clients(context: Context, workspace: Workspace) -> list[int]:
    """Return the clients of a node: every ``num-partitions``-th client, starting at ``partition-id``."""
    try:
        first, step = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    except (KeyError, TypeError, ValueError):
        first, step = -1, 0
    if first < 0 or step < 1:
        raise DataError(
            "its node config must have partition-id >= 0 and num-partitions >= 1, as in partition-id=0 "
            "num-partitions=5; a node with local data can join only runs with dataset=sites"
        )
    return list(range(first, workspace.settings.data.num_clients, step))


class Call:
    """A message that asks one client to train or evaluate.

    Parameters
    ----------
    message : Message
        The request.
    context : Context
        Flower's context of the node.
    store : StateStore, optional
        Storage for the client's state. The default is the directory named in the config, or else the context.
    trusting : bool
        Whether the server may choose this process's folders, as in a simulation. By default, the folders come from the
        node's config.
    """

    def __init__(
        self, message: Message, context: Context, store: StateStore | None = None, *, trusting: bool = False
    ) -> None:
        self.message = message
        entries = entries_of(record_in(message.content, "config", ConfigRecord))
        self._config: dict[str, Any] = dict(entries)
        settings_json = str(self._config.pop("settings"))
        self._policy = site_policy(context.node_config)
        if self._policy:
            admit(self._policy, settings_json, context, message.metadata.run_id)
        self.workspace = workspace_of(settings_json, context, self._policy)
        if self.workspace.of_sites:
            self.workspace.site_name = str(self._config.get("site", ""))
            check_unchanged(self.workspace, context)
        if not trusting:
            own_places(self._config, context)
        folder = self._config.pop("state-directory", None)
        predictions = self._config.get("save-predictions-to", "")
        run_folder = folder or self._config.get("save-models-to") or (predictions and Path(predictions).parent)
        if self._policy and run_folder:
            pin_state(Path(run_folder), json.loads(settings_json))
        self._store = store or (DirectoryStore(Path(folder)) if folder else ContextStore(context))
        self._versions = Versions.take(self._config)
        self._training = message.metadata.message_type == MessageType.TRAIN
        self._masking: secure_aggregation.Masking | None = None
        settings = self.workspace.settings
        self._delivery = not self._training and bool(self._config.get(DELIVERY))
        if not self._delivery and (settings.run.secure_aggregation or TRUSTED in context.node_config):
            self._masking = secure_aggregation.Masking(
                self._config,
                message,
                context,
                purpose=TRAINING if self._training else EVALUATION,
            )
        self._state = State()
        self.number = int(self._config["client"])
        arrays = entries_of(record_in(message.content, "arrays", ArrayRecord))
        self.received: Arrays = {name: array.numpy() for name, array in arrays.items()}
        """The server's arrays, keyed by name. They are not copied."""
        if self._policy:
            phase, server_round = message.metadata.message_type, int(self._config["server-round"])
            check_place(self.workspace.settings, context, self.number, server_round)
            check_run(self.workspace)
            check_requested(self._policy, self._config, self.workspace.task.target)
            check_once(context, self.number, phase, server_round, list(self.received.values()), entries)
            if self._training:
                own_settings = self.workspace.settings_of(self.number)
                spend_budget(self._policy, own_settings, context, self.num_train, server_round)
        # Import the class here, because open() may run on several threads at once.
        self._make: type[PersonalClient] = client_class(self.workspace.settings.run.method)

    @property
    def num_train(self) -> int:
        """The client's number of training samples."""
        return len(self.workspace.partition.train[self.workspace.part_of(self.number)])

    @property
    def travels(self) -> bool:
        """Whether another process may run the call. Keys for secure aggregation never leave this process."""
        return self._masking is None

    def open(self) -> tuple[PersonalClient, Steps[Any]]:
        """Return the client with its state, and the generator that yields its requests."""
        client = self._make(self.number, self.workspace, self._store.load(self.number, self._versions))
        self._state = client.state
        run = LocalRun(client.jobs, self.received, self._config, self._masking)
        return client, run.train() if self._training else run.evaluate()

    def packed(self) -> Parcel:
        """Pack the call for another process, which opens it with :func:`unpacked`."""
        self._state = self._store.load(self.number, self._versions)
        head = self.number, self._training, self._config, list(self._state), list(self.received)
        return Parcel(head, [*self._state.values(), *self.received.values()])

    def unpack_answer(self, answer: Parcel) -> Result:
        """Unpack a result that another process packed with :func:`packed`, and update the client's state."""
        (state_names, reply_names, num_examples, metrics), arrays = answer
        if state_names is not None:
            self._state = State(dict(zip(state_names, arrays, strict=False)))
            self._state.changed = True
        return dict(zip(reply_names, arrays[len(state_names or ()) :], strict=True)), num_examples, metrics

    def close(self, result: Result | Exception) -> Message:
        """Store the client's state and return the reply, or raise the client's error.

        If the client's state is missing, the reply names only the client and the missing version.
        """
        state, self._state = self._state, State()  # only the store keeps the state in memory
        if isinstance(result, MissingStateError):
            missing = ConfigRecord({"client": self.number, "state-missing": self._versions.start})
            return Message(RecordDict({"config": missing}), reply_to=self.message)
        if isinstance(result, Exception):
            raise result
        arrays, num_examples, metrics = result
        if self._policy:
            metrics = limited_scores(self._policy, metrics)
        # A delivery follows the last round, so the state of the last round stays the client's state.
        version = self._versions.start if self._delivery else self._store.save(self.number, self._versions, state)
        reply_arrays = (
            arrays if isinstance(arrays, dict) else {}
        )  # an evaluation without masks returns its loss instead
        return reply_to(self.message, reply_arrays, num_examples, {**metrics, "state": version})

    def answer(self) -> Message:
        """Run the client's training or evaluation, and return the reply."""
        try:
            client, steps = self.open()
        except MissingStateError as error:
            return self.close(error)
        return self.close(client.jobs.drive(steps))


def unpacked(workspace: Workspace, parcel: Parcel) -> tuple[PersonalClient, Steps[Result]]:
    """Open a packed call in another process, and return the client and its generator as :meth:`Call.open` does."""
    (number, training, config, state_names, array_names), arrays = parcel
    state = State(dict(zip(state_names, arrays, strict=False)))
    client: PersonalClient = client_class(workspace.settings.run.method)(number, workspace, state)
    run = LocalRun(client.jobs, dict(zip(array_names, arrays[len(state_names) :], strict=True)), config)
    return client, run.train() if training else run.evaluate()


def packed(client: PersonalClient, result: Result) -> Parcel:
    """Pack the result of a call, together with the client's state if it has changed."""
    arrays, num_examples, metrics = result
    replied = arrays if isinstance(arrays, dict) else {}  # an evaluation returns its loss instead
    stored = list(client.state) if client.state.changed else None
    state = [client.state[name] for name in stored or ()]
    head = stored, list(replied), num_examples, metrics
    return Parcel(head, [np.asarray(array) for array in (*state, *replied.values())])


def reply_to(message: Message, arrays: Arrays, num_examples: int, metrics: dict[str, Any]) -> Message:
    """Return a reply whose config contains strings and the client's index, because Flower averages all metrics."""
    numbers = {key: value for key, value in metrics.items() if not isinstance(value, str)}
    texts = {key: value for key, value in metrics.items() if isinstance(value, str)}
    client = record_in(message.content, "config", ConfigRecord)["client"]
    content = content_of(
        arrays=record_of({name: np.asarray(array) for name, array in arrays.items()}),
        metrics=with_entries(MetricRecord(), {**numbers, "num-examples": num_examples}),
        config=with_entries(ConfigRecord(), {**texts, "client": client}),
    )
    return Message(content, reply_to=message)
