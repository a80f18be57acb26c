"""Send queries to the nodes of a live federation, and route each query to the first client that answers."""

import asyncio
import contextlib
import itertools
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.schema import TensorSpec, output_specs
from posy.client_app.stored import ClientModel
from posy.flower import content_of, decoded, entries_of, record_in, record_of, with_entries
from posy.serve.endpoints import Endpoint
from posy.serve.router import DISTANCE, NONE_FITS, Ranking, routed_specs
from posy.serve.tensors import Array, UnavailableError, as_objects
from posy.server_app.relay import PREFIX, PRESENT, framed, size_in
from posy.settings import LaunchError, SettingsError
from posy.strategies.run_settings import DISTANCES, EMBEDDINGS, MODEL_ROUND, PROBABILITIES, SIZES

SKIPPED = TensorSpec("skipped", "BYTES", (-1,), "higher-ranked clients that did not answer, separated by commas")
UNKNOWN = -1.0
"""The distance of a query to the samples of a client that has not calibrated it."""
DISTANCE_SPECS = (
    TensorSpec(NONE_FITS.name, "BOOL", (-1,), "whether the sample is far from the data of the client that answers"),
    TensorSpec(DISTANCE.name, "FP32", (-1,), "distance to the data of this client; above 1: far; -1: unknown"),
)
EMBEDDING, ORDER = "embedding", "order"
"""Names of intermediate results between the ranking and the answers of the nodes."""
CHECK_SECONDS, RETRY_SECONDS = 5.0, 10.0
"""Seconds between two checks of the run that passes queries on, and from its end to the start of the next run."""
MARGIN_SECONDS = 2.0
"""Seconds that the service waits for an answer beyond the time that the run has."""

Floats = npt.NDArray[np.float32]


_Key = tuple[int, int, tuple[int, ...]]
"""The client and the round of its model, and the sizes of the parts of an embedding."""


class AwayError(Exception):
    """A client has not answered; the message is the reason."""


class Link:
    """The connection to the run that passes queries to the nodes.

    Parameters
    ----------
    start : callable
        Starts the run, given the path of the socket, and returns a function that returns why the run has ended, or an
        empty string. Both functions may raise :class:`LaunchError`, for example while the SuperLink restarts.
    seconds : float
        Maximum time for an answer of a node.
    """

    def __init__(self, start: Callable[[Path], Callable[[], str]], seconds: float) -> None:
        self._start, self._seconds = start, seconds
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[Floats]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._queues: dict[_Key, list[tuple[Floats, asyncio.Future[Floats]]]] = defaultdict(list)
        self._senders: dict[_Key, asyncio.Task[None]] = {}

    @property
    def is_connected(self) -> bool:
        """Whether the run is connected."""
        return self._writer is not None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen for the run, start it, and start it again whenever it ends.

        Raises
        ------
        LaunchError, SettingsError
            If the SuperLink does not accept the run.
        """
        with tempfile.TemporaryDirectory(prefix="posy-") as folder:  # only this user may enter it
            path = Path(folder) / "queries"
            server = await asyncio.start_unix_server(self._accepted, path)
            keeper = asyncio.ensure_future(self._keep(path, await asyncio.to_thread(self._start, path)))
            try:
                yield
            finally:
                server.close()
                self._disconnect("the service ends")
                tasks = [keeper, *self._readers]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def ask(self, client: int, round_number: int, embeddings: Floats, sizes: Sequence[int]) -> Floats:
        """Return a client's answers ``(n, C + 1)`` to queries with embeddings ``(n, D)`` of parts of the given sizes.

        The answers are the class probabilities and the relative distance to the client's samples, which is NaN if the
        client has not calibrated it. Queries to the same client that arrive while its node is busy share a message.

        Raises
        ------
        AwayError
            If the client has not answered, or the run is not connected.
        """
        key = client, round_number, tuple(sizes)
        answer: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._queues[key].append((embeddings, answer))
        if key not in self._senders:
            self._senders[key] = asyncio.ensure_future(self._serve(key))
        return await answer

    async def _serve(self, key: _Key) -> None:
        """Send the waiting queries to a client in one message after the other, until none waits."""
        try:
            while waiting := self._queues.pop(key, []):
                try:
                    rows = await self._exchange(*key, np.concatenate([part for part, _ in waiting]))
                    starts = np.cumsum([len(part) for part, _ in waiting])[:-1]
                    for part, (_, answer) in zip(np.split(rows, starts), waiting, strict=True):
                        if not answer.done():
                            answer.set_result(part)
                except AwayError as error:
                    _fail([answer for _, answer in waiting], error)
        finally:
            del self._senders[key]

    async def _exchange(self, client: int, round_number: int, sizes: tuple[int, ...], embeddings: Floats) -> Floats:
        """Send one message, and return the answer."""
        if self._writer is None:
            raise AwayError("the run that passes queries to the nodes is not connected")
        number = next(self._numbers)
        reply: asyncio.Future[Floats] = asyncio.get_running_loop().create_future()
        self._awaited[number] = reply
        facts = {"number": number, "client": client, MODEL_ROUND: round_number, "seconds": self._seconds}
        config = with_entries(ConfigRecord(), {**facts, SIZES: list(sizes)})
        content = content_of(arrays=record_of({EMBEDDINGS: embeddings}), config=config)
        try:
            self._writer.write(framed(content))
            await self._writer.drain()
            # The run itself watches the time. The service gives up later only if the run hangs.
            return await asyncio.wait_for(reply, self._seconds + MARGIN_SECONDS)
        except (OSError, TimeoutError) as error:
            raise AwayError("the run that passes queries to the nodes does not answer") from error
        finally:
            del self._awaited[number]

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the answers of a new run, which replaces an earlier run."""
        self._disconnect("another run has connected")
        self._writer = writer
        log(INFO, "the run that passes queries to the nodes is connected")
        task = asyncio.ensure_future(self._read(reader, writer))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read answers until the run closes the connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = size_in(await reader.readexactly(PREFIX.size))
                self._take(decoded(await reader.readexactly(size)))
        if self._writer is writer:
            self._disconnect("the run has ended")

    def _take(self, content: RecordDict) -> None:
        """Pass an answer on."""
        config = entries_of(record_in(content, "config", ConfigRecord))
        if PRESENT in config:
            log(INFO, "%s clients can answer queries", len(config[PRESENT]))
            return
        reply = self._awaited.get(int(config["number"]))
        if reply is None or reply.done():
            return
        if error := str(config["error"]):
            reply.set_exception(AwayError(error))
        else:
            arrays = {n: a.numpy() for n, a in entries_of(record_in(content, "arrays", ArrayRecord)).items()}
            probabilities = arrays[PROBABILITIES]
            distances = arrays.get(DISTANCES, np.full(len(probabilities), np.nan, np.float32))
            reply.set_result(np.column_stack([probabilities, distances]))

    def _disconnect(self, reason: str) -> None:
        """Close the connection to the run, if there is one."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        _fail(self._awaited.values(), AwayError(reason))

    async def _keep(self, path: Path, ended: Callable[[], str] | None) -> None:
        """Start the run again whenever it ends; ``ended`` returns why the first run has ended."""
        reported = ""
        while True:
            try:
                if ended is None:
                    ended = await asyncio.to_thread(self._start, path)
                while not (reason := await asyncio.to_thread(ended)):
                    reported = "" if self.is_connected else reported
                    await asyncio.sleep(CHECK_SECONDS)
                text = f"the run that passes queries to the nodes has ended: {reason}"
            except (LaunchError, SettingsError) as error:
                text = f"queries cannot reach the nodes: {error}"
            if text != reported:
                log(WARNING, "%s", text)
            ended, reported = None, text
            await asyncio.sleep(RETRY_SECONDS)


def _fail(answers: Iterable[asyncio.Future[Floats]], error: AwayError) -> None:
    """Let the futures without a result raise an error."""
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)


class FederationRouter(Endpoint):
    """Ranks the clients for each query, and asks the node of the first client; if it is away, the next client answers.

    Parameters
    ----------
    model : ClientModel
        A model with the shared layers.
    run : str
        The name of the run.
    ranking : Ranking
        Ranks the clients.
    link : Link
        The connection to the nodes.
    """

    def __init__(self, model: ClientModel, run: str, ranking: Ranking, link: Link) -> None:
        super().__init__({-1: model}, run, {})
        self._ranking, self._link = ranking, link
        self._reasons: dict[int, str] = {}
        self._sizes: tuple[int, ...] = ()

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The client that answers, its prediction, the ranking of the clients, and the clients that were skipped."""
        description = "the first client in `clients` that answers; its node predicts the class"
        return (*routed_specs(self.first, self._ranking, description), *DISTANCE_SPECS, SKIPPED)

    @property
    def card(self) -> dict[str, Any]:
        """The model card, with the calibration of the distance."""
        return super().card | {"none_fits": {"reason": "each node calibrates the distance to its own samples"}}

    def _answer(self, samples: Mapping[int, Tensor]) -> dict[str, Array]:
        x = next(iter(samples.values()))
        embeddings, logits = self.first.query_embeddings(x)
        order, outputs = self._ranking.rank(self.first, logits)
        parts = [embeddings]
        if len(x):  # not every network accepts an empty batch
            parts += self.first.client_embeddings(x)
            self._sizes = tuple(part.shape[1] for part in parts)
        return {EMBEDDING: torch.cat(parts, dim=1).float().numpy(force=True), ORDER: order, **outputs}

    async def complete(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs with the answers of the nodes, given the ranking of the clients.

        Raises
        ------
        UnavailableError
            If no client answers.
        """
        order = outputs.pop(ORDER)
        ranks, answers = await self._answers(order, outputs.pop(EMBEDDING))
        probabilities, distances = answers[:, :-1], answers[:, -1]
        names = self._ranking.names
        skipped = [b",".join(names[row[:rank]]) for row, rank in zip(order, ranks, strict=True)]
        probability_spec, class_spec = output_specs(self.first.preprocessing)
        return {
            "client": names[order[np.arange(len(order)), ranks]],
            probability_spec.name: probabilities,
            class_spec.name: self._named(probabilities.argmax(axis=1)),
            **outputs,
            NONE_FITS.name: distances > 1,
            DISTANCE.name: np.where(np.isnan(distances), UNKNOWN, distances).astype(np.float32),
            SKIPPED.name: as_objects(skipped, (len(order),)),
        }

    async def _answers(self, order: npt.NDArray[np.int64], embeddings: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return the rank of the client that answers each query ``(n,)``, and the answers as :meth:`Link.ask` does.

        ``order`` contains the ranking ``(n, K)``, as positions in the ranking's list of clients.
        """
        ranks = np.zeros(len(order), np.int64)
        answers = np.empty((len(order), len(self.class_names) + 1), np.float32)
        unanswered = np.ones(len(order), bool)
        for rank in range(order.shape[1]):
            if not unanswered.any():
                break
            if not self._link.is_connected:
                raise UnavailableError("the federation is not connected; try again later")
            firsts = order[:, rank]
            groups = {int(k): np.flatnonzero(unanswered & (firsts == k)) for k in np.unique(firsts[unanswered])}
            replies = await asyncio.gather(*(self._ask(k, embeddings[rows]) for k, rows in groups.items()))
            for rows, reply in zip(groups.values(), replies, strict=True):
                if reply is not None:
                    answers[rows], ranks[rows], unanswered[rows] = reply, rank, False
        if unanswered.any():
            raise UnavailableError("no client of the federation answers now; try again later")
        return ranks, answers

    async def _ask(self, member: int, embeddings: Floats) -> Floats | None:
        """Return the answer of a client, given its index in the ranking's list of clients, or None if it is away."""
        client = int(self._ranking.members[member])
        reason, answer = "", None
        try:
            answer = await self._link.ask(client, self.first.round, embeddings, self._sizes)
            if (classes := answer.shape[1] - 1) != len(self.class_names):
                reason, answer = f"it predicts {classes} classes, and the run has {len(self.class_names)}", None
        except AwayError as error:
            reason = str(error)
        if reason != self._reasons.get(client, ""):
            self._reasons[client] = reason
            name = self._ranking.names[member].decode()
            log(WARNING, "%s %s", name, f"does not answer: {reason}" if reason else "answers again")
        return answer
