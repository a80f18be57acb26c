"""The service routes queries to the nodes of a live federation, in real processes."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from nodes import LENIENT
from sklearn.datasets import load_digits

from benchmarks.local_federation import MOST_SECONDS, Deployment
from posy.client_app.stored import ClientModel
from posy.server_app.record import Record

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("serve-federation")]

SITES = 4
NAMES = [f"site-{i}" for i in range(SITES)]
X, Y = load_digits(return_X_y=True)
HELD_OUT = np.arange(len(X)) % 5 == SITES


def seen_by(site: int, x: np.ndarray) -> np.ndarray:
    """Return images as the scanner of a site shows them."""
    noise = np.random.default_rng(site).normal(0, 2 * site, x.shape)
    return (x * (1 + 0.4 * site) + noise).astype(np.float32)


QUERIES = np.concatenate([seen_by(site, X[HELD_OUT]) for site in range(SITES)]).astype(np.float64)


class Federation(Deployment):
    """A federation that has trained FedDRM, and a service whose queries its nodes answer."""

    def begin(self, number: int) -> None:
        """Start the node of a site; the policy of the last site allows no answers."""
        name, policy = NAMES[number], self.folder / f"policy-{number}.yaml"
        answers = 0 if number == SITES - 1 else 100_000
        policy.write_text(f"{LENIENT.read_text()}max-answers-per-day: {answers}\n")
        words = [f"data={self.folder / f'{number}.npz'}", f"policy={policy}"]
        self.node(name, *words, f"state-dir={self.folder / f'state-{number}'}")
        self.until(lambda: self.ready(name), name, MOST_SECONDS)

    def serve(self) -> None:
        """Start the service, and wait until all nodes have joined it."""
        words = ["--http-port", "0", "--grpc-port", "0", "--answer-seconds", "5", *self.where]
        self.start("service", "serve", "runs/routed", *words)
        self.until(lambda: "REST" in self.log("service"), "service")
        self.url = next(line.split()[1] for line in self.log("service").splitlines() if line.startswith("REST"))

    def infer(self, x: np.ndarray) -> dict[str, list[Any]]:
        """Return the answers of the router, keyed by output."""
        tensor = {"name": "features", "datatype": "FP64", "shape": list(x.shape), "data": x.ravel().tolist()}
        request = urllib.request.Request(f"{self.url}/models/router/infer", json.dumps({"inputs": [tensor]}).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            outputs = json.load(answer)["outputs"]
        return {output["name"]: np.array(output["data"]).reshape(output["shape"]).tolist() for output in outputs}

    def present(self) -> int:
        """Return the number of clients that can answer, as the service last reported it."""
        lines = [line.split() for line in self.log("service").splitlines() if "clients can answer" in line]
        return int(lines[-1][-5]) if lines else 0

    def models(self) -> list[ClientModel]:
        """Return the models that the nodes have stored."""
        folders = [self.folder / f"state-{number}" for number in range(SITES)]
        paths = [path for folder in folders for path in folder.rglob("served-*.safetensors")]
        return sorted((ClientModel.load(path) for path in paths), key=lambda model: model.client)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("routed"), NAMES)
    try:
        for number in range(SITES):
            rows = np.flatnonzero(np.arange(len(X)) % 5 == number)
            x = seen_by(number, X[rows])
            np.savez(federation.folder / f"{number}.npz", x_train=x, y_train=Y[rows])
            federation.begin(number)
        words = ["method=feddrm", "dataset=sites", f"num-clients={SITES}", "model=mlp", "device=cpu", "lr=0.05"]
        federation.submit("routed", *words, "num-server-rounds=4", "validation-fraction=0.2")
        assert federation.ended("run-routed") == 0, federation.log("run-routed")
        federation.serve()
        federation.until(lambda: federation.present() == SITES, "service")
        yield federation
    finally:
        federation.stop()


def expected(models: Sequence[ClientModel], n: np.ndarray, present: Sequence[int]) -> dict[str, list[Any]]:
    """Return the answers for the queries, computed with the complete models that the nodes have stored."""
    with torch.no_grad():
        x = models[0].prepare(QUERIES)
        scores = models[0].client_logits(x).numpy() - np.log(n / n.sum())
        ranked = np.argsort(-scores, axis=1, kind="stable")
        probabilities = np.stack([model(x).numpy() for model in models])
    first = [next(rank for rank, client in enumerate(row) if client in present) for row in ranked.tolist()]
    chosen = ranked[np.arange(len(x)), first]
    classes = probabilities[chosen, np.arange(len(x))].argmax(axis=1)
    return {
        "client": [NAMES[client] for client in chosen],
        "class": [models[0].class_names[label] for label in classes],
        "clients": [[NAMES[client] for client in row] for row in ranked],
        "skipped": [",".join(NAMES[c] for c in row[:rank]) for row, rank in zip(ranked, first, strict=True)],
        "probabilities": probabilities[chosen, np.arange(len(x))].tolist(),
    }


def check(federation: Federation, present: Sequence[int]) -> None:
    """Compare the answers of the service with an independent computation for the clients that are present."""
    models = federation.models()
    assert [model.site for model in models] == NAMES
    rows = Record(federation.results("routed")).clients
    n = rows[rows["n_train"].notna()].groupby("partition")["n_train"].last().to_numpy()
    answers, computed = federation.infer(QUERIES), expected(models, n, present)
    for key in ("client", "class", "clients", "skipped"):
        assert answers[key] == computed[key], key
    np.testing.assert_allclose(answers["probabilities"], computed["probabilities"], atol=1e-5)
    assert all(distance > 0 for distance in answers["distance"])
    assert answers["none_fits"] == [distance > 1 for distance in answers["distance"]]
    assert 0 < sum(answers["none_fits"]) < len(QUERIES) / 2
    assert set(answers["client"]) == {NAMES[client] for client in present}


@pytest.mark.core
def test_the_first_client_that_may_answer_answers(federation: Federation) -> None:
    check(federation, [0, 1, 2])
    assert "site-3 does not answer: " in federation.log("service")
    assert "rule max-answers-per-day: the site answers no queries" in federation.log("service")


@pytest.mark.core
def test_the_next_client_answers_while_a_node_is_away(federation: Federation) -> None:
    federation.processes[NAMES[1]].terminate()
    assert federation.processes[NAMES[1]].wait(MOST_SECONDS) == 0
    federation.until(lambda: federation.present() == SITES - 1, "service")
    check(federation, [0, 2])
    federation.begin(1)
    federation.until(lambda: federation.present() == SITES, "service")
    check(federation, [0, 1, 2])


def test_the_next_client_answers_while_a_node_hangs(federation: Federation) -> None:
    stopped = [federation.forked(part)[NAMES[0]] for part in ("node", "worker")]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        check(federation, [1, 2])
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)
    federation.until(lambda: "site-0" in federation.infer(QUERIES)["client"], "service")
    check(federation, [0, 1, 2])


def test_the_service_starts_another_run_if_its_run_dies(federation: Federation) -> None:
    runs = federation.log("service").count("is connected")
    os.kill(federation.server(), signal.SIGKILL)
    federation.until(lambda: federation.log("service").count("is connected") > runs, "service")
    federation.until(lambda: federation.present() == SITES, "service")
    check(federation, [0, 1, 2])
