"""The process that carries out a node's tasks, with PyTorch, code and data loaded once.

:class:`posy.commands.deploy.node.Executor` starts it with a socket. From this it reads tokens, one a line, and writes
JSON objects, one a line: ``ready``, then for each task ``message`` (its envelope, with which the node answers if this
process dies, and the seconds for which an answer is of use), ``pushed`` and ``done``. It ends when the socket closes.
"""

import base64
import contextlib
import importlib
import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
from logging import ERROR, WARNING
from typing import Any, TextIO

import httpx
from flwr.common.logger import log

from posy.commands.deploy.internals import Apps, Task, envelope, error_reply
from posy.flower import CLOCK_SECONDS, look_for_parts_sooner

WORKER_PATIENCE = 10.0
"""Seconds to wait for a missing part of a message: all parts are on this machine when the task is taken."""
PRELOADED = ("torch", "torch._dynamo", "torch.optim", "safetensors.numpy")
"""Modules that take long to import and do not belong to the code of a run."""


def main() -> None:
    """Serve tasks until the node closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the node gets a Ctrl-C too, and ends this process
        signal.signal(number, signal.SIG_IGN)
    address, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    tokens: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, tokens), daemon=True).start()
    look_for_parts_sooner(WORKER_PATIENCE)
    for name in PRELOADED:
        importlib.import_module(name)
    apps = Apps()
    node = connection.makefile("w")
    _report(node, event="ready", process=os.getpid())
    while True:
        serve(Task(address, tokens.get()), apps, node)


def serve(task: Task, apps: Apps, node: TextIO) -> None:
    """Carry out one task; what the ClientApp raises is its reply."""
    try:
        message, context, run, fab = task.pull()
        seconds = max(0.0, message.metadata.ttl - CLOCK_SECONDS)
        _report(node, event="message", seconds=seconds, envelope=base64.b64encode(envelope(message)).decode())
        error = ""
        try:
            reply = apps.load(run, fab)(message, context)
        except Exception as wrong:
            log(ERROR, "the ClientApp raised an exception", exc_info=wrong)
            error = f"{type(wrong).__name__}: {wrong}"
            reply = error_reply(message, error)
        task.push(reply, context)
        _report(node, event="pushed")
        task.finish(None if error else context, error)
    except (httpx.HTTPError, RuntimeError) as wrong:  # the node answers by itself after a minute
        log(WARNING, "a task was lost between node and worker: %r", wrong)
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            task.finish(None, repr(wrong))
    finally:
        task.close()
    _report(node, event="done")


def _listen(connection: socket.socket, tokens: "queue.Queue[str]") -> None:
    """Read tokens; end the process at once when the node has gone."""
    with contextlib.suppress(OSError), connection.makefile("r") as lines:
        for line in lines:
            tokens.put(line.strip())
    shutil.rmtree(os.environ["FLWR_HOME"], ignore_errors=True)
    os._exit(0)


def _report(node: TextIO, **event: Any) -> None:
    with contextlib.suppress(OSError):  # the node has gone, which ends this process too
        node.write(json.dumps(event) + "\n")
        node.flush()


if __name__ == "__main__":
    main()
