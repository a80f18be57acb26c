"""Compare scores that detect foreign queries: ``python -m benchmarks.none_fits --data-dir datasets``.

FedDRM trains on digits, MNIST and CIFAR-10, each without one class. The benchmark then scores the clients' test samples
and four kinds of foreign images: uniform noise, inverted images, another data set, and the class that no client has. A
table reports the AUROC of each score. For the score that Posy uses, a second table reports the share of alarms at the
threshold of the validation samples. The runs take about half an hour on two cores.
"""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import typer
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import normalize

import posy
from benchmarks.measure import percent
from posy.client_app.stored import ClientModel
from posy.client_app.training.trainer import EVALUATION_BATCH
from posy.client_app.workspace import Workspace
from posy.commands.launch import INTERRUPTED
from posy.data.readers.npz import NpzFile
from posy.listing import print_table
from posy.outliers import (
    Embeddings,
    Floats,
    Groups,
    Reference,
    conformal_threshold,
    distances,
    fit_reference,
)

Images = npt.NDArray[np.uint8]
Score = Callable[["Outputs"], Floats]

FOLDER, HELD_OUT = "POSY_NONE_FITS_DATA", "POSY_NONE_FITS_CLASS"
SEEDS = (0, 1, 2)
QUERIES = 500
"""Maximum number of foreign images of each kind."""
NEIGHBOURS = 5
ALPHA = 0.05
USED = "Mahalanobis, client branch or first blocks"
"""The score that Posy uses."""
COMMON = {
    **{"method": "feddrm", "num_clients": 8, "dirichlet_alpha": 0.3, "validation_fraction": 0.2, "momentum": 0.9},
    **{"local_epochs": 1, "evaluate_every": 5, "checkpoint_every": 0},
}


class DataSet(NamedTuple):
    """The settings of a run, the number of images, and the data sets that provide foreign images."""

    settings: Mapping[str, Any]
    images: int
    sources: tuple[str, ...]


DATA_SETS = {
    "digits": DataSet({"num_server_rounds": 40, "lr": 0.05, "batch_size": 16}, 1797, ("mnist",)),
    "mnist": DataSet({"num_server_rounds": 12, "lr": 0.02, "batch_size": 32}, 4000, ("cifar10", "digits")),
    "cifar10": DataSet({"num_server_rounds": 20, "lr": 0.02, "batch_size": 32}, 6000, ("mnist",)),
}


def images(name: str) -> tuple[Images, Groups]:
    """Return images of a data set, in a fixed random order, and their classes."""
    if name == "digits":
        data = load_digits()
        return (data.images * 15.9).astype(np.uint8), data.target
    archive = NpzFile(Path(os.environ[FOLDER]) / f"{name}.npz")
    y = archive.read("y_train").ravel().astype(np.int64)
    indices = np.random.default_rng(0).permutation(len(y))[: DATA_SETS[name].images]
    return archive.read("x_train")[indices], y[indices]


def clients_images(name: str) -> tuple[Images, npt.NDArray[np.str_]]:
    """Return the clients' images and classes, without the class that no client has."""
    x, y = images(name)
    is_used = y != int(os.environ[HELD_OUT])
    return x[is_used], y[is_used].astype(str)


digits, mnist, cifar10 = (partial(clients_images, name) for name in DATA_SETS)


def resized(x: Images, shape: tuple[int, ...]) -> Images:
    """Return images in another size ``(H, W)`` or ``(H, W, 3)``, and in its number of colours."""
    mode = "L" if len(shape) == 2 else "RGB"
    pictures = (Image.fromarray(image).convert(mode) for image in x)
    return np.stack(
        [np.asarray(picture.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)) for picture in pictures]
    )


def foreign(name: str) -> dict[str, Images]:
    """Return images that differ from all images of the clients, keyed by kind."""
    (x, y), held_out = images(name), int(os.environ[HELD_OUT])
    familiar = x[y != held_out][:QUERIES]
    noise = np.random.default_rng(1).integers(0, 256, (QUERIES, *x.shape[1:])).astype(np.uint8)
    other_images = {other: resized(images(other)[0][:QUERIES], x.shape[1:]) for other in DATA_SETS[name].sources}
    return {"noise": noise, "inverted": 255 - familiar, **other_images, "held-out class": x[y == held_out][:QUERIES]}


class Outputs(NamedTuple):
    """A network's outputs for n samples: embeddings ``(n, D)`` and logits.

    ``clients`` and ``classes`` are the inputs of the two branches' classifiers, scaled to unit length. ``blocks``
    contains the means and standard deviations of the first blocks' channels, or zeros if there are no channels.
    """

    clients: Embeddings
    classes: Embeddings
    unscaled: Embeddings
    class_logits: Floats
    client_logits: Floats
    blocks: Embeddings


@torch.no_grad()
def outputs_of(model: ClientModel, x: Tensor) -> Outputs:
    """Return the outputs of a two-branch network."""
    network: Any = model.members[0]
    unscaled: list[Tensor] = []
    handle = network.client_head.register_forward_pre_hook(lambda _, inputs: unscaled.append(inputs[0]))
    parts = []
    for part in torch.split(x, EVALUATION_BATCH):
        logits, (clients, *blocks) = network(part), network.client_embeddings(part)
        classes = normalize(network.model.body(part))
        parts.append((clients, classes, unscaled[-1], *logits, blocks[0] if blocks else torch.zeros(len(part), 1)))
    handle.remove()
    return Outputs(*(torch.cat(tensors).numpy() for tensors in zip(*parts, strict=True)))


def nearest_neighbour(train: Embeddings, embeddings: Embeddings) -> Floats:
    """Return the negative cosine to the fifth closest training sample, ``(n,)`` (Sun et al., 2022)."""
    return -np.sort(embeddings @ train.T, axis=1)[:, -NEIGHBOURS]


def distance_in(reference: Reference, name: str, outputs: Outputs) -> Floats:
    """Return the distances ``(n,)`` in an embedding, given its name in :class:`Outputs`."""
    return distances(reference, getattr(outputs, name))


def scores(train: Outputs, owner: Groups, y: Groups, prior: Floats) -> dict[str, Score]:
    """Return the compared scores, keyed by name. A higher score means farther from the clients' data."""
    pairs = owner * 1000 + y
    references = {
        (name, by): fit_reference([(getattr(train, name), groups)])
        for name in ("clients", "classes", "unscaled", "blocks")
        for by, groups in (("class", y), ("client", owner), ("client and class", pairs), ("all", 0 * y))
    }
    by_name: dict[str, Score] = {
        f"Mahalanobis, {title}, by {by}": partial(distance_in, references[name, by], name)
        for name, by, title in (
            ("clients", "client and class", "client branch"),
            ("clients", "class", "client branch"),
            ("clients", "client", "client branch"),
            ("classes", "client and class", "class branch"),
            ("unscaled", "client and class", "client branch without unit length"),
            ("blocks", "client and class", "first blocks"),
        )
    }
    close, wide = references["clients", "client and class"], references["clients", "all"]
    blocks = references["blocks", "client and class"]
    by_name[USED] = lambda o: np.maximum(distances(close, o.clients), distances(blocks, o.blocks))
    log_prior = np.log(prior)
    return by_name | {
        "relative Mahalanobis, client branch": lambda o: (
            distances(close, o.clients) ** 2 - distances(wide, o.clients) ** 2
        ),
        "nearest neighbours, client branch": lambda o: nearest_neighbour(train.clients, o.clients),
        "energy of the density ratios": lambda o: -np.logaddexp.reduce(o.client_logits - log_prior, axis=1),
        "largest logit - log prior": lambda o: -(o.client_logits - log_prior).max(axis=1),
        "largest density ratio": lambda o: (
            -(o.client_logits - log_prior - np.logaddexp.reduce(o.client_logits, axis=1, keepdims=True)).max(axis=1)
        ),
        "energy of the classes": lambda o: -np.logaddexp.reduce(o.class_logits, axis=1),
        "largest class probability": lambda o: np.logaddexp.reduce(o.class_logits, axis=1) - o.class_logits.max(axis=1),
    }


def measure(model: ClientModel, name: str) -> dict[str, dict[str, float]]:
    """Return each score's AUROC and share of alarms for each kind of foreign image, and its rate of false alarms."""
    workspace = Workspace(model.settings)
    data = [workspace.client_data(client) for client in range(model.settings.data.num_clients)]
    train, validation, test = (
        outputs_of(model, torch.cat([getattr(each, f"x_{split}") for each in data]))
        for split in ("train", "validation", "test")
    )
    sizes = np.array([len(each.y_train) for each in data])
    owner, y = np.repeat(np.arange(len(data)), sizes), torch.cat([each.y_train for each in data]).numpy()
    queries = {kind: outputs_of(model, model.prepare(list(x))) for kind, x in foreign(name).items()}
    results: dict[str, dict[str, float]] = {}
    for title, score in scores(train, owner, y, sizes / sizes.sum()).items():
        threshold, inside = conformal_threshold(score(validation), ALPHA), score(test)
        assert threshold is not None
        results[title] = {"false alarms": float((inside > threshold).mean())}
        for kind, outputs in queries.items():
            outside = score(outputs)
            truth = np.repeat([0, 1], [len(inside), len(outside)])
            results[title][kind] = float(roc_auc_score(truth, np.concatenate([inside, outside])))
            results[title][f"alarms, {kind}"] = float((outside > threshold).mean())
    return results


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder that holds mnist.npz and cifar10.npz.")] = Path("datasets"),
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("results/none-fits"),
    report: Annotated[Path, typer.Option(help="Output file.")] = Path("benchmarks/results/none-fits.json"),
) -> None:
    """Train on each data set, and score test samples and foreign images. Skip runs that already exist."""
    os.environ[FOLDER] = str(data_dir.absolute())
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, data_set in DATA_SETS.items():
        seeds = []
        for seed in SEEDS:
            os.environ[HELD_OUT] = str(3 * seed)
            run = f"{name}-{seed}"
            if not (output / run / "summary.json").is_file():
                settings = {**COMMON, **data_set.settings, "seed": seed, "run_name": run, "output_dir": str(output)}
                posy.run(dataset=f"benchmarks.none_fits:{name}", **settings)
            seeds.append(measure(posy.load(output / run).predictor(0), name))
        results[name] = {
            title: {kind: [each[title][kind] for each in seeds] for kind in kinds} for title, kinds in seeds[0].items()
        }
        kinds = [kind for kind in results[name][USED] if not kind.startswith("alarms")]
        rows = [(title, *(percent(row[kind]) for kind in kinds)) for title, row in results[name].items()]
        print_table(f"{name}: false alarms, and AUROC (%)", ("score", *kinds), rows)
        alarms = {kind.removeprefix("alarms, "): v for kind, v in results[name][USED].items() if "alarms" in kind}
        print_table(f"{name}: share of alarms (%), {USED}", list(alarms), [[percent(v) for v in alarms.values()]])
        report.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
