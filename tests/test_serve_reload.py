"""Newer models while the service runs: under load, damaged, half-written and removed."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_serve import Running, images, infer, record  # noqa: F401 - a fixture
from tritonclient.utils import InferenceServerException

from benchmarks.serving_soak import Load, reloads_of, replace_models
from posy.serve.run_models import load_endpoints
from posy.serve.server import Options
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.storage import lock, read_arrays, write_arrays

LOOK = 0.1
"""Seconds between two looks of the service at the files."""


@pytest.fixture
def folder(record: Record, tmp_path: Path) -> Path:  # noqa: F811
    """Return a copy of the run, which a test may change."""
    shutil.copytree(record.path, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def locked(folder: Path) -> Iterator[Path]:
    """Lock the copy of the run, as a run in progress does."""
    descriptor = lock(folder)
    yield folder
    os.close(descriptor)


@pytest.fixture
def service(folder: Path) -> Iterator[Running]:
    """Serve the copy of the run."""
    running = Running(folder, Options(http_port=0, grpc_port=0, reload_seconds=LOOK))
    yield running
    running.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; fail after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(LOOK)


def reloads(service: Running) -> dict[str, int]:
    """Return the number of reloads, keyed by their result."""
    return reloads_of(service.server.http_port)


def version(service: Running, model: str) -> str:
    """Return the version that answers a request."""
    return str(infer(service, "grpc", model, images(1)).get_response().model_version)


def write_round(folder: Path, client: int, server_round: int) -> None:
    """Replace the models of one client."""
    for name in ("client", "served"):
        path = folder / "models" / f"{name}-{client}.safetensors"
        arrays, metadata = read_arrays(path)
        write_arrays(path, arrays, metadata | {"round": str(server_round)})


def test_a_reload_under_load_fails_no_request(service: Running, locked: Path) -> None:
    load = Load(service.server.http_port, service.server.grpc_port, ["client-0", "client-3", "router"])
    with load.running(4):
        for server_round in (3, 4, 5):
            replace_models(locked, server_round)
            wait_for(lambda expected=server_round: reloads(service).get("ok", 0) == expected - 2)  # type: ignore[misc]
            time.sleep(0.3)
    assert set(load.results) == {"ok"} and load.results["ok"] > 20
    assert load.versions == {2, 3, 4, 5}


def test_the_service_keeps_its_models_if_a_new_file_is_damaged(
    service: Running, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "models" / "served-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    wait_for(lambda: reloads(service) == {"failed": 1})
    time.sleep(10 * LOOK)
    assert reloads(service) == {"failed": 1}  # the service tries again only after a change
    assert caplog.text.count("so the service keeps the current models") == 1
    assert version(service, "client-1") == version(service, "router") == "2"
    with pytest.raises(InferenceServerException, match="cannot be loaded now") as raised:
        service.grpc.load_model("client-1")
    assert str(folder) not in str(raised.value)
    assert version(service, "client-1") == "2"
    content[-5] ^= 1
    path.write_bytes(content)
    wait_for(lambda: reloads(service) == {"failed": 1, "ok": 1})


def test_half_of_a_round_is_not_loaded(service: Running, locked: Path) -> None:
    write_round(locked, 0, 3)
    wait_for(lambda: reloads(service) == {"failed": 1})
    assert {version(service, model) for model in ("client-0", "client-1", "router")} == {"2"}
    replace_models(locked, 3)
    wait_for(lambda: reloads(service).get("ok") == 1)
    assert {version(service, model) for model in ("client-0", "client-1", "router")} == {"3"}


def test_a_removed_run_stays_in_service(service: Running, folder: Path) -> None:
    moved = folder.rename(folder.with_name("moved"))
    wait_for(lambda: reloads(service) == {"failed": 1})
    assert version(service, "router") == "2"
    replace_models(moved, 3)
    moved.rename(folder)
    wait_for(lambda: reloads(service) == {"failed": 1, "ok": 1})
    assert version(service, "router") == "3"


def test_a_combination_contains_one_round(folder: Path) -> None:
    replace_models(folder, 3)
    write_round(folder, 1, 2)  # client 1 missed round 3
    endpoints = load_endpoints(Record(folder))
    assert list(endpoints["router"].models) == [0, 2, 3] and endpoints["router"].version == "3"
    assert endpoints["client-1"].version == "2"
    write_round(folder, 2, 4)  # the run has ended in the middle of round 4
    endpoints = load_endpoints(Record(folder))
    assert list(endpoints["router"].models) == [0, 3] and endpoints["client-2"].version == "4"


def test_a_service_does_not_start_with_half_of_a_round(locked: Path) -> None:
    write_round(locked, 2, 3)
    with pytest.raises(SettingsError, match="is writing the models of round 3"):
        load_endpoints(Record(locked))


def test_the_models_of_a_node_have_no_combination(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "models", tmp_path / "node" / "run")
    assert list(load_endpoints(Record.find(tmp_path / "node"))) == [f"client-{client}" for client in range(4)]
