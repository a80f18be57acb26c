"""Compare the learning curves of Posy and of plain PyTorch programs on the same PFLlib split.

The split has the format of PFLlib's scripts: Dirichlet draws divide the classes among the clients, 75 % of each
client's samples are for training, and the files hold pickled dicts. Posy and the programs of :mod:`benchmarks.plain`
read the same directory. For each method and evaluated round, the report (JSON) contains the mean accuracy of Posy and
of the program over the seeds, their gap, and the spread over the seeds. Accuracies are means over the clients, weighted
by their samples. A second file (``.jsonl``) stores each finished curve. The script does not recompute these curves, so
you can resume an interrupted run and add methods.
"""

import json
import multiprocessing
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch.nn.utils import parameters_to_vector

import posy
from benchmarks import plain
from benchmarks.measure import machine
from posy import figure_style as style
from posy import figures
from posy.data.datasets import load_dataset
from posy.forked import cores
from posy.strategies.methods import paper_name, settings_class
from posy.strategies.registry import read_settings

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "cwfedavg": {"cwfedavg_wdr_lambda": plain.WDR_LAMBDA},
    "fedfew": {"fedfew_models": plain.MODELS, "fedfew_mu": plain.MU, "fedfew_full_steps": False},
    "fedper": {"fedper_layers": 1},
    "fedrep": {"fedrep_head_epochs": 1},
    "fedbabu": {"fedbabu_epochs": 1},
    "ditto": {"ditto_strength": plain.DITTO_LAMBDA},
    "apfl": {"apfl_alpha": plain.APFL_ALPHA, "apfl_adaptive": plain.APFL_ADAPTIVE},
    "fedamp": {
        "fedamp_alpha": plain.AMP_ALPHA,
        "fedamp_strength": plain.AMP_LAMBDA,
        "fedamp_sigma": plain.AMP_SIGMA,
    },
    "fedprox": {"fedprox_mu": plain.PROX_MU},
    "pfedme": {
        "pfedme_strength": plain.PFEDME_LAMBDA,
        "pfedme_steps": plain.PFEDME_STEPS,
        "pfedme_personal_lr": plain.PFEDME_LR,
        "pfedme_beta": plain.PFEDME_BETA,
    },
    "per-fedavg": {
        "per_fedavg_alpha": plain.PER_ALPHA,
        "per_fedavg_hessian": "fo",
        "per_fedavg_steps": 1,
        "batch_size": 2 * plain.BATCH,  # a mini-batch of Posy contains both batches of a step
    },
    "fedfomo": {
        "fedfomo_models": plain.FOMO_MODELS,
        "fedfomo_epsilon": plain.FOMO_EPSILON,
        "fedfomo_epsilon_decay": plain.FOMO_DECAY,
        "fedfomo_validation": 0.0,  # with 0, Posy and the program compare models on the training samples
    },
    "fedala": {
        "fedala_layers": 1,
        "fedala_eta": plain.ALA_ETA,
        "fedala_sample": plain.ALA_SAMPLE,
        "fedala_threshold": 0.1,  # PFLlib's value
    },
    "lg-fedavg": {"lg_fedavg_layers": 1},
    "scaffold": {"scaffold_server_lr": plain.SCAFFOLD_LR},
    "fedproto": {"fedproto_strength": plain.PROTO_LAMBDA},
    "cfl": {"cfl_eps1": plain.CFL_EPS1, "cfl_eps2": plain.CFL_EPS2},
    "fedpac": {"fedpac_strength": plain.PAC_LAMBDA, "fedpac_head_lr": plain.PAC_HEAD_LR},
}
"""The methods, with the settings that make Posy match the plain programs."""
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
NAMES = {"plain": "plain PyTorch program", "posy": "Posy"}
"""Names of the two sides in the figure."""


# -- the split -------------------------------------------------------------------------------------------


def write_split(folder: Path, x: npt.NDArray[Any], y: npt.NDArray[Any], clients: int, alpha: float, seed: int) -> None:
    """Write uint8 images ``(N, H, W, C)`` as a PFLlib directory; Dirichlet draws divide each class among clients."""
    x = (x.transpose(0, 3, 1, 2) / 127.5 - 1).astype(np.float32)
    generator = np.random.default_rng(seed)
    indices_of: list[list[int]] = [[] for _ in range(clients)]
    while min(map(len, indices_of)) < 2 * plain.BATCH:
        indices_of = [[] for _ in range(clients)]
        for label in np.unique(y):
            members = generator.permutation(np.flatnonzero(y == label))
            cuts = np.cumsum(generator.dirichlet(np.full(clients, alpha)))[:-1]
            for client_indices, part in zip(
                indices_of, np.split(members, (cuts * len(members)).astype(int)), strict=True
            ):
                client_indices.extend(part.tolist())
    for client, indices in enumerate(indices_of):
        order = generator.permutation(indices)
        num_train = round(0.75 * len(order))
        for split, rows in (("train", order[:num_train]), ("test", order[num_train:])):
            (folder / split).mkdir(parents=True, exist_ok=True)
            np.savez_compressed(folder / split / f"{client}.npz", data=np.array({"x": x[rows], "y": y[rows]}))
    (folder / "config.json").write_text(json.dumps({"num_clients": clients, "num_classes": len(np.unique(y))}))


def read_split(folder: Path) -> list[plain.Client]:
    """Read the output of :func:`write_split` as PFLlib does."""
    clients = []
    for number in range(len(list((folder / "train").glob("*.npz")))):
        parts = [np.load(folder / s / f"{number}.npz", allow_pickle=True)["data"].tolist() for s in ("train", "test")]
        tensors = [torch.from_numpy(part[key]) for part in parts for key in ("x", "y")]
        clients.append(plain.Client(tensors[0], tensors[1].long(), tensors[2], tensors[3].long()))
    return clients


# -- the curves ------------------------------------------------------------------------------------------


def point_of(method: str) -> str:
    """Return the evaluation point of a method's plain program: ``served``, or ``local`` after training."""
    if method == "fedproto":
        return "served"  # as in PFLlib: the client's network with the prototypes that it has just received
    if method in ("fedper", "fedrep", "lg-fedavg"):
        return "local"  # the plain programs of these methods yield the trained models
    return settings_class(method).point


def plain_curve(method: str, folder: Path, rounds: int, every: int, seed: int, drop_last: bool) -> list[float]:
    """Run a plain program and return its accuracy at the evaluated rounds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    clients = [client._replace(drop_last=drop_last) for client in read_split(folder)]
    shares = plain.shares_of(clients)
    classes = 1 + max(int(client.y_train.max()) for client in clients)
    models = [plain.network(clients[0].x_train[0], classes) for _ in range(plain.MODELS)]
    starts = [parameters_to_vector(model.parameters()).detach() for model in models]
    curve = []
    program = plain.PROGRAMS[method](models[0], starts, clients, shares)
    for number, scored in enumerate(islice(program, rounds), 1):
        if number % every == 0:
            hits = [
                (plain.outputs(models[0], each, client.x_test).argmax(1) == client.y_test).float().mean()
                for each, client in zip(scored, clients, strict=True)
            ]
            curve.append(float(shares @ torch.stack(hits)))
    return curve


def posy_curve(method: str, folder: Path, rounds: int, every: int, seed: int) -> list[float]:
    """Run Posy and return its accuracy at the evaluated rounds."""
    clients = len(list((folder / "train").glob("*.npz")))
    settings: dict[str, Any] = {"local_epochs": plain.EPOCHS, "batch_size": plain.BATCH, "lr": plain.LR}
    with tempfile.TemporaryDirectory() as output, redirect_stdout(sys.stderr):
        record = posy.run(
            method=method, dataset=str(folder), partition="given", num_clients=clients, model="cnn",
            num_server_rounds=rounds, evaluate_every=every, seed=seed, save_models=False, output_dir=output,
            **settings | METHODS[method],
        )  # fmt: skip
        accuracies = record.rounds[f"{point_of(method)}_accuracy_weighted"].dropna()
    return [float(accuracy) for accuracy in accuracies]


class Work:
    """A file of finished curves, one JSON line each, which lets an interrupted run resume."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self.path, self.conditions = path, conditions
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self.curves = {
            (row["method"], row["side"], row["seed"]): row["curve"] for row in rows if conditions.items() <= row.items()
        }

    def missing(self, method: str, side: str, seeds: list[int]) -> list[int]:
        """Return the seeds without a finished curve."""
        return [seed for seed in seeds if (method, side, seed) not in self.curves]

    def add(self, method: str, side: str, seed: int, curve: list[float]) -> None:
        """Store a curve."""
        row = {**self.conditions, "method": method, "side": side, "seed": seed, "curve": np.round(curve, 4).tolist()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.curves[method, side, seed] = row["curve"]

    def table(self, method: str, side: str, seeds: list[int]) -> npt.NDArray[np.float64]:
        """Return curves ``(seeds, points)``."""
        return np.array([self.curves[method, side, seed] for seed in seeds])


def compared(plain: npt.NDArray[np.float64], ours: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the means of both curves ``(seeds, points)``, their gap, and the standard deviations over the seeds.

    ``spread_over_seeds`` is the pooled standard deviation of both curves. ``largest_gap_in_spreads`` is the maximum
    over the rounds of the gap divided by the round's spread. ``mean_gap_error`` is the standard error of ``mean_gap``.
    """
    sides = {"plain": plain, "posy": ours}
    means = {name: side.mean(axis=0) for name, side in sides.items()}
    spreads = {name: side.std(axis=0, ddof=1) for name, side in sides.items()}
    spread = np.sqrt((spreads["plain"] ** 2 + spreads["posy"] ** 2) / 2)
    gap = means["posy"] - means["plain"]
    error = np.sqrt(sum(side.mean(axis=1).var(ddof=1) / len(side) for side in sides.values()))
    values = means | {f"{name}_spread": each for name, each in spreads.items()} | {
        "gap": gap, "spread_over_seeds": spread, "mean_gap": gap.mean(), "mean_gap_error": error,
        "mean_spread": spread.mean(), "largest_gap_in_spreads": (np.abs(gap) / spread).max(),
    }  # fmt: skip
    return {name: np.round(each, 4).tolist() for name, each in values.items()}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a panel for each method of a report."""
    panels = {}
    for method, row in report["methods"].items():
        bands = {side: row.get(f"{side}_spread", row["spread_over_seeds"]) for side in ("plain", "posy")}
        lines = {side: list(zip(report["evaluated_rounds"], row[side], bands[side], strict=True)) for side in bands}
        panels[f"{paper_name(method)}, {row['point']}"] = {NAMES[side]: line for side, line in lines.items()}
    title = f"{TITLES.get(report['dataset'], report['dataset'])}, {report['clients']} clients, Dir({report['alpha']:g})"
    note = f"band: mean ± standard deviation over {len(report['seeds'])} seeds; served or local: the scored model"
    colours = dict(zip(NAMES.values(), (style.BASELINE, style.PALETTE[0]), strict=True))
    figures.small_multiples(panels, path, title=title, note=note, ylabel="accuracy", percent=True, colours=colours)


def main(
    output: Path,
    dataset: str = "cifar10",
    data_dir: Path = Path("datasets"),
    samples: int = 12_000,
    clients: int = 20,
    alpha: float = 0.1,
    rounds: int = 20,
    every: int = 2,
    seeds: list[int] = typer.Option([0, 1, 2]),  # noqa: B008 - typer's form
    methods: list[str] = typer.Option(list(METHODS)),  # noqa: B008
    drop_last: bool = typer.Option(False, help="the plain programs skip an incomplete last batch, as in PFLlib"),
    picture: Path | None = None,
    only_draw: bool = typer.Option(False, help="draw the report OUTPUT without computing curves"),
) -> None:
    """Compute the missing curves, add the methods to the report OUTPUT (JSON), and draw every method in the report."""
    if only_draw and picture is not None:
        draw(json.loads(output.read_text(encoding="utf-8")), picture)
        return
    split = {"dataset": dataset, "samples": samples, "clients": clients, "alpha": alpha, "rounds": rounds}
    report: dict[str, Any] = {
        "machine": machine(), **split, "seeds": seeds, "evaluated_rounds": list(range(every, rounds + 1, every)),
        "methods": {},
    }  # fmt: skip
    if output.exists():
        stored = json.loads(output.read_text(encoding="utf-8"))
        if differing := [key for key in (*split, "seeds", "evaluated_rounds") if stored[key] != report[key]]:
            raise typer.BadParameter(
                f"{output} has different conditions: {', '.join(differing)}; use the same conditions or another OUTPUT"
            )
        report["methods"] = stored["methods"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = read_settings({"dataset": dataset, "data-dir": str(data_dir), "max-samples": samples})
        data = load_dataset(settings.data, data_dir, 0)
        write_split(folder, np.asarray(data.x), np.asarray(data.y), clients, alpha, 1)
        work = Work(output.with_suffix(".jsonl"), split | {"every": every, "drop_last": drop_last})
        with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
            for method in methods:
                seed_of_future = {
                    pool.submit(plain_curve, method, folder, rounds, every, seed, drop_last): seed
                    for seed in work.missing(method, "plain", seeds)
                }
                for future in as_completed(seed_of_future):
                    work.add(method, "plain", seed_of_future[future], future.result())
                for seed in work.missing(method, "posy", seeds):
                    work.add(method, "posy", seed, posy_curve(method, folder, rounds, every, seed))
                sides = (work.table(method, side, seeds) for side in ("plain", "posy"))
                report["methods"][method] = {"point": point_of(method), "drop_last": drop_last} | compared(*sides)
                output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if picture is not None:
        draw(report, picture)


if __name__ == "__main__":
    typer.run(main)
