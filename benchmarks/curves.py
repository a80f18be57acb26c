"""Learning curves beside plain PyTorch programs, on the same PFLlib split.

A split is written as PFLlib's scripts do it: classes dealt out by Dirichlet draws, 75 % of each client's
samples for training, pickled dicts. Posy reads that directory; so do the programs below, which know nothing of
Posy or Flower. They go step by step as the published ones of FedAvg (PFLlib) and cwFedAvg (built on PFLlib)
do: the same network, a shuffling DataLoader that drops an incomplete last batch, a new SGD a round, the served
models scored on the clients' test samples. FedFew has no published program; its Algorithm 1 is written out.
Prints JSON: for each method and evaluated round the accuracy (mean over the clients, weighted by their samples)
of both over the seeds, their gap, and the spread over the seeds.
"""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

import posy
from benchmarks.measure import machine
from posy import figures
from posy.data.datasets import load_dataset
from posy.forked import cores
from posy.strategies.registry import read_settings

LR = 0.005
BATCH = 10
WDR_LAMBDA = 10.0
MODELS, MU = 3, 0.01

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "cwfedavg": {"cwfedavg_wdr_lambda": WDR_LAMBDA},
    "fedfew": {"fedfew_models": MODELS, "fedfew_mu": MU},
}


class Client(NamedTuple):
    """One client's tensors, and whether it leaves out an incomplete last batch."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    drop_last: bool = True


# -- the split -------------------------------------------------------------------------------------------


def write_split(folder: Path, x: npt.NDArray[Any], y: npt.NDArray[Any], clients: int, alpha: float, seed: int) -> None:
    """Write a PFLlib directory of uint8 images ``(N, H, W, C)``: each class is dealt out by a Dirichlet draw."""
    x = (x.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32)
    generator = np.random.default_rng(seed)
    held: list[list[int]] = [[] for _ in range(clients)]
    while min(map(len, held)) < 2 * BATCH:
        held = [[] for _ in range(clients)]
        for label in np.unique(y):
            members = generator.permutation(np.flatnonzero(y == label))
            cuts = np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1]
            for mine, part in zip(held, np.split(members, (cuts * len(members)).astype(int)), strict=True):
                mine.extend(part.tolist())
    for client, indices in enumerate(held):
        order = generator.permutation(indices)
        kept = round(0.75 * len(order))
        for split, chosen in (("train", order[:kept]), ("test", order[kept:])):
            (folder / split).mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / split / f"{client}.npz", data=np.array({"x": x[chosen], "y": y[chosen]}))
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": len(np.unique(y))}))


def read_split(folder: Path) -> list[Client]:
    """Read what :func:`write_split` has just written, as PFLlib does."""
    clients = []
    for number in range(len(list((folder / "train").glob("*.npz")))):
        parts = [np.load(folder / s / f"{number}.npz", allow_pickle=True)["data"].tolist() for s in ("train", "test")]
        tensors = [torch.from_numpy(part[key]) for part in parts for key in ("x", "y")]
        clients.append(Client(tensors[0], tensors[1].long(), tensors[2], tensors[3].long()))
    return clients


# -- the plain programs ----------------------------------------------------------------------------------


def network(example: Tensor, classes: int) -> nn.Sequential:
    """Return the 4-layer CNN of the three papers."""
    features = nn.Sequential(
        nn.Conv2d(example.shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    width = features(example[None]).shape[1]
    return nn.Sequential(*features, nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, classes))


def row_share(weight: Tensor) -> Tensor:
    """Return the norms of the output rows as shares of their sum."""
    norms = weight.norm(dim=1)
    return norms / norms.sum()


def train(
    model: nn.Sequential, start: Tensor, client: Client, penalty: Callable[[nn.Sequential], Tensor] | None = None
) -> tuple[Tensor, float]:
    """Train one epoch from some parameters; return the new ones and the mean loss on the way."""
    vector_to_parameters(start.clone(), model.parameters())  # the parameters are views of it, changed in place
    whole = client.drop_last and len(client.y_train) >= BATCH
    loader = DataLoader(TensorDataset(client.x_train, client.y_train), BATCH, shuffle=True, drop_last=whole)
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    total, seen = 0.0, 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        total, seen = total + loss.item() * len(y), seen + len(y)
        if penalty is not None:
            loss = loss + penalty(model)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return parameters_to_vector(model.parameters()).detach().clone(), total / seen


@torch.no_grad()
def outputs(model: nn.Sequential, parameters: Tensor, x: Tensor) -> Tensor:
    """Return the logits of a model."""
    vector_to_parameters(parameters, model.parameters())
    return torch.cat([model(part) for part in torch.split(x, 500)])


def fedavg(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Tensor]]:
    """Yield the served models after each round: one average for all."""
    average = starts[0]
    while True:
        average = shares @ torch.stack([train(model, average, client)[0] for client in clients])
        yield [average] * len(clients)


def cwfedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Tensor]]:
    """Yield the served models after each round: the average, with an output layer mixed for each client."""
    *_, bias = model.parameters()
    classes = len(bias)
    head = sum(p.numel() for p in model[-1].parameters())
    served = starts[:1] * len(clients)

    def regulariser(counts: Tensor, net: nn.Sequential) -> Tensor:
        weight = net[-1].weight
        assert isinstance(weight, Tensor)
        return WDR_LAMBDA * torch.linalg.vector_norm(counts / counts.sum() - row_share(weight))

    while True:
        trained = []
        for client, start in zip(clients, served, strict=True):
            counts = torch.bincount(client.y_train, minlength=classes)
            trained.append(train(model, start, client, partial(regulariser, counts))[0])
        stacked = torch.stack(trained)
        mixture = torch.stack([row_share(each[-head:-classes].view(classes, -1)) for each in stacked])
        joint = shares[:, None] * mixture
        heads = (joint / joint.sum(0)).T @ stacked[:, -head:]
        average = shares @ stacked
        served = [torch.cat([average[:-head], own @ heads]) for own in mixture]
        yield served


def fedfew(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Tensor]]:
    """Yield the served models after each round: of K, the one of the least training loss (Algorithm 1)."""
    models = starts
    while True:
        results = [[train(model, start, client) for start in models] for client in clients]
        losses = shares[:, None].double() * torch.tensor([[loss for _, loss in row] for row in results]).double()
        inner = torch.softmax(-losses / MU, dim=1)
        outer = torch.softmax(-torch.logsumexp(-losses / MU, dim=1), dim=0)
        weight = (outer[:, None] * inner).float()
        models = [
            start + sum(weight[i, k] * (row[k][0] - start) for i, row in enumerate(results))
            for k, start in enumerate(models)
        ]
        served = []
        for client in clients:
            fit = [float(F.cross_entropy(outputs(model, each, client.x_train), client.y_train)) for each in models]
            served.append(models[fit.index(min(fit))])
        yield served


Program = Callable[[nn.Sequential, list[Tensor], list[Client], Tensor], Iterator[list[Tensor]]]
PROGRAMS: dict[str, Program] = {"fedavg": fedavg, "cwfedavg": cwfedavg, "fedfew": fedfew}


def shares_of(clients: list[Client]) -> Tensor:
    """Return n_i / N ``(M,)``."""
    sizes = torch.tensor([float(len(client.y_train)) for client in clients])
    return sizes / sizes.sum()


def plain_curve(method: str, folder: Path, rounds: int, every: int, seed: int, drop_last: bool) -> list[float]:
    """Run a plain program and return its accuracy at the evaluated rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    clients = [client._replace(drop_last=drop_last) for client in read_split(folder)]
    shares = shares_of(clients)
    classes = 1 + max(int(client.y_train.max()) for client in clients)
    models = [network(clients[0].x_train[0], classes) for _ in range(MODELS)]
    starts = [parameters_to_vector(model.parameters()).detach() for model in models]
    curve = []
    for number, served in zip(range(1, rounds + 1), PROGRAMS[method](models[0], starts, clients, shares), strict=False):
        if number % every == 0:
            hits = [
                (outputs(models[0], parameters, client.x_test).argmax(1) == client.y_test).float().mean()
                for parameters, client in zip(served, clients, strict=True)
            ]
            curve.append(float(shares @ torch.stack(hits)))
    return curve


# -- beside Posy -----------------------------------------------------------------------------------------


def posy_curve(method: str, folder: Path, rounds: int, every: int, seed: int) -> list[float]:
    """Run Posy and return its accuracy at the evaluated rounds."""
    clients = len(list((folder / "train").glob("*.npz")))
    with tempfile.TemporaryDirectory() as output, redirect_stdout(sys.stderr):
        record = posy.run(
            method=method, dataset=str(folder), partition="given", num_clients=clients, model="cnn",
            num_server_rounds=rounds, evaluate_every=every, local_epochs=1, batch_size=BATCH, lr=LR, seed=seed,
            save_models=False, output_dir=output, **METHODS[method],
        )  # fmt: skip
        lines = (record.directory.path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    accuracies = [json.loads(line)["served_accuracy"] for line in lines]
    return [accuracy["weighted"] for accuracy in accuracies if accuracy is not None]


def compared(plain: npt.NDArray[np.float64], ours: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return both curves ``(seeds, points)`` as means, their gap, and the standard deviation over the seeds."""
    spread = np.sqrt((plain.var(axis=0, ddof=1) + ours.var(axis=0, ddof=1)) / 2)
    means = {"plain": plain.mean(axis=0), "posy": ours.mean(axis=0)}
    gap = means["posy"] - means["plain"]
    curves = means | {"gap": gap, "spread_over_seeds": spread, "mean_gap": gap.mean(), "mean_spread": spread.mean()}
    return {name: np.round(curve, 4).tolist() for name, curve in curves.items()}


def main(
    dataset: str = "cifar10",
    data_dir: Path = Path("datasets"),
    samples: int = 12_000,
    clients: int = 20,
    alpha: float = 0.1,
    rounds: int = 20,
    every: int = 2,
    seeds: list[int] = typer.Option([0, 1, 2]),  # noqa: B008 - typer's form
    methods: list[str] = typer.Option(list(METHODS)),  # noqa: B008
    keep_last: bool = typer.Option(False, help="plain programs train an incomplete last batch too"),
    picture: Path | None = None,
) -> None:
    """Run both, print JSON and draw the curves."""
    points = list(range(every, rounds + 1, every))
    report: dict[str, Any] = {
        "machine": machine(), "dataset": dataset, "samples": samples, "clients": clients, "alpha": alpha,
        "seeds": seeds, "keep_last": keep_last, "evaluated_rounds": points, "methods": {},
    }  # fmt: skip
    series: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = read_settings({"dataset": dataset, "data-dir": str(data_dir), "max-samples": samples})
        data = load_dataset(settings.data, data_dir, 0)
        write_split(folder, np.asarray(data.x), np.asarray(data.y), clients, alpha, 1)
        with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
            waiting = {
                method: [pool.submit(plain_curve, method, folder, rounds, every, s, not keep_last) for s in seeds]
                for method in methods
            }
            plain = {name: np.array([future.result() for future in futures]) for name, futures in waiting.items()}
        for method in methods:
            ours = np.array([posy_curve(method, folder, rounds, every, seed) for seed in seeds])
            report["methods"][method] = row = compared(plain[method], ours)
            series |= {f"{method}, {x}": list(zip(points, row[x], strict=True)) for x in ("plain", "posy")}
    if picture is not None:
        title = f"{dataset}, {clients} clients, Dir({alpha:g}): served models"
        figures.lines(series, picture, title=title, ylabel="accuracy", percent=True)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
