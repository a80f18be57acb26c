"""Read Arrow tables: .parquet files, and data sets of the library `datasets` from disk or the Hugging Face Hub."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns, Roles, name_notes, roles
from posy.data.dataset import Content
from posy.data.encoding import Categories, missing_value
from posy.data.errors import DataError, Note
from posy.data.files import check_fits, check_regular
from posy.data.labels import LabelRule, as_labels, label_name, numbered_groups
from posy.data.readers.cells import column_notes, decimals_in, is_missing, number_in, parse_columns
from posy.data.readers.functions import content_of
from posy.data.readers.image import Encoded, image_content
from posy.data.targets import as_targets
from posy.data.values import FLOAT32_MAX, precision_notes
from posy.extensions import format_error
from posy.metrics import CLASSES

HUB = "hf:"
"""Prefix of data sets on the Hugging Face Hub."""
_NAME = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?::(.+))?")
_FORMATS = frozenset({"arrow", "cache", "csv", "imagefolder", "json", "parquet", "text"})
"""File formats that `datasets` reads without unpickling, unlike pandas' formats."""
_INDEX = re.compile(r"__index_level_\d+__")  # a column that pandas adds to a .parquet file
_TESTS = ({"test"}, {"validation", "valid", "val", "dev"})


@dataclass(frozen=True)
class _Rows:
    """A table that contains the rows of all splits, one split after the other."""

    table: Any  # pyarrow.Table
    features: Mapping[str, Any]  # the columns' `datasets` feature types, if known
    splits: Sequence[tuple[str, int]]  # name and number of rows of each split
    where: str

    def at(self, row: int, column: str) -> str:
        """Return the location of a cell, for messages."""
        split = ""
        for name, length in self.splits:
            split = f"split {name}, " if len(self.splits) > 1 else ""
            if row < length:
                break
            row -= length
        return f"{self.where}: {split}row {row + 1}, column {column}"

    def kind(self, column: str) -> str:
        """Return the name of a column's type in `datasets`, or an empty string if it is unknown."""
        return type(self.features[column]).__name__ if column in self.features else ""


def is_saved(path: Path) -> bool:
    """Return whether a directory was written by ``save_to_disk`` from `datasets`."""
    # Unlike pathlib, os.path returns False if a path is invalid or cannot be read.
    is_single = all(os.path.isfile(path / name) for name in ("state.json", "dataset_info.json"))  # noqa: PTH113
    return is_single or os.path.isfile(path / "dataset_dict.json")  # noqa: PTH113


def read_saved(
    path: Path, columns: Columns, size: tuple[int, int] | None, mode: str | None, skip_unreadable: bool | None
) -> Content:
    """Read a folder that ``save_to_disk`` wrote. The arguments are as in :func:`posy.data.readers.own.read_own`."""
    import datasets  # noqa: PLC0415 - takes seconds to import

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged folder can make the library raise any error
        raise DataError(f"{path}: not a complete folder of datasets.save_to_disk ({format_error(error)})") from error
    rows, is_test, notes = _pooled(loaded, str(path))
    return _content(rows, path, columns, is_test, notes, size, mode, skip_unreadable)


def read_parquet(
    path: Path, columns: Columns, size: tuple[int, int] | None, mode: str | None, skip_unreadable: bool | None
) -> Content:
    """Read a .parquet file. The arguments are as in :func:`posy.data.readers.own.read_own`."""
    import pyarrow as pa  # noqa: PLC0415 - only Arrow data needs it
    from pyarrow import parquet  # noqa: PLC0415

    check_regular(path)
    try:
        with parquet.ParquetFile(path) as file:
            meta = file.metadata
            check_fits(sum(meta.row_group(k).total_byte_size for k in range(meta.num_row_groups)), str(path))
            table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: not a complete .parquet file ({format_error(error)})") from error
    features: Mapping[str, Any] = {}
    if b"huggingface" in (table.schema.metadata or {}):
        import datasets  # noqa: PLC0415 - takes seconds to import

        features = datasets.Features.from_arrow_schema(table.schema)
    rows = _Rows(table, features, [("", len(table))], str(path))
    return _content(rows, path, columns, None, [], size, mode, skip_unreadable)


def read_hub(name: str, columns: Columns, size: tuple[int, int] | None, download: bool) -> Content:
    """Read ``hf:owner/name`` or ``hf:owner/name:config`` from the Hugging Face Hub with the library `datasets`.

    Without ``download``, Posy reads the library's cache. It never runs code that comes with the data set, and never
    unpickles data.

    Raises
    ------
    DataError
        If the data set cannot be fetched, or its format is not supported.
    """
    import datasets  # noqa: PLC0415 - takes seconds to import
    from datasets.packaged_modules.cache.cache import Cache  # noqa: PLC0415

    where, match = f"dataset = {name!r}", _NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{where}: it must be hf:owner/name or hf:owner/name:config")
    repository, config = match[1], match[2]
    if Path(repository).exists():
        raise DataError(
            f"{where}: the working directory contains a folder {repository}, "
            "which the library would read; start Posy elsewhere"
        )
    try:
        if download:
            builder = datasets.load_dataset_builder(repository, config)
        else:
            short = repository.rpartition("/")[2]
            builder = Cache(dataset_name=short, repo_id=repository, config_name=config, version="auto", hash="auto")
        formats = {base.__module__.rpartition(".")[2] for base in type(builder).__mro__}
        if not formats & _FORMATS:
            raise DataError(f"{where}: its files are not in a supported format; allowed: {', '.join(sorted(_FORMATS))}")
        builder.download_and_prepare()
        loaded = builder.as_dataset()
    except DataError:
        raise
    except Exception as error:  # a network or Hub problem or a damaged file can cause any exception
        how = "fetched from the Hugging Face Hub" if download else "found in the library's cache (download = false)"
        raise DataError(
            f"{where}: it cannot be {how} ({format_error(error)}); on a machine "
            "with network access, save it with datasets.save_to_disk, and set dataset to the folder"
        ) from error
    rows, is_test, notes = _pooled(loaded, where)
    return _content(rows, Path(name), columns, is_test, notes, size, None, None)


def _pooled(loaded: Any, where: str) -> tuple[_Rows, np.ndarray | None, list[str]]:
    """Return the rows of a data set or of its splits, a mask of the test rows, and warnings.

    The test set is the split ``test``, else the validation split. If a split ``train`` exists, the function skips any
    further splits, such as ``unsupervised``.
    """
    import pyarrow as pa  # noqa: PLC0415 - only Arrow data needs it

    splits = dict(loaded) if isinstance(loaded, Mapping) else {"": loaded}
    notes: list[str] = []
    if "train" in splits and (unused := [name for name in splits if name not in {"train"}.union(*_TESTS)]):
        notes.append(Note(f"splits that are not used: {', '.join(unused)}", "some splits are not used"))
        splits = {name: split for name, split in splits.items() if name not in unused}
    if not splits:
        raise DataError(f"{where}: no split; at least one is needed")
    features = next(iter(splits.values())).features
    for name, split in splits.items():
        if split.features != features:
            first = next(iter(splits))
            raise DataError(
                f"{where}: split {name} has the columns {split.features}, but split {first} has {features}; "
                "they must be equal"
            )
    tables = [split.select_columns(list(features)).with_format("arrow")[:] for split in splits.values()]
    table = pa.concat_tables([part.replace_schema_metadata() for part in tables])
    tests = next((names for names in _TESTS if names & splits.keys()), set())
    is_test = np.repeat([name in tests for name in splits], [len(split) for split in splits.values()])
    rows = _Rows(table, features, [(name, len(split)) for name, split in splits.items()], where)
    return rows, is_test if is_test.any() and not is_test.all() else None, notes


def _content(
    rows: _Rows,
    path: Path,
    columns: Columns,
    is_test: np.ndarray | None,
    notes: list[str],
    size: tuple[int, int] | None,
    mode: str | None,
    skip_unreadable: bool | None,
) -> Content:
    """Return the content of a table. The arguments are as in :func:`posy.data.readers.own.read_own`."""
    names, header = _names(rows)
    coded, images = (
        [index for index, name in enumerate(names) if rows.kind(name) == kind] for kind in ("ClassLabel", "Image")
    )
    assigned = roles(header, columns, rows.where, coded, images)
    notes += assigned.notes
    y, targets = _targets(rows, names, header, columns, assigned)
    group_labels = None if assigned.group is None else _labels(rows, names[assigned.group], role="group")
    groups, group_names = (None, ()) if group_labels is None else numbered_groups(group_labels)
    patients = None if assigned.split is None else _labels(rows, names[assigned.split], role="patient")
    split_groups = None if patients is None else numbered_groups(patients)[0]
    inputs = [names[index] for index in assigned.inputs]
    if _is_mixed(rows, inputs, columns):
        check_fits(sum(_decoded(rows, name).nbytes for name in inputs), rows.where)
        x, categories = _table(rows, inputs, columns)
        columns_used = tuple(header[index] for index in assigned.inputs)
        notes += [*name_notes(columns_used, header), *column_notes(x, categories, columns_used)]
        return Content(
            path, "features", x, y, groups, is_test, columns=columns_used, group_names=group_names,
            read_notes=tuple(notes), categories=categories, split_groups=split_groups, **targets,
        )  # fmt: skip
    if assigned.inputs[0] in images:
        attributes = {"groups": groups, "is_test": is_test, "split_groups": split_groups}
        content = image_content(path, _files(rows, inputs[0]), y, size, mode, skip_unreadable, **attributes)
        return replace(content, group_names=group_names, read_notes=(*notes, *content.read_notes), **targets)
    column = _column(rows, inputs[0])
    if _is_text(column.type):
        texts = column.to_pylist()
        named: dict[str, Any] = {"group_names": group_names, "split_groups": split_groups, "read_notes": tuple(notes)}
        return Content(path, "text", texts, y, groups, is_test, **named, **targets)
    check_fits(sum(_column(rows, name).nbytes for name in inputs), rows.where)
    titles: tuple[str, ...] = ()
    if _is_number(column.type):
        titles = tuple(header[index] for index in assigned.inputs)
        x, precision = _features(rows, inputs)
        notes += [*precision, *name_notes(titles, header), *column_notes(x, (), titles)]
    else:
        x = _nested(column.combine_chunks(), 1, lambda row: rows.at(row, inputs[0]))
    parts = {"x": x, "y": y, "groups": group_labels, "patients": patients, "test": is_test}
    content = content_of({name: part for name, part in parts.items() if part is not None}, rows.where, path, columns)
    return replace(content, columns=titles, read_notes=(*notes, *content.read_notes), **targets)


def _names(rows: _Rows) -> tuple[list[str], list[str]]:
    """Return the columns' stored and normalised names, or raise :class:`DataError` for an unusable table."""
    names = [name for name in rows.table.column_names if not _INDEX.fullmatch(name)]
    header = [label_name(name) for name in names]
    if len(set(header)) < len(header) or len(header) < 2:
        raise DataError(f"{rows.where}: columns {', '.join(header)}; a table needs two or more, with distinct names")
    if not len(rows.table):
        raise DataError(f"{rows.where}: no rows; at least one is needed")
    return names, header


def _features(rows: _Rows, inputs: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Return numeric columns as features ``(N, F)``, float64, and notes on lost precision."""
    values = [_column(rows, name).to_numpy() for name in inputs]
    notes: list[str] = []
    for name, value in zip(inputs, values, strict=True):
        _check_numbers(rows, name, value)
        notes += precision_notes(value[:, None], np.float64, (name,))
    return np.column_stack([value.astype(np.float64) for value in values]), notes


def _check_numbers(rows: _Rows, name: str, values: np.ndarray) -> None:
    """Raise :class:`DataError` for the first value of a column that is not a finite float32 number."""
    if (invalid := ~(np.abs(values.astype(np.float64)) <= FLOAT32_MAX)).any():
        raise DataError(
            f"{rows.at(int(invalid.argmax()), name)}: {values[invalid][0]}; "
            "only finite numbers in the range of float32 are allowed",
            "not-a-number",
            name,
        )


def _targets(
    rows: _Rows, names: Sequence[str], header: Sequence[str], columns: Columns, assigned: Roles
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the classes ``(N,)``, or the labels or values ``(N, K)`` and their attributes of :class:`Content`."""
    titles = tuple(header[index] for index in assigned.labels)
    if columns.target == CLASSES:
        return _labels(rows, names[assigned.label], assigned.rule), {"label_columns": titles}
    y, _ = as_targets(_numbers(rows, [names[i] for i in assigned.labels]), columns.target, rows.where, titles)
    return y, {"target": columns.target, "class_names": titles, "label_columns": titles}


def _numbers(rows: _Rows, names: Sequence[str]) -> np.ndarray:
    """Return the numbers ``(N, K)`` in the label or value columns."""
    if other := [name for name in names if not _is_number(_column(rows, name).type)]:
        raise DataError(
            f"{rows.where}: column {other[0]} of type {_column(rows, other[0]).type}; labels of a multi-label task "
            "and values of a regression must be numbers",
            "wrong-target",
            other[0],
        )
    return _features(rows, names)[0]


def _column(rows: _Rows, name: str) -> Any:
    """Return a column, decoded if it is dictionary-encoded, or raise :class:`DataError` if a cell is empty."""
    column = _decoded(rows, name)
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(
            f"{rows.at(first, name)}: it is empty; each row needs a value (missing=impute replaces missing inputs)",
            "missing-value",
            name,
            column.null_count,
        )
    return column


def _decoded(rows: _Rows, name: str) -> Any:
    """Return a column, decoded if it is dictionary-encoded."""
    import pyarrow as pa  # noqa: PLC0415 - only Arrow data needs it

    column = rows.table.column(name)
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_mixed(rows: _Rows, inputs: Sequence[str], columns: Columns) -> bool:
    """Return whether the inputs are numeric and string columns that contain categories or missing values.

    Raise :class:`DataError` if there are several inputs, and one of them is of another type.
    """
    parts = [_decoded(rows, name) for name in inputs]
    plain = [_is_number(part.type) or _is_text(part.type) for part in parts]
    if len(inputs) > 1 and not all(plain):
        other = plain.index(False)
        raise DataError(
            f"{rows.where}: column {inputs[other]} of type {parts[other].type} is not the only input; name "
            "columns of numbers and strings, or one of images, texts or lists of numbers, in input-columns"
        )
    if len(inputs) == 1 and not columns.categories:
        return columns.imputes and _is_number(parts[0].type)
    return all(plain) and (bool(columns.categories) or columns.imputes or any(_is_text(part.type) for part in parts))


def _table(rows: _Rows, inputs: Sequence[str], columns: Columns) -> tuple[np.ndarray, Categories]:
    """Return numeric and string columns as :func:`posy.data.readers.cells.parse_columns` does."""
    x = np.empty((len(rows.table), len(inputs)))
    categories: list[tuple[str, ...] | None] = []
    for number, name in enumerate(inputs):
        column, title = _decoded(rows, name), label_name(name)
        if _is_number(column.type) and title not in columns.categories:
            x[:, number], names = column.to_numpy().astype(np.float64), None
            _check_numbers(rows, name, np.nan_to_num(x[:, number], nan=0.0, posinf=np.inf, neginf=-np.inf))
        else:
            cells = ["" if cell is None else str(cell) for cell in column.to_pylist()]
            parsed = parse_columns({title: cells}, columns.categories, comma=False)
            if parsed is None:
                raise _mixed_cells(rows, name, cells)
            x[:, [number]], names = parsed[0], parsed[1][0] if parsed[1] else None
        if not columns.imputes and (gaps := np.isnan(x[:, number])).any():
            where = rows.at(int(gaps.argmax()), name)
            raise missing_value(f"{where}: it is empty", title, int(gaps.sum()))
        categories.append(names)
    return x, tuple(categories) if any(names is not None for names in categories) else ()


def _mixed_cells(rows: _Rows, name: str, cells: Sequence[str]) -> DataError:
    """Return the error for a string column that contains some numbers."""
    row = next(row for row, cell in enumerate(cells) if not is_missing(cell) and number_in(cell) is None)
    return DataError(
        f"{rows.at(row, name)}: {cells[row]!r} in a column with numbers; correct it, or list categorical columns in "
        "categories",
        "not-a-number",
        name,
    )


def _labels(rows: _Rows, name: str, rule: LabelRule | None = None, *, role: str = "label") -> np.ndarray:
    """Return the labels, groups or patients (``role``) in a column. Indices of named classes become class names."""
    if role == "label" and rule is None:
        _check_no_decimals(rows, name)
    column = _column(rows, name)
    where = f"{rows.where}: column {name}"
    if rule is not None:
        cells = column.to_numpy().astype(np.float64) if _is_number(column.type) else column.to_pylist()
        values = np.array([math.nan if (v := number_in(str(cell))) is None else v for cell in cells])
        if (wrong := ~np.isfinite(values)).any():
            text = f"{rows.at(int(wrong.argmax()), name)}: {cells[int(wrong.argmax())]!r}; the rule in label-column"
            raise DataError(f"{text} needs numbers", "wrong-label", name)
        return rule(values)
    if rows.kind(name) == "ClassLabel":
        classes, numbers = rows.features[name].names, column.to_numpy()
        if (invalid := (numbers < 0) | (numbers >= len(classes))).any():
            allowed = f"allowed: 0 to {len(classes) - 1}, the numbers of its classes"
            raise DataError(
                f"{rows.at(int(invalid.argmax()), name)}: label {numbers[invalid][0]}; {allowed}", "wrong-label", name
            )
        return as_labels(np.array(classes)[numbers], where, role=role)
    if _is_text(column.type):
        return as_labels(np.array(column.to_pylist()), where, role=role)
    if not _is_number(column.type):
        raise DataError(f"{where}: {role}s of type {column.type}; whole numbers and strings are allowed")
    return as_labels(column.to_numpy(), where, role=role)


def _check_no_decimals(rows: _Rows, name: str) -> None:
    """Raise :class:`DataError` if a column of class labels contains decimal numbers, besides missing values."""
    from pyarrow import types  # noqa: PLC0415 - only Arrow data needs it

    column = _decoded(rows, name)
    if _is_text(column.type):
        cells = column.to_pylist()
        decimals = decimals_in({cell for cell in cells if cell is not None})
        row = next((row for row, cell in enumerate(cells) if cell in decimals), None)
        remedy = "store them as numbers and set task=regression"
    elif types.is_floating(column.type):
        cells = column.to_numpy()
        rows_with_decimals = np.flatnonzero(np.isfinite(cells) & (cells != np.floor(cells)))
        row = int(rows_with_decimals[0]) if rows_with_decimals.size else None
        remedy = "set task=regression"
    else:
        return
    if row is not None:
        raise DataError(
            f"{rows.at(row, name)}: {str(cells[row])!r}; labels are whole numbers or strings; to predict numbers, "
            f"{remedy}",
            "wrong-label",
            name,
        )


def _files(rows: _Rows, name: str) -> list[Path | Encoded]:
    """Return the image files in a column. A cell with only a path names a file on this machine."""
    files: list[Path | Encoded] = []
    for row, cell in enumerate(value for chunk in _column(rows, name).chunks for value in chunk):
        if cell["bytes"].is_valid:
            files.append(Encoded(rows.at(row, name), cell["bytes"].as_buffer()))
        elif cell["path"].is_valid:
            files.append(Path(cell["path"].as_py()))
        else:
            raise DataError(f"{rows.at(row, name)}: it is empty; each row needs an image", "missing-value", name)
    return files


def _nested(values: Any, lists_per_row: int, locate: Callable[[int], str]) -> np.ndarray:
    """Return nested lists of numbers, all of the same shape, as an array.

    Each row of the table corresponds to ``lists_per_row`` entries of ``values``.
    """
    import pyarrow as pa  # noqa: PLC0415 - only Arrow data needs it
    from pyarrow import compute  # noqa: PLC0415

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if values.null_count:
        first = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{locate(first // lists_per_row)}: a value is missing; only numbers are allowed", "missing-value"
        )
    if _is_number(values.type):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    kind = pa.types
    if not (kind.is_list(values.type) or kind.is_large_list(values.type) or kind.is_fixed_size_list(values.type)):
        raise DataError(
            f"{locate(0)}: values of type {values.type}; allowed: images, texts, numbers, and lists of numbers; "
            "select columns with input-columns"
        )
    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
    if (unlike := lengths != lengths[0]).any():
        first = int(unlike.argmax())
        raise DataError(
            f"{locate(first // lists_per_row)}: a list of {lengths[first]} entries, but the first list has "
            f"{lengths[0]}; all lists must have the same length"
        )
    inner = _nested(values.flatten(), lists_per_row * max(1, int(lengths[0])), locate)
    return inner.reshape(len(values), int(lengths[0]), *inner.shape[1:])


def _is_number(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415 - only Arrow data needs it

    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415 - only Arrow data needs it

    return bool(types.is_string(kind) or types.is_large_string(kind))
