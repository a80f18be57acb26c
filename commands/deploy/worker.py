"""The process that carries out a node's tasks, with PyTorch, code and data loaded once.

Started by :class:`posy.commands.deploy.node.Executor` over a socket: it reads one token a line, and writes one JSON
object a line: ``ready``, then for each task ``message`` (what is answered should this process die, and for
how many seconds an answer is of use), ``pushed`` and ``done``. It ends when the socket closes.
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
from posy.flower import CLOCK_SECONDS, hasten_pulls

PULL_SECONDS = 10.0
"""The parts of a message are on this machine when its task is taken: what is missing for so long never comes."""
PRELOADED = ("torch", "torch._dynamo", "torch.optim", "safetensors.numpy")
"""What takes long to import, and does not belong to the code of a run."""


def main() -> None:
    """Serve tasks until the node closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C is for the node, which ends this process
        signal.signal(number, signal.SIG_IGN)
    address, connection = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    tokens: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, tokens), daemon=True).start()
    hasten_pulls(PULL_SECONDS)
    for name in PRELOADED:
        importlib.import_module(name)
    apps = Apps()
    told = connection.makefile("w")
    _tell(told, event="ready", process=os.getpid())
    while True:
        serve(Task(address, tokens.get()), apps, told)


def serve(task: Task, apps: Apps, told: TextIO) -> None:
    """Carry out one task; what the ClientApp raises is its reply."""
    try:
        message, context, run, fab = task.pull()
        seconds = max(0.0, message.metadata.ttl - CLOCK_SECONDS)
        _tell(told, event="message", seconds=seconds, envelope=base64.b64encode(envelope(message)).decode())
        error = ""
        try:
            reply = apps.load(run, fab)(message, context)
        except Exception as wrong:
            log(ERROR, "the ClientApp raised an exception", exc_info=wrong)
            error = f"{type(wrong).__name__}: {wrong}"
            reply = error_reply(message, error)
        task.push(reply, context)
        _tell(told, event="pushed")
        task.finish(None if error else context, error)
    except (httpx.HTTPError, RuntimeError) as wrong:  # without an answer the node itself gives one, after a minute
        log(WARNING, "a task was lost between node and worker: %r", wrong)
        with contextlib.suppress(httpx.HTTPError, RuntimeError):
            task.finish(None, repr(wrong))
    finally:
        task.close()
    _tell(told, event="done")


def _listen(connection: socket.socket, tokens: "queue.Queue[str]") -> None:
    """Read tokens; end the process, whatever it is doing, when the node has gone."""
    with contextlib.suppress(OSError), connection.makefile("r") as lines:
        for line in lines:
            tokens.put(line.strip())
    shutil.rmtree(os.environ["FLWR_HOME"], ignore_errors=True)
    os._exit(0)


def _tell(told: TextIO, **what: Any) -> None:
    with contextlib.suppress(OSError):  # the node has gone, which ends this process too
        told.write(json.dumps(what) + "\n")
        told.flush()


if __name__ == "__main__":
    main()
