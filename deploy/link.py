"""The SuperLink's process: ``python -m posy.deploy.link`` takes the arguments of ``flower-superlink``.

The process runs Flower's SuperLink. Posy serves the calls about messages itself (:mod:`posy.deploy.front`), keeps
messages in memory (:mod:`posy.deploy.message_queue`) and makes writers to the database take turns
(:mod:`posy.deploy.database`). It patches the functions of gRPC and uvicorn that start a server, and does not depend on
Flower's classes.
"""

import logging
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from logging import WARNING
from typing import Any

import flwr
import grpc
import sqlalchemy
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from flwr.common.logger import LOGGER_NAME, log

from posy.deploy.database import TURNS, TryAgainError, can_be_retried
from posy.deploy.flower_internals import FLEET
from posy.deploy.front import AGAIN, AppCalls, AskAgain, NodeCalls, Quiet, Runs, first_line, start_sweeper
from posy.deploy.message_queue import MessageQueue
from posy.flower import FLOWER, add_times_to_log

RETRIED = (TryAgainError, sqlalchemy.exc.OperationalError, sqlalchemy.exc.TimeoutError, sqlite3.OperationalError)


def main() -> None:
    """Run the SuperLink."""
    add_times_to_log()
    if flwr.__version__.startswith(f"{FLOWER}."):
        apply_patches()
    else:
        log(
            WARNING,
            "posy: the version of Flower is %s instead of %s, so the SuperLink runs without Posy's changes and is "
            "slower",
            flwr.__version__,
            FLOWER,
        )
    [command] = entry_points(group="console_scripts", name="flower-superlink")
    sys.argv[0] = command.name
    command.load()()


def apply_patches() -> None:
    """Patch gRPC and uvicorn so that Posy intercepts calls to the servers that this process starts."""
    TURNS.install()
    runs = Runs()
    queue = MessageQueue(runs.is_active)
    start_grpc, run_http = grpc.server, uvicorn.run

    def with_interceptors(*args: Any, interceptors: Sequence[Any] | None = None, **named: Any) -> grpc.Server:
        calls = [AskAgain(), *(interceptors or []), NodeCalls(queue, runs)]
        server = start_grpc(*args, interceptors=calls, **named)
        add_handlers = server.add_registered_method_handlers

        def add_and_note(service: str, handlers: Mapping[str, Any]) -> None:
            if service == FLEET.full_name:
                runs.ask = handlers["GetRun"].unary_unary
            add_handlers(service, handlers)

        vars(server)["add_registered_method_handlers"] = add_and_note
        return server

    def with_calls(app: FastAPI, **named: Any) -> None:
        for kind in RETRIED:
            app.add_exception_handler(kind, ask_again)
        start_sweeper(queue)
        for name in ("uvicorn.access", LOGGER_NAME):
            logging.getLogger(name).addFilter(Quiet())
        run_http(AppCalls(app, queue, runs, TURNS), **named)

    vars(grpc)["server"], vars(uvicorn)["run"] = with_interceptors, with_calls


def ask_again(request: Request, error: Exception) -> JSONResponse:
    """Answer a ServerApp or any other HTTP caller with status 503, so that Flower retries the call."""
    if not can_be_retried(error):
        raise error
    log(WARNING, "posy: the caller must retry %s: %s", request.url.path, first_line(error))
    return JSONResponse({"detail": AGAIN}, status_code=503)


if __name__ == "__main__":
    main()
