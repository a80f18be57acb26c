"""Queries of a service reach the nodes, and only usable answers reach the service."""

import json
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from nodes import LENIENT, NodeGrid
from sklearn.datasets import load_digits

from posy.client_app import answers
from posy.client_app.stored import ClientModel
from posy.data.policy import read_policy
from posy.flower import content_of, decoded, entries_of, record_in, record_of, with_entries
from posy.folding import unfolded
from posy.serve.run_models import load_endpoints
from posy.server_app.app import pass_queries, run
from posy.server_app.record import Record
from posy.server_app.relay import PRESENT, framed, read_frame
from posy.server_app.run_status import RunStatus
from posy.settings import SettingsError
from posy.storage import load_arrays, read_metadata
from posy.strategies.run_settings import DISTANCES, EMBEDDINGS, MODEL_ROUND, PROBABILITIES, SIZES

SITES, ROUNDS, LIMIT = 3, 2, 10
SIZES_OF_PARTS = (64, 64)
"""Sizes of the input of the class classifier and of the input of the client classifier."""
SETTINGS = {"method": "feddrm", "dataset": "sites", "num-clients": SITES, "num-server-rounds": ROUNDS, "model": "mlp",
            "device": "cpu", "run-name": "routed", "validation-fraction": 0.2}  # fmt: skip


class Edited(NodeGrid):
    """A grid that replaces the probabilities in answers, if a test sets ``replacement``."""

    replacement: np.ndarray | None = None

    def answer(self, message: Message) -> Message:
        reply = unfolded(super().answer(message))
        if self.replacement is not None and not reply.has_error() and "arrays" in reply.content:
            reply.content["arrays"] = record_of({PROBABILITIES: self.replacement})
        return reply


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Edited]:
    """Return the folder of a run on three sites, and its grid. Each site allows ten answers, but the last site none."""
    folder = tmp_path_factory.mktemp("relay")
    x, y = load_digits(return_X_y=True)
    configs = []
    for site in range(SITES):
        np.savez(folder / f"{site}.npz", x_train=x[site::9].astype(np.float32), y_train=y[site::9])
        policy, most = folder / f"policy-{site}.yaml", LIMIT if site < SITES - 1 else 0
        policy.write_text(f"{LENIENT.read_text()}max-answers-per-day: {most}\n")
        config = {"data": str(folder / f"{site}.npz"), "name": f"site-{site}", "policy": str(policy)}
        configs.append({**config, "state-dir": str(folder / f"state-{site}")})
    grid = Edited(*configs)
    run(grid, {**SETTINGS, "output-dir": str(folder / "runs")})
    return folder, grid


class Service:
    """The service's end of the connection."""

    def __init__(self, folder: Path, grid: NodeGrid, socket_path: Path) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(socket_path))
        listening.listen(1)
        settings = {"resume": "routed", "output-dir": str(folder / "runs"), "queries-from": str(socket_path)}
        self.thread = threading.Thread(target=pass_queries, args=(grid, settings, RunStatus()))
        self.thread.start()
        self.connection, _ = listening.accept()
        self.connection.settimeout(60)
        listening.close()
        self.numbers = 0

    def read(self) -> dict[str, Any]:
        """Return the entries of the next frame."""
        frame = read_frame(self.connection)
        assert frame is not None
        content = decoded(frame)
        arrays = entries_of(record_in(content, "arrays", ArrayRecord)) if "arrays" in content else {}
        config = dict(entries_of(record_in(content, "config", ConfigRecord)))
        return config | {name: array.numpy() for name, array in arrays.items()}

    def ask(self, client: int, embeddings: np.ndarray, number: int = ROUNDS, seconds: float = 20.0) -> dict[str, Any]:
        """Send a query, and return the answer."""
        self.numbers += 1
        facts = {"number": self.numbers, "client": client, MODEL_ROUND: number, "seconds": seconds}
        config = with_entries(ConfigRecord(), {**facts, SIZES: list(SIZES_OF_PARTS)})
        self.connection.sendall(framed(content_of(arrays=record_of({EMBEDDINGS: embeddings}), config=config)))
        while PRESENT in (answer := self.read()):
            pass
        assert answer["number"] == self.numbers
        return answer


@pytest.fixture
def service(trained: tuple[Path, Edited]) -> Iterator[Service]:
    folder, grid = trained
    for state in folder.glob("state-*/policy-answers.json"):
        state.unlink()
    for node, context in list(grid.nodes.items()):
        grid.connect(node, context.node_config)  # a new run, for which Flower has a new context
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has at most 107 characters
        service = Service(folder, grid, Path(short) / "s")
        assert service.read() == {PRESENT: list(range(SITES))}
        yield service
        service.connection.close()
        service.thread.join(60)
        assert not service.thread.is_alive()
    grid.replacement = None


def model_of(folder: Path, site: int) -> ClientModel:
    (path,) = (folder / f"state-{site}").rglob(f"served-{site}.safetensors")
    return ClientModel.load(path)


def embeddings_of(folder: Path, count: int) -> np.ndarray:
    with torch.no_grad():
        model = model_of(folder, 0)
        x = model.prepare(load_digits().data[:count])
        return torch.cat([model.query_embeddings(x)[0], *model.client_embeddings(x)], dim=1).numpy()


def test_an_answer_equals_that_of_the_stored_model(trained: tuple[Path, Edited], service: Service) -> None:
    folder, _ = trained
    for site in (0, 1):
        answer = service.ask(site, embeddings_of(folder, 4))
        with torch.no_grad():
            model = model_of(folder, site)
            expected = model(model.prepare(load_digits().data[:4])).numpy()
        np.testing.assert_allclose(answer[PROBABILITIES], expected, atol=1e-6)
        assert answer["error"] == ""
        (path,) = (folder / f"state-{site}").rglob(f"routing-{site}.safetensors")
        reference = load_arrays(path)
        whitened = embeddings_of(folder, 4)[:, SIZES_OF_PARTS[0] :] @ reference["whitening-0"]
        lengths = np.linalg.norm(whitened[:, None] - reference["means-0"], axis=2).min(axis=1)
        np.testing.assert_allclose(answer[DISTANCES], lengths / reference["threshold"], rtol=1e-4)


def test_distances_flag_queries_that_do_not_fit(trained: tuple[Path, Edited], service: Service) -> None:
    folder, _ = trained
    foreign = np.full((5, sum(SIZES_OF_PARTS)), -1 / 8, np.float32)  # the network's embeddings are not negative
    assert (service.ask(0, foreign)[DISTANCES] > 1).all()
    (path,) = (folder / "state-0").rglob("routing-0.safetensors")
    facts = json.loads(read_metadata(path)["facts"])
    assert facts["alpha"] == 0.05 and facts["false-alarm-rate"] < 0.25
    path.rename(path.with_suffix(".away"))
    assert DISTANCES not in service.ask(0, foreign)  # the node has not calibrated the distance
    path.with_suffix(".away").rename(path)


def test_a_site_limits_its_answers(trained: tuple[Path, Edited], service: Service) -> None:
    folder, _ = trained
    x = embeddings_of(folder, LIMIT - 1)
    assert not service.ask(0, x)["error"]
    answer = service.ask(0, x[:2])
    assert "rule max-answers-per-day: the site answers 10 queries per day" in answer["error"]
    assert PROBABILITIES not in answer
    assert not service.ask(0, x[:1])["error"]  # the refused queries do not count
    assert "rule max-answers-per-day: the site answers no queries" in service.ask(2, x[:1])["error"]


def test_what_a_node_cannot_answer(trained: tuple[Path, Edited], service: Service) -> None:
    folder, grid = trained
    x = embeddings_of(folder, 2)
    assert "this node's model is of round 2, and the service needs round 1" in service.ask(0, x, 1)["error"]
    assert "embeddings float64" in service.ask(0, x.astype(np.float64))["error"]
    assert "finite" in service.ask(0, np.full_like(x, np.nan))["error"]
    assert "which do not have the sizes [64, 64]" in service.ask(0, x[:, :3])["error"]
    assert service.ask(7, x)["error"] == "its node is not connected"
    config = grid.nodes[1].node_config
    grid.leave(1)
    assert service.ask(0, x)["error"]
    grid.connect(1, config)


@pytest.mark.parametrize(
    ("replacement", "fault"),
    [
        (np.full((2, 10), 0.2, np.float32), "does not contain probabilities"),
        (np.full((2, 10), np.nan, np.float32), "does not contain probabilities"),
        (np.array([[2, -1], [1, 0]], np.float32), "does not contain probabilities"),
        (np.full((3, 10), 0.1, np.float32), "shape (3, 10)"),
        (np.full((2, 10), 0.1), "type float64"),
    ],
)
def test_a_broken_answer_is_refused(
    trained: tuple[Path, Edited], service: Service, replacement: np.ndarray, fault: str
) -> None:
    folder, grid = trained
    grid.replacement = replacement
    answer = service.ask(0, embeddings_of(folder, 2))
    assert fault in answer["error"] and PROBABILITIES not in answer


def test_a_node_does_not_learn_the_path_of_the_socket(trained: tuple[Path, Edited], service: Service) -> None:
    _, grid = trained
    config = record_in(unfolded(grid.kept[-1]).content, "config", ConfigRecord)
    assert json.loads(str(config["settings"]))["queries-from"] == ""


def test_the_audit_log_names_answers(trained: tuple[Path, Edited], service: Service) -> None:
    folder, _ = trained
    service.ask(1, embeddings_of(folder, 1))
    event = json.loads((folder / "state-1/audit.jsonl").read_text().splitlines()[-1])
    assert (event["type"], event["client"], list(event["received"])) == ("query:answer", 1, ["arrays", "config"])


def test_other_engines_refuse_queries(trained: tuple[Path, Edited]) -> None:
    folder, grid = trained
    with pytest.raises(SettingsError, match="queries-from = '/x': only nodes answer queries"):
        run(None, {"resume": "routed", "output-dir": str(folder / "runs"), "queries-from": "/x"})
    with pytest.raises(SettingsError, match="queries-from = '/x': no service accepts the connection"):
        settings = {"resume": "routed", "output-dir": str(folder / "runs"), "queries-from": "/x"}
        pass_queries(grid, settings, RunStatus())
    with pytest.raises(SettingsError, match="needs resume"):
        pass_queries(grid, {"queries-from": "/x"}, RunStatus())


def test_the_service_asks_for_the_superlink(trained: tuple[Path, Edited]) -> None:
    folder, _ = trained
    with pytest.raises(SettingsError, match="add --superlink HOST:PORT so that"):
        load_endpoints(Record(folder / "runs/routed"))


def test_a_node_without_a_folder_has_no_answers() -> None:
    content: Iterable[Any] = content_of(
        arrays=record_of({EMBEDDINGS: np.zeros((1, 2), np.float32)}),
        config=ConfigRecord({"client": 0, "run": "routed", MODEL_ROUND: 1, SIZES: [2]}),
    )
    grid = NodeGrid({"partition-id": 0, "num-partitions": 1})
    message = Message(content, 1, "query")
    with pytest.raises(SettingsError, match="this node stores no models; set state-dir"):
        answers.answer_queries(message, grid.nodes[1], None)
    assert isinstance(message.content, RecordDict) and not read_policy(LENIENT).max_answers_per_day
