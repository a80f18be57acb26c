"""Measure FedDRM's routing through the service: ``python -m benchmarks.routing RUN…``.

For each run with ``shift``, the command starts ``posy serve RUN`` in a separate process. It sends the test samples of
all clients over gRPC to ``router`` and to the model of every client, as the run's clients see the samples. It compares
the answers with the run's record and with the stored models in this process. The command prints JSON.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import typer
from torch import Tensor

from benchmarks.measure import machine
from benchmarks.serving import start
from posy.client_app.workspace import Workspace
from posy.data.inputs import Preprocessing
from posy.data.shifts import SHIFTS, Shift
from posy.serve.endpoints import name_of
from posy.serve.messages import MESSAGES, SERVICE
from posy.serve.run_models import ROUTER
from posy.serve.tensors import Array, datatype_of, from_raw
from posy.server_app.record import Record
from posy.server_app.routing import candidates_of
from posy.server_app.system import pooled_test, routing_matrix, routing_scores
from posy.spread import majority_vote
from posy.strategies.cohorts import members_of
from posy.strategies.registry import read_settings

Indices = npt.NDArray[np.int64]

BATCH = 256
"""Samples per request."""
SETTINGS = (
    *("dataset", "num-clients", "shift", "partition", "dirichlet-alpha", "augment", "max-samples", "model"),
    *("num-server-rounds", "local-steps", "batch-size", "lr", "feddrm-class-weight"),
)
"""The settings in the output."""


class Routed(NamedTuple):
    """The chosen client and the predicted class of n samples, each ``(n,)``."""

    clients: Indices
    classes: Indices


class Caller:
    """Sends requests to a service over gRPC, one after the other.

    Parameters
    ----------
    port : int
        The port of the service.
    classes, clients : sequence of str
        The names of the classes and of the clients in the answers, in the order of their indices.
    """

    def __init__(self, port: int, classes: Sequence[str], clients: Sequence[str]) -> None:
        self._indices = {"class": index_of(classes), "client": index_of(clients)}
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._infer = self._channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=MESSAGES["ModelInferRequest"].SerializeToString,
            response_deserializer=MESSAGES["ModelInferResponse"].FromString,
        )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def ask(self, model: str, pixels: Array, output: str) -> Indices:
        """Return the classes or the clients ``(n,)`` that a model returns for images ``(n, C, H, W)``."""
        return np.concatenate([self._answer(model, part, (output,))[output] for part in split(pixels, BATCH)])

    def route(self, pixels: Array, size: int = BATCH) -> tuple[Routed, list[float]]:
        """Return the router's answers to requests of ``size`` samples, and the seconds of each request."""
        answers, seconds = [], []
        for part in split(pixels, size):
            begin = time.perf_counter()
            answers.append(self._answer(ROUTER, part, ("client", "class")))
            seconds.append(time.perf_counter() - begin)
        clients, classes = (np.concatenate([answer[name] for answer in answers]) for name in ("client", "class"))
        return Routed(clients, classes), seconds

    def _answer(self, model: str, pixels: Array, outputs: Sequence[str]) -> dict[str, Indices]:
        request = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[pixels.tobytes()])
        request.inputs.add(name="image", datatype=datatype_of(pixels), shape=pixels.shape)
        for name in outputs:
            request.outputs.add(name=name)
        response = self._infer(request)
        tensors = zip(response.outputs, response.raw_output_contents, strict=True)
        arrays = {t.name: from_raw(t.name, t.datatype, tuple(t.shape), raw) for t, raw in tensors}
        return {name: np.array([self._indices[name][text] for text in arrays[name]]) for name in outputs}


def index_of(names: Sequence[str]) -> dict[bytes, int]:
    """Return the index of each name."""
    return {name.encode(): index for index, name in enumerate(names)}


def split(samples: Array, size: int) -> list[Array]:
    """Return consecutive parts of at most ``size`` samples."""
    return [samples[first : first + size] for first in range(0, len(samples), size)]


def pixels_of(x: Tensor, preprocessing: Preprocessing) -> Array:
    """Return the pixels from 0 to 255, float32 ``(n, C, H, W)``, of normalised images ``(n, C, H, W)``."""
    mean, std = (values.reshape(-1, 1, 1).astype(np.float64) for values in (preprocessing.mean, preprocessing.std))
    fractions = x.numpy(force=True).astype(np.float64) * std + mean
    return np.clip(255 * fractions, 0, 255).astype(np.float32)


@torch.no_grad()
def stored_answers(record: Record, x: Tensor) -> Routed:
    """Return the answers of the stored models in this process to normalised samples."""
    router = record.router()
    candidates, weights = candidates_of(record, router.settings)
    absent = [client for client in range(len(weights)) if client not in candidates]
    logits = torch.cat([router.client_logits(part) for part in torch.split(x, BATCH)])
    chosen = routing_scores(router.settings.method, logits, weights, absent).argmax(dim=-1)
    classes = torch.empty_like(chosen)
    for client in sorted(set(chosen.tolist())):
        rows, model = chosen == client, record.predictor(client)
        classes[rows] = torch.cat([model(part).argmax(dim=-1) for part in torch.split(x[rows], BATCH)])
    return Routed(chosen.numpy(), classes.numpy())


def recorded_classes(record: Record, clients: Sequence[int], names: Sequence[str]) -> Indices | None:
    """Return the classes ``(n,)`` that the run recorded with `save-predictions`, or None if it recorded none.

    Each client's scored model has classified the client's own test samples.
    """
    point = record.predictor(clients[0]).point
    paths = [record.path / "predictions" / f"{point}-{client}.csv" for client in clients]
    if not all(path.is_file() for path in paths):
        return None
    columns = [f"p({name})" for name in names]
    return np.concatenate([pd.read_csv(path)[columns].to_numpy().argmax(axis=1) for path in paths])


def accuracies(y: Indices, owner: Indices, routed: Routed, votes: Indices, num_classes: int) -> dict[str, float]:
    """Return the accuracy of the routing, and of the classes under several choices of the client.

    Accuracies over no samples are omitted.

    Parameters
    ----------
    y, owner : numpy.ndarray, (n,)
        The true classes, and the clients to which the samples belong.
    routed : Routed
        The router's answers.
    votes : numpy.ndarray, (M, n)
        The classes that each client's model predicts.
    num_classes : int
        The number of classes.
    """
    right = routed.clients == owner
    by_client = (votes == y).mean(axis=1)
    system = routed.classes == y
    shares = {
        "routing": right,
        "system": system,
        "system, right client": system[right],
        "system, wrong client": system[~right],
        "majority vote": majority_vote(votes, num_classes) == y,
        "true client": votes[owner, np.arange(len(y))] == y,
        "any client": (votes == y).any(axis=0),
    }
    singles = {"best single client": by_client.max(), "mean single client": by_client.mean()}
    return {name: float(np.mean(value)) for name, value in (shares | singles).items() if np.size(value)}


def shift_differences(matrix: Indices, shifts: Sequence[Shift]) -> dict[str, float]:
    """Return the share of samples for each difference between the chosen client's shift and the true client's shift.

    The keys are ``none``, the transformation if only one differs (``gamma``, ``hue``, …), and ``several``. ``matrix``
    ``(M, M)`` contains the number of samples per true and chosen client.
    """
    values = np.array(shifts)
    differs = values[:, None] != values
    count = differs.sum(axis=2)
    masks = {"none": count == 0}
    masks |= {name: differs[:, :, column] & (count == 1) for column, name in enumerate(Shift._fields)}
    masks |= {"several": count > 1}
    return {name: float(matrix[mask].sum() / matrix.sum()) for name, mask in masks.items() if mask.any()}


def times(seconds: Sequence[float], size: int) -> dict[str, float]:
    """Return the median and the 99th percentile of the time per query in ms, for requests of ``size`` samples."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1000 / size
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def measure(run: str, single: int) -> dict[str, Any]:
    """Return the results for one run.

    ``single`` is the number of requests with one sample.
    """
    record = Record.find(run)
    settings = read_settings({}, run, record.settings)
    members, shift = members_of(settings), settings.data.shift
    if not settings.method.routes or shift == "none":
        raise SystemExit(f"{run}: the benchmark needs a run with method = feddrm, and with a covariate shift (shift)")
    if len(members) < settings.data.num_clients:
        raise SystemExit(f"{run}: the benchmark needs a run in which all clients train (holdout-clients = 0)")
    x, y, owner = pooled_test(Workspace(settings), members)
    models = [record.predictor(client) for client in members]
    pixels = pixels_of(x, models[0].preprocessing)
    names = [name_of(client, model) for client, model in zip(members, models, strict=True)]
    truth, owners, class_names = y.numpy(force=True), owner.numpy(force=True), models[0].class_names
    process, _, port = start(str(record.path))
    caller = Caller(port, class_names, names)
    try:
        routed, seconds = caller.route(pixels)
        votes = np.stack([caller.ask(name, pixels, "class") for name in names])
        rounded, _ = caller.route(np.rint(pixels).astype(np.uint8))
        chosen = np.random.default_rng(0).permutation(len(pixels))[:single]
        alone, single_seconds = caller.route(pixels[chosen], 1)
    finally:
        caller.close()
        process.terminate()
        process.wait()
    reference, recorded = stored_answers(record, x), recorded_classes(record, members, class_names)
    matrix = routing_matrix(owners, routed.clients, len(members))
    results = accuracies(truth, owners, routed, votes, len(class_names))
    summary = record.summary
    return {
        "run": record.path.name,
        "seed": settings.run.seed,
        "samples": len(truth),
        "accuracy": results | {"system, 8-bit pixels": float((rounded.classes == truth).mean())},
        "recorded": {
            **{name: summary[f"{name}-accuracy"] for name in ("system", "routing")},
            "local models on their own samples": summary["local"]["last"]["weighted"],
        },
        "equals the record": all(results[name] == summary[f"{name}-accuracy"] for name in ("system", "routing")),
        "different answers": {
            **differences(routed, reference),
            "class of the true client": None if recorded is None else int((own_votes(votes, owners) != recorded).sum()),
            **{f"{name}, one sample per request": count for name, count in differences(alone, routed, chosen).items()},
            **{f"{name}, 8-bit pixels": count for name, count in differences(rounded, routed).items()},
        },
        "ms per query": {"1": times(single_seconds, 1), str(BATCH): times(seconds, BATCH)},
        "different transformation": shift_differences(matrix, SHIFTS[shift][: len(members)]),
        "true x chosen client": matrix.tolist(),
    }


def own_votes(votes: Indices, owner: Indices) -> Indices:
    """Return the class ``(n,)`` that each sample's true client predicts, given the classes ``(M, n)``."""
    classes: Indices = votes[owner, np.arange(len(owner))]
    return classes


def differences(answers: Routed, expected: Routed, rows: Indices | slice = slice(None)) -> dict[str, int]:
    """Return how many chosen clients and how many classes differ from ``rows`` of the expected answers."""
    return {
        "client": int((answers.clients != expected.clients[rows]).sum()),
        "class": int((answers.classes != expected.classes[rows]).sum()),
    }


def main(
    runs: Annotated[list[str], typer.Argument(help="Runs with method = feddrm and shift.")],
    single: Annotated[int, typer.Option(help="Number of requests with one sample.")] = 2000,
) -> None:
    """Measure the routing of one or more runs, for example with several seeds."""
    torch.set_num_threads(1)
    results = [measure(run, single) for run in runs]
    stored = Record.find(runs[0]).settings
    report = {"machine": machine(), "settings": {key: stored[key] for key in SETTINGS}, "runs": results}
    if len(results) > 1:
        report["over the runs"] = over_runs(results)
    print(json.dumps(report, indent=1))


def over_runs(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means and standard deviations over several runs, and the chosen clients in percent of each row."""
    summary: dict[str, Any] = {
        kind: {
            name: spread([result[kind][name] for result in results])
            for name in results[0][kind]
            if all(name in result[kind] for result in results)
        }
        for kind in ("accuracy", "different transformation")
    }
    matrix = np.sum([result["true x chosen client"] for result in results], axis=0)
    percent = 100 * matrix / matrix.sum(axis=1, keepdims=True)
    return summary | {"true x chosen client, %": percent.round(1).tolist()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the standard deviation of values."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values)}


if __name__ == "__main__":
    typer.run(main)
