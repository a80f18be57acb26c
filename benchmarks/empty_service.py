"""Answer every request over HTTP and gRPC with the same bytes: the limit of the libraries on which the service builds.

``python -m benchmarks.serving RUN --empty`` measures it instead of the service.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import grpc
import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from posy.serve.messages import SERVICE

ANSWER = bytes(256)
"""The body of each response."""
HEADERS = [(b"content-length", b"%d" % len(ANSWER)), (b"content-type", b"application/octet-stream")]


async def answer_http(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    """Receive a request over HTTP, and send the response."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


async def answer_grpc(_: object, context: grpc.aio.ServicerContext) -> bytes:
    """Receive a message over gRPC, and return the response."""
    await context.read()
    return ANSWER


async def main() -> None:
    """Serve until the process is ended, and print the ports as the service does."""
    remote = grpc.aio.server()
    handlers = {"ModelInfer": grpc.stream_unary_rpc_method_handler(answer_grpc)}
    remote.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    grpc_port = remote.add_insecure_port("127.0.0.1:0")
    await remote.start()
    server = uvicorn.Server(uvicorn.Config(answer_http, port=0, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(f"REST http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v2")
    print(f"gRPC 127.0.0.1:{grpc_port}", flush=True)
    await serving
    await remote.stop(0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(main())
