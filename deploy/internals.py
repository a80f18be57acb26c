"""The internals of Flower 1.39 that warm SuperNodes use.

Stock Flower starts an interpreter for every message that a node gets, and its loops sleep for up to three seconds
between two requests. This module keeps a node warm. It has the node's main loop with other sleeps (:func:`run_node`),
and takes and answers tasks with the Runtime API (:func:`acquire_task`, :class:`Task`). The module
:mod:`posy.deploy.loop` keeps the loop running after errors.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flwr
import flwr.supercore.inflatable.inflatable_utils as pulling
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_project_dir
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from posy.deploy.foreign import check_code
from posy.deploy.install import install_whole
from posy.deploy.runtime import Calls, NodeState
from posy.deploy.secret import OPTION, pipe_of
from posy.deploy.trusted import check_signatures
from posy.extensions import BUNDLED, CUSTOM_MODULE
from posy.flower import FLOWER, look_for_parts_sooner

NODE_PATIENCE = 30.0
"""Seconds that a node waits for a part of a message that the SuperLink lacks; Flower's limit is two hours."""


def require_version() -> None:
    """End the process if the installed Flower is not 1.39."""
    if not flwr.__version__.startswith(f"{FLOWER}."):
        sys.exit(
            f"posy: warm SuperNodes use internals of Flower {FLOWER}, but {flwr.__version__} is installed: install "
            f"'flwr>={FLOWER},<1.40', or start the stock command, `flower-supernode`, which works with any version"
        )


def load_node() -> None:
    """Import the modules of a node, for the nodes that are forked from this process."""
    import flwr.supernode.cli.flower_supernode  # noqa: PLC0415 - a second to import
    import flwr.supernode.main  # noqa: F401, PLC0415

    import posy.deploy.loop  # noqa: F401, PLC0415


def run_node(
    arguments: list[str], sleep: Callable[[float], None], lost: threading.Event, secret: bytes, state: NodeState
) -> None:
    """Run ``flower-supernode`` with another ``time.sleep`` in its main loop; at the end this process ends.

    The function takes the arguments of the command, with ``--isolation process``. Only a process with ``secret`` can
    take the node's tasks. The function sets ``lost`` if a task ends without a reply, and stores Flower's state of the
    node in ``state``.
    """
    from flwr.supernode import start_client_internal  # noqa: PLC0415 - a second to import
    from flwr.supernode.cli.flower_supernode import flower_supernode  # noqa: PLC0415

    from posy.deploy.loop import make_steadfast  # noqa: PLC0415

    look_for_parts_sooner(NODE_PATIENCE)
    make_steadfast(lost, state)
    start_client_internal.time = SimpleNamespace(**{**vars(time), "sleep": sleep})  # type: ignore[attr-defined,assignment]
    sys.argv = ["flower-supernode", *arguments, OPTION, pipe_of(secret)[0]]
    flower_supernode()


def acquire_task(node: Calls) -> str | None:
    """Take the oldest task that waits at a node, as ``flower-superexec`` does, and return its token, or None."""
    answer = node.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    return answer.token if answer.HasField("task") and answer.token else None


class MessageGoneError(Exception):
    """A task without a message: the SuperLink expects no answer."""


class Task:
    """A message that a node has to answer; the calls use the token that :func:`acquire_task` returns."""

    def __init__(self, calls: Calls) -> None:
        self._client: Any = calls

    def pull(self) -> tuple[Message, Context, Run, Fab]:
        """Return the message, the node's context, the run and its code; this can be done once.

        Raises
        ------
        MessageGoneError
            If the message is missing: Flower's node keeps a task whose message is incomplete.
        RuntimeError
            If a part of the message is missing.
        """
        try:
            return pull_task_input(self._client)
        except RuntimeError as error:
            raise MessageGoneError(str(error)) from error
        except pulling.ObjectPullError as error:
            raise RuntimeError(f"the message of a task is missing: {error}") from error

    def beat(self) -> None:
        """Report that the task is alive; minutes after the last report the node answers the message with an error."""
        self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def push(self, reply: Message, context: Context) -> None:
        """Push the reply; only the run and the node of the context matter here."""
        push_message(self._client, reply, context)

    def finish(self, context: Context | None, error: str = "") -> None:
        """End the task, and store the context unless it is None."""
        push_task_output(self._client, context, SubStatus.FAILED if error else SubStatus.COMPLETED, error)


def error_reply(message: Message, reason: str, *, crashed: bool = False) -> Message:
    """Return an error reply with its reason."""
    code = ErrorCode.CLIENT_APP_CRASHED if crashed else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return Message(Error(code=code, reason=reason), reply_to=message)


def envelope(message: Message) -> bytes:
    """Return a message without its content, enough to answer it with an error."""
    return message_to_proto(remove_content_from_message(message)).SerializeToString()


def from_envelope(data: bytes) -> Message:
    """Return the message from an :func:`envelope`."""
    return message_from_proto(MessageProto.FromString(data))


def context_for(message: Message) -> Context:
    """Return an empty context for the run and node of a message."""
    run_id, node_id = message.metadata.run_id, message.metadata.dst_node_id
    return Context(run_id=run_id, node_id=node_id, node_config={}, state=RecordDict(), run_config={})


class Apps:
    """The ClientApp of the code that a message belongs to; loaded once, and again when the code changes.

    With ``entities``, the public keys of trusted entities by their ids, one of them must have signed the code.
    """

    def __init__(self, entities: Mapping[str, str] | None = None) -> None:
        self._entities = entities
        self.signers: list[str] = []
        """The ids of the trusted keys that have signed the loaded code."""
        self._hash = ""
        self._folder: Path | None = None
        self._app: Callable[[Message, Context], Message] | None = None

    def load(self, run: Run, fab: Fab, rule: str) -> Callable[[Message, Context], Message]:
        """Return the ClientApp of a run: the installed one, or the run's, which is installed if it is new.

        :func:`posy.deploy.foreign.check_code` decides by the node's rule on code. This method raises
        the errors of both functions and of :func:`check_signatures`.
        """
        if self._app is None or self._hash != fab.hash_str:
            self._app = None
            self.signers = [] if self._entities is None else check_signatures(fab, self._entities)
            if check_code(fab.content, rule, signed=bool(self.signers)):
                from posy.client_app.app import app as installed  # noqa: PLC0415 - imports PyTorch

                self._hash, self._app = fab.hash_str, installed
                return self._app
            install_whole(fab)
            folder = Path(get_project_dir(run.fab_id, run.fab_version, fab.hash_str))
            _forget(self._folder, folder)
            app: ClientApp = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)(
                run.fab_id, run.fab_version, fab.hash_str
            )
            self._folder, self._hash, self._app = folder, fab.hash_str, app
        return self._app


def _forget(old: Path | None, new: Path) -> None:
    """Remove imported packages, this one included, of which the new code brings another version."""
    for folder in (old, old / BUNDLED) if old else ():
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
    paths = [path for folder in (new, new / BUNDLED) if folder.is_dir() for path in folder.iterdir()]
    names = {path.stem for path in paths if path.is_dir() or path.suffix == ".py"}
    names |= {name for name in sys.modules if name.startswith(CUSTOM_MODULE)}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
