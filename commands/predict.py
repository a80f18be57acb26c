"""`posy predict` and `posy route`: classify new samples with the models of a run."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posy import figures
from posy.client_app.stored import ClientModel
from posy.data.errors import DataError
from posy.data.inputs import Preprocessing
from posy.data.readers.cells import has_decimal_commas, is_missing, number_in
from posy.data.readers.tables import rows_of, separator_of
from posy.data.settings import DataSettings
from posy.listing import print_table
from posy.metrics import LABELS, VALUES
from posy.server_app.record import Record
from posy.server_app.routing import Answer
from posy.storage import plain
from posy.words import title

MOST = 5
"""Maximum number of probabilities per table row."""
MOST_WARNED = 10
"""Maximum number of warnings about values far from the training samples."""
SMALLEST = 0.0005
"""Smallest probability that a table shows."""


def predict(run: str, client: str, files: Sequence[str], point: str = "", *, as_json: bool = False) -> None:
    """Print the predictions of a client's model for the samples in one or more files.

    Raises
    ------
    SettingsError
        If the run, the client or the model does not exist.
    DataError
        If a file does not contain samples in the format that the model expects.
    """
    record = Record.find(run, client)
    model = record.predictor(client, point)
    for text in record.warnings(client):
        _print_warning(text)
    names, samples = _samples(files, model)
    predictions = model.predict_all(samples)
    warnings = _warnings(model, names, samples)
    if as_json:
        answers = zip(names, predictions, warnings, strict=True)
        _print_json([{"input": name, **_as_dict(p, model), **_noted(texts)} for name, p, texts in answers])
        return
    heading = f"{title(model.client, model.site)}, {model.point} model of round {model.round}"
    heading += f" of {record.name}" * bool(record.library)
    if model.preprocessing.task.target == VALUES:
        values = [(name, *(f"{v:.6g}" for v in p.values())) for name, p in zip(names, predictions, strict=True)]
        print_table(heading, ("input", *model.class_names), values)
        return
    target = "labels" if model.preprocessing.task.target == LABELS else "class"
    rows = [(name, p.label, _shares(p.probabilities)) for name, p in zip(names, predictions, strict=True)]
    print_table(heading, ("input", target, "probabilities"), rows)


def route(run: str, files: Sequence[str], picture: Path | None = None, *, as_json: bool = False) -> None:
    """Print the predicted client and class of each sample or, if the method does not route, the clients' votes.

    Raises the same errors as :func:`predict`.
    """
    record = Record.find(run)
    first = record.router()
    names, samples = _samples(files, first)
    answers = record.route(samples)
    warnings = _warnings(first, names, samples)
    routed = bool(answers[0].clients)
    if picture is not None:
        _draw(picture, names, answers, record.titles)
    if as_json:
        rows = zip(names, answers, warnings, strict=True)
        _print_json([{"input": name, **_route_as_dict(a, first), **_noted(texts)} for name, a, texts in rows])
    elif routed:
        calibrated = answers[0].distance is not None
        columns = ("input", *["fit"] * calibrated, "clients", "class", "probabilities")
        cells = [
            (name, *([_fit(answer)] if calibrated else []), *_route_cells(answer, record.titles))
            for name, answer in zip(names, answers, strict=True)
        ]
        print_table("each input is routed to the client it most likely comes from", columns, cells)
    else:
        votes = [
            (name, answer.prediction.label, _shares(answer.prediction.probabilities))
            for name, answer in zip(names, answers, strict=True)
            if answer.prediction
        ]
        print_table("majority vote of the clients' local models", ("input", "class", "votes"), votes)


def _route_cells(answer: Answer, titles: Mapping[int, str]) -> tuple[str, str, str]:
    """Return the clients' probabilities, the class and its probabilities, or the client that can predict the class."""
    shares = _shares({titles[client]: share for client, share in answer.clients.items()})
    if answer.prediction is None:
        return shares, f"ask {titles[next(iter(answer.clients))]}", ""
    return shares, answer.prediction.label, _shares(answer.prediction.probabilities)


def _route_as_dict(answer: Answer, router: ClientModel) -> dict[str, Any]:
    """Return an answer as JSON; ``class`` is null if the model of the most probable client is not in the folder."""
    if not answer.clients:
        assert answer.prediction is not None
        return {"class": answer.prediction.label, "votes": answer.prediction.probabilities}
    if answer.prediction is None:
        prediction: dict[str, Any] = {"class": None, "probabilities": None}
    else:
        prediction = _as_dict(answer.prediction, router)
    return {"clients": answer.clients, "client": next(iter(answer.clients)), **_distance(answer), **prediction}


def _draw(picture: Path, names: Sequence[str], answers: Sequence[Answer], titles: Mapping[int, str]) -> None:
    """Plot the clients' probabilities, or the classes' shares of the votes, for each sample."""
    shares: list[dict[str, float]] = []
    for answer in answers:
        votes = answer.prediction.probabilities if answer.prediction else {}
        shares.append({titles[client]: share for client, share in answer.clients.items()} or votes)
    routed = bool(answers[0].clients)
    labels = [text for text in titles.values() if text in shares[0]] if routed else list(shares[0])
    matrix = np.array([[row.get(name, np.nan) for name in labels] for row in shares])
    label = "probability of the client" if routed else "share of the votes"
    figures.heatmaps([figures.Panel(matrix, "", "", "", label, xticks=labels, yticks=names)], picture)


def _warnings(model: ClientModel, names: Sequence[str], samples: Sequence[Any]) -> list[list[str]]:
    """Print and return warnings about each sample that differs strongly from the training samples."""
    warnings = model.warnings(samples)
    texts = [f"{name}: {text}" for name, rows in zip(names, warnings, strict=True) for text in rows]
    for text in texts[:MOST_WARNED]:
        _print_warning(text)
    if len(texts) > MOST_WARNED:
        _print_warning(f"{len(texts) - MOST_WARNED} more values are unlike the training samples")
    return warnings


def _print_warning(text: str) -> None:
    print(f"posy: warning: {text}", file=sys.stderr)


def _noted(warnings: Sequence[str]) -> dict[str, Sequence[str]]:
    return {"warnings": warnings} if warnings else {}


def _samples(files: Sequence[str], model: ClientModel) -> tuple[list[str], list[Any]]:
    """Return the names and the contents of the samples in one or more files, and warn about files without samples."""
    pairs_by_file = [(word, [*_read(word, model.preprocessing, model.settings.data)]) for word in files]
    empty = [word for word, pairs in pairs_by_file if not pairs]
    reason = "no samples found; a table needs at least one row below its header"
    if len(empty) == len(files):
        raise DataError(f"{', '.join(files)}: {reason}")
    for word in empty:
        print(f"posy: warning: {word}: {reason}", file=sys.stderr)
    pairs = [pair for _, file_pairs in pairs_by_file for pair in file_pairs]
    return [name for name, _ in pairs], [sample for _, sample in pairs]


def _read(word: str, preprocessing: Preprocessing, settings: DataSettings) -> Iterator[tuple[str, Any]]:
    """Yield the name and content of each sample in the file ``word``; ``word`` may also be the text itself."""
    path, kind = Path(word), preprocessing.task.kind
    suffix = path.suffix.lower()
    if suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable array ({error})") from error
        yield from ((f"{word} [{number}]", sample) for number, sample in enumerate(np.atleast_1d(array)))
    elif suffix == ".csv" and kind not in ("image", "series"):
        yield from _rows(path, preprocessing, settings)
    elif kind == "image":
        yield word, path
    elif preprocessing.sample_kind == "text":
        yield word, path if path.is_file() or suffix == ".txt" else word
    else:
        raise DataError(f"{word}: not a .csv or .npy file; the model expects {preprocessing.describe()}")


def _rows(path: Path, preprocessing: Preprocessing, settings: DataSettings) -> Iterator[tuple[str, Any]]:
    """Yield the name and content of each row of a table.

    If the model stores the names of its columns, ignore all other columns.
    """
    separator = separator_of(path, settings.separator)
    lines = rows_of(path, delimiter=separator)
    (_, header), rows = next(lines, (0, [])), list(lines)
    texts = preprocessing.sample_kind == "text"
    if texts:
        columns = [next((c for c in header if c.lower() == "text"), header[0] if len(header) == 1 else "text")]
    else:
        columns = list(preprocessing.columns) or [name for name in header if name.lower() not in ("label", "group")]
    if missing := [name for name in columns if name not in header]:
        absent = ", ".join(missing[:MOST])
        raise DataError(f"{path}: the columns {absent} are missing; the model expects {preprocessing.describe()}")
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path} row {number} has {len(row)} columns, but the header has {len(header)}")
    cells = {name: [row[header.index(name)] for _, row in rows] for name in columns}
    names = [f"{path} row {number}" for number, _ in rows]
    samples = cells[columns[0]] if texts else _values(cells, preprocessing, names, separator, settings)
    yield from zip(names, samples, strict=True)


def _values(
    cells: Mapping[str, Sequence[str]],
    preprocessing: Preprocessing,
    names: Sequence[str],
    separator: str,
    settings: DataSettings,
) -> Iterator[list[Any]]:
    """Yield the values of each row: numbers, or strings in categorical columns; None denotes a missing value."""
    encoder = preprocessing.encoder
    categorical = encoder.categorical if encoder else ()
    numbers = {name: column for name, column in cells.items() if name not in categorical}
    comma = has_decimal_commas(numbers, separator, settings.decimal, names[0] if names else "")
    for where, *row in zip(names, *cells.values(), strict=True):
        values: list[Any] = []
        for name, cell in zip(cells, row, strict=True):
            value = cell if name in categorical else number_in(cell, comma=comma)
            if encoder and is_missing(cell):
                value = None
            elif value is None:
                raise DataError(f"{where}, {name}: {cell!r:.40} is not a number")
            values.append(value)
        yield values


def _shares(shares: Mapping[str, float]) -> str:
    """Format the largest shares with their names, and omit shares that round to 0.0 %."""
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    texts = [f"{name} {100 * share:.1f} %" for name, share in ranked if share >= SMALLEST]
    return ", ".join(texts[:MOST]) + ", …" * (len(texts) > MOST)


def _fit(answer: Answer) -> str:
    """Describe whether a client's data fits a sample, such as ``none fits (1.84)``, with the relative distance."""
    return f"{'none fits' if answer.none_fits else 'fits'} ({answer.distance:.2f})"


def _distance(answer: Answer) -> dict[str, Any]:
    """Return the fields of an answer that exist if the distance is calibrated, for JSON."""
    if answer.distance is None:
        return {}
    return {"none_fits": answer.none_fits, "distance": plain(answer.distance)}


def _as_dict(prediction: Any, model: ClientModel) -> dict[str, Any]:
    """Return a model's prediction as JSON: its class, its list of labels, or its values."""
    target = model.preprocessing.task.target
    if target == VALUES:
        return {"values": prediction}
    if target == LABELS:
        labels = model.predicted_labels(prediction.probabilities)
        return {"labels": labels, "probabilities": prediction.probabilities}
    return {"class": prediction.label, "probabilities": prediction.probabilities}


def _print_json(rows: list[dict[str, Any]]) -> None:
    print(json.dumps(rows, indent=2, ensure_ascii=False))
