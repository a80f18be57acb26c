"""Decide which columns of a table contain the label, the samples and the groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from posy.data.encoding import encoder_in
from posy.data.errors import DataError, Note
from posy.data.labels import LabelRule, label_name, nearly_equal
from posy.data.settings import DataSettings
from posy.metrics import CLASSES
from posy.settings import SettingsError

_SHOWN = 20  # maximum number of column names that a message lists


@dataclass(frozen=True)
class Columns:
    """The columns named in the settings, and the format of their cells. :func:`roles` infers the other roles."""

    label: str = ""
    inputs: tuple[str, ...] = ()
    group: str = ""
    split: str = ""
    """Rows with the same value in this column stay in the same split. The column is never an input or the label."""
    offered: tuple[str, ...] | None = None
    """The columns that the site's policy offers as inputs, or None without a policy. With a policy, Posy looks for the
    label outside these columns, whichever columns the run uses, so a run cannot choose the label."""
    categories: tuple[str, ...] = ()
    """Columns that contain categories, even if all of their values are numbers."""
    imputes: bool = False
    """Whether missing values are allowed in the input columns."""
    separator: str = "auto"
    decimal: str = "auto"
    """The settings with the same names."""
    target: str = CLASSES
    """The target in :mod:`posy.metrics`."""
    more_labels: tuple[str, ...] = ()
    """Further label or value columns after ``label``; empty for classes."""
    kind: str = "auto"
    """The setting ``sample-kind``."""
    of_no_client: bool = False
    """Whether the rows are a central test set. The group and split columns may then be missing, and Posy does not read
    them. :func:`posy.data.central.central_test` compares the input columns with the columns of the run."""
    lacks_groups: bool = False
    """Whether the partition is ``natural``, and no setting names the group column."""

    @classmethod
    def of(cls, settings: DataSettings, label: str = "") -> Self:
        """Return the columns named in the settings, or raise :class:`SettingsError` for a malformed list.

        ``label`` is the default of ``label-column``.
        """
        inputs = names_in("input-columns", settings.input_columns) if settings.input_columns else ()
        categories = names_in("categories", settings.categories) if settings.categories else ()
        if encoder := encoder_in(settings.encoder):
            categories = encoder.categorical
        label, target = settings.label_column or label, settings.target
        labels = names_in("label-column", label) if target != CLASSES and label else (label_name(label),)
        return cls(
            labels[0],
            inputs,
            label_name(settings.group_column),
            label_name(settings.split_column),
            categories=categories,
            imputes=settings.missing == "impute",
            separator=settings.separator,
            decimal=settings.decimal,
            target=target,
            more_labels=labels[1:],
            kind=settings.sample_kind,
            lacks_groups=settings.partition == "natural" and not settings.group_column,
        )

    def named(self) -> list[tuple[str, str]]:
        """Return a pair (setting key, column name) for each column named in the settings."""
        pairs = [("label-column", name) for name in (self.label, *self.more_labels)]
        pairs += [("group-column", self.group), ("split-column", self.split)]
        return [(key, name) for key, name in pairs if name] + [("input-columns", name) for name in self.inputs]


@dataclass(frozen=True)
class Roles:
    """The roles of a table's columns, as indices in the header."""

    label: int
    inputs: tuple[int, ...]
    group: int | None
    split: int | None
    is_text: bool  # whether the only input is a text column, even if every text is a number
    notes: tuple[str, ...]
    more_labels: tuple[int, ...] = ()  # further label or value columns; empty for classes
    rule: LabelRule | None = None
    """The rule that derives the classes from the label column, if the setting `label-column` is a comparison."""

    @property
    def labels(self) -> tuple[int, ...]:
        """The columns of the class, or of all labels or values."""
        return (self.label, *self.more_labels)


def roles(
    header: Sequence[str], columns: Columns, where: str, coded: Sequence[int] = (), images: Sequence[int] = ()
) -> Roles:
    """Return the roles of a table's columns.

    The label is the named column, else ``label``, else the only column in ``coded``, else the last column, which is
    reported in a note. ``coded`` lists the columns whose numbers refer to named classes. The samples are the named
    columns, else a column ``text``, else the only column in ``images``, else all columns except the label and the
    groups.

    Raises
    ------
    DataError
        If a named column does not exist, a column is named twice, or no column remains.
    """
    has_rule = columns.target == CLASSES and columns.label not in header
    rule = LabelRule.parse(columns.label) if has_rule else None
    columns = replace(columns, label=rule.column) if rule else columns
    if columns.of_no_client:
        _check_central(header, columns, where)
        return replace(_roles(header, columns, where, coded, images), rule=rule, group=None, split=None)
    assigned = replace(_roles(header, columns, where, coded, images), rule=rule)
    _check_categories(header, columns, assigned, where)
    return assigned


def _roles(header: Sequence[str], columns: Columns, where: str, coded: Sequence[int], images: Sequence[int]) -> Roles:
    """Return the roles of a table's columns as in :func:`roles`, if ``columns.label`` is the name of a column."""
    _check_named(header, columns, where)
    lower = [title.lower() for title in header]
    inputs = tuple(header.index(name) for name in columns.inputs)
    group, split = (header.index(n) if n and n in header else None for n in (columns.group, columns.split))
    free = [index for index in range(len(header)) if index not in inputs and index not in (group, split)]
    if not (columns.label or free):
        raise DataError(f"{where}: no column is left for the label; name fewer columns in input-columns")
    label, notes = _label(header, columns, free, coded)
    further = tuple(header.index(name) for name in columns.more_labels)
    repeated = [index for index in (label, *further) if index in inputs or index in (group, split)]
    if repeated:
        raise DataError(
            f"{where}: the column {header[repeated[0]]!r} is the site's label; use other columns, or name another "
            "label in the site's policy",
            "label-column",
            header[repeated[0]],
        )
    free = [index for index in free if index not in (label, *further)]
    if not columns.group:
        group = next((index for index in free if lower[index] == "group"), None)
    remaining = [index for index in free if index != group]
    if not (inputs or remaining):
        raise DataError(f"{where}: no column other than the label; at least one is needed")
    texts = [index for index in inputs or remaining if lower[index] == "text"] if len(inputs) < 2 else []
    if inputs:
        return Roles(label, inputs, group, split, bool(texts), tuple(notes), further)
    pictures = [index for index in remaining if index in images]
    if not texts and len(pictures) > 1:
        raise DataError(
            f"{where}: columns of images: {', '.join(header[index] for index in pictures)}; name one in input-columns"
        )
    chosen = tuple(texts or pictures or remaining)
    if unused := [header[index] for index in remaining if index not in chosen]:
        notes.append(Note(f"Posy does not use these columns: {', '.join(unused)}"))
    return Roles(label, chosen, group, split, bool(texts), tuple(notes), further)


def _check_categories(header: Sequence[str], columns: Columns, assigned: Roles, where: str) -> None:
    """Raise :class:`DataError` if a categorical column is not an input column."""
    inputs = {header[index] for index in assigned.inputs}
    if other := [name for name in columns.categories if name not in inputs]:
        raise DataError(
            f"{where}: categories = {other[0]!r}: this is not an input column; correct categories",
            "missing-column",
            other[0],
        )


def _check_named(header: Sequence[str], columns: Columns, where: str) -> None:
    """Raise :class:`DataError` if a named column does not exist, or if two settings name the same column."""
    named = columns.named()
    for key, name in named:
        if name not in header:
            if columns.of_no_client and key in ("group-column", "split-column"):
                continue
            more = f" and {len(header) - _SHOWN} more" if len(header) > _SHOWN else ""
            shown = ", ".join(header[:_SHOWN]) + more
            raise DataError(
                f"{where}: {key} = {name!r}: this column does not exist; the table has {shown}",
                "missing-column",
                "" if key == "split-column" else name,  # a site names this column in its policy
            )
        if other := [key2 for key2, name2 in named if name2 == name and key2 != key]:
            raise DataError(
                f"{where}: the column {name!r} is named by {key} and by {other[0]}; name it in only one of them"
            )


def _check_central(header: Sequence[str], columns: Columns, where: str) -> None:
    """Raise :class:`DataError` if a central test set lacks the training data's label or a named input column."""
    if missing := [name for name in (columns.label, *columns.more_labels) if name and name not in header]:
        raise DataError(
            f"{where} has no column {missing[0]}, which the training data uses as its label",
            "missing-column",
            missing[0],
        )
    if missing := [name for name in columns.inputs if name not in header]:
        raise DataError(f"{where}: columns missing: {', '.join(missing)}", "missing-column", missing[0])


def _label(header: Sequence[str], columns: Columns, free: Sequence[int], coded: Sequence[int]) -> tuple[int, list[str]]:
    """Return the index of the label column, and a note if Posy falls back to the last column."""
    if columns.label:
        return header.index(columns.label), []
    eligible: Sequence[int] = free
    if columns.offered is not None:
        indices = range(len(header))
        eligible = [i for i in indices if header[i] not in (*columns.offered, columns.split)] or indices
    likely = [index for index in eligible if header[index].lower() == "label"]
    likely = likely or [index for index in eligible if index in coded]
    if len(likely) == 1:
        return likely[0], []
    return eligible[-1], [Note(f"no column is named label; Posy uses the last column, {header[eligible[-1]]}")]


def name_notes(names: Sequence[str], header: Sequence[str]) -> list[str]:
    """Return notes on possible mistakes in the feature names."""
    notes = [Note(f"column {1 + header.index('')} has no name; Posy uses it as a feature")] if "" in names else []
    return [*notes, *(Note(f"columns with nearly equal names: {', '.join(twins)}") for twins in nearly_equal(names))]


def names_in(key: str, text: str) -> tuple[str, ...]:
    """Return the names in a setting, which is a comma-separated list or a JSON list."""
    names: Any = text.split(",")
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{key} = {text!r:.200}: not a JSON list ({error})") from error
    if not all(isinstance(name, str) for name in names):
        raise SettingsError(f"{key} = {text!r:.200}: expected a list of strings")
    listed_names = tuple(label_name(name) for name in names)
    if len(set(listed_names)) < len(listed_names) or (key == "classes" and not all(listed_names)):
        raise SettingsError(f"{key} = {text!r:.200}: expected names, without duplicates")
    return listed_names
