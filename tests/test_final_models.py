"""Sites that are absent at the end of a run learn that their models are not final, and receive the final models."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MessageType
from nodes import NodeGrid
from sklearn.datasets import load_digits

from posy.flower import record_in
from posy.server_app.app import run
from posy.server_app.final_models import Delivery
from posy.server_app.progress import results_table
from posy.settings import RunError, SettingsError
from posy.storage import load_arrays, read_metadata

Config = dict[str, Any]
ROUNDS, ABSENT = 3, 2
"""The number of rounds, and the site that is absent in the last one."""


class LeavingGrid(NodeGrid):
    """A grid whose last node leaves before the last round. It may return before the evaluation of this round."""

    returns = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        wave = list(messages)
        for kind in {m.metadata.message_type for m in wave if self._round(m) == ROUNDS}:
            node = ABSENT + 1
            if kind == MessageType.TRAIN:
                self.config = self.nodes[node].node_config
                self.leave(node)
            elif kind == MessageType.EVALUATE and self.returns:
                self.connect(node, self.config)
        return super().push_messages(wave)

    def _round(self, message: Message) -> int:
        config = record_in(message.content, "config", ConfigRecord)
        return int(config.get("server-round", 0)) if "client" in config else 0


@pytest.fixture
def sites(tmp_path: Path) -> list[Config]:
    """Return the node configs of five sites with rows of digits."""
    x, y = load_digits(return_X_y=True)
    for site in range(5):
        np.savez(tmp_path / f"{site}.npz", x_train=x[site::9].astype(np.float32), y_train=y[site::9])
    return [
        {"data": str(tmp_path / f"{site}.npz"), "name": f"site-{site}", "state-dir": str(tmp_path / f"state-{site}")}
        for site in range(5)
    ]


def config_of(tmp_path: Path, method: str, **more: Any) -> Config:
    base = {
        "dataset": "sites",
        "num-clients": 5,
        "num-server-rounds": ROUNDS,
        "method": method,
        "model": "mlp",
        "device": "cpu",
        "stack": "loop",
        "local-epochs": 2,
        "output-dir": str(tmp_path / "runs"),
        "run-name": "one",
        "join-timeout": 1.0,
    }
    return base | {key.replace("_", "-"): value for key, value in more.items()}


def resumed(config: Config) -> Config:
    return {"resume": "one", "output-dir": config["output-dir"], "join-timeout": 0.3}


def models_of(tmp_path: Path, site: int, run_name: str = "one") -> dict[str, Path]:
    return {path.name: path for path in tmp_path.glob(f"state-{site}/{run_name}-*/models/*.safetensors")}


@pytest.mark.parametrize("method", ["fedrep", "feddrm", "ppfe"])
def test_an_absent_site_receives_the_model_that_it_would_have_evaluated(
    method: str, sites: list[Config], tmp_path: Path
) -> None:
    more: Config = {"ppfe-stages": 3} if method == "ppfe" else {}
    config = {**config_of(tmp_path, method), **more}
    done = run(LeavingGrid(*sites), config)
    summary = json.loads((done.directory.path / "summary.json").read_text())
    assert (summary["status"], summary["without-final-model"]) == ("completed", [ABSENT])
    assert "without final model  site-2; " in results_table(summary, done.directory.path)
    # Without --superlink, the command would start a simulation, which has no nodes with data.
    assert "resume the run on its SuperLink to deliver it" in results_table(summary, done.directory.path)
    assert "posy run resume" not in results_table(summary, done.directory.path)
    finals = {site: read_metadata(models_of(tmp_path, site)[f"client-{site}.safetensors"]) for site in range(5)}
    assert {site: metadata["final"] for site, metadata in finals.items() if site != ABSENT} == dict.fromkeys(
        [0, 1, 3, 4], "True"
    )
    assert finals[0]["round"] == str(ROUNDS)
    files = {file: file.read_bytes() for file in done.directory.path.rglob("*") if file.is_file()}
    states = {file: file.read_bytes() for file in tmp_path.glob("state-*/one-*/client-*/*")}

    only = NodeGrid()
    only.connect(7, sites[ABSENT])  # a new node id; the other sites need not be present
    delivery = run(only, resumed(config))
    assert isinstance(delivery, Delivery)
    changed = {file.name for file, content in files.items() if file.read_bytes() != content}
    assert changed == {"summary.json"}
    remaining = {file: content for file, content in states.items() if file.exists()}  # older versions are not needed
    assert remaining and {file: file.read_bytes() for file in remaining} == remaining
    after = json.loads((done.directory.path / "summary.json").read_text())
    assert after.pop("without-final-model") == [] and summary.pop("without-final-model")
    assert after == summary

    returning = LeavingGrid(*sites)
    returning.returns = True
    reference = run(returning, {**config, "run-name": "reference"})
    assert "without-final-model" not in json.loads((reference.directory.path / "summary.json").read_text())
    actual, expected = models_of(tmp_path, ABSENT), models_of(tmp_path, ABSENT, "reference")
    assert actual.keys() == expected.keys() and f"client-{ABSENT}.safetensors" in actual
    for name, path in expected.items():
        arrays = load_arrays(path)
        assert arrays.keys() == load_arrays(actual[name]).keys()
        for key, array in load_arrays(actual[name]).items():
            np.testing.assert_array_equal(array, arrays[key])
        metadata = read_metadata(actual[name])
        assert (metadata["final"], metadata["scores"]) == ("True", read_metadata(path)["scores"])
        assert 0 <= json.loads(metadata["scores"])["accuracy"] <= 1

    with pytest.raises(SettingsError, match="3 rounds are complete; to continue"):
        run(NodeGrid(*sites), resumed(config))
    if method != "ppfe":  # its number of rounds is fixed
        longer = run(NodeGrid(*sites), {**resumed(config), "num-server-rounds": ROUNDS + 1})
        summary = json.loads((longer.directory.path / "summary.json").read_text())
        assert (summary["rounds"], "without-final-model" in summary) == (ROUNDS + 1, False)
        assert list(summary["dropped"]) == ["its node is gone"]  # every site still has the state that it needs


def test_a_delivery_waits_only_for_the_sites_without_a_model(sites: list[Config], tmp_path: Path) -> None:
    config = config_of(tmp_path, "fedavg")
    run(LeavingGrid(*sites), config)
    with pytest.raises(SettingsError, match=r"only at site-2 \(client 2\).* after 0\.3 s none .*; start"):
        run(NodeGrid(*sites[:2]), resumed(config))
    moved = {**sites[ABSENT], "data": sites[1]["data"]}
    with pytest.raises(SettingsError, match=r"none of these clients is present; excluded: .*data has changed"):
        run(NodeGrid(moved), resumed(config))
    broken = {**sites[ABSENT], "models": "/proc/none"}
    with pytest.raises(RunError, match="no final model was delivered: "):
        run(NodeGrid(sites[0], broken), resumed(config))
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert summary["without-final-model"] == [ABSENT]


@pytest.mark.parametrize("secure", [False, True])
def test_a_delivered_client_sends_nothing_about_its_data(secure: bool, sites: list[Config], tmp_path: Path) -> None:
    config = config_of(tmp_path, "fedavg", secure_aggregation=secure, classes=",".join(map(str, range(10))))
    run(LeavingGrid(*sites), config)
    replies: list[Message] = []

    class Recording(NodeGrid):
        def answer(self, message: Message) -> Message:
            replies.append(super().answer(message))
            return replies[-1]

    run(Recording(sites[ABSENT]), resumed(config))
    (reply,) = [reply for reply in replies if reply.metadata.message_type == MessageType.EVALUATE]
    assert dict(reply.content["metrics"]) == {"num-examples": 0}
    assert {*reply.content["config"]} <= {"client", "state"}
    assert all(not record for record in reply.content.array_records.values())
    metadata = read_metadata(models_of(tmp_path, ABSENT)[f"client-{ABSENT}.safetensors"])
    assert (metadata["final"], metadata["round"]) == ("True", str(ROUNDS))
    assert json.loads(metadata["scores"])["accuracy"] > 0.3
