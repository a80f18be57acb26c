"""Which columns of a table are the label, the samples and the groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from posy.data.errors import DataError, Note
from posy.data.labels import label_name, nearly_equal
from posy.data.settings import DataSettings
from posy.settings import SettingsError

_SHOWN = 20  # names of columns that a message lists


@dataclass(frozen=True)
class Columns:
    """The columns that the settings name; where they are silent, the names in the table decide."""

    label: str = ""
    inputs: tuple[str, ...] = ()
    group: str = ""
    offered: tuple[str, ...] | None = None
    """With a policy: the columns that it offers as inputs. The label is then one of the other columns, whatever columns
    the run uses, so that no run chooses the label."""

    @classmethod
    def of(cls, settings: DataSettings) -> Self:
        """Return the columns that settings name, or raise :class:`SettingsError` for a list that is none."""
        inputs = names_in("input-columns", settings.input_columns) if settings.input_columns else ()
        return cls(label_name(settings.label_column), inputs, label_name(settings.group_column))

    def named(self) -> list[tuple[str, str]]:
        """Return the names that are given, each with the key of its setting."""
        pairs = [("label-column", self.label), ("group-column", self.group)]
        return [(key, name) for key, name in pairs if name] + [("input-columns", name) for name in self.inputs]


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are, by their places in its header."""

    label: int
    inputs: tuple[int, ...]
    group: int | None
    is_text: bool  # the only input is a text, whatever stands in it
    notes: tuple[str, ...]


def roles(
    header: Sequence[str], columns: Columns, where: str, coded: Sequence[int] = (), images: Sequence[int] = ()
) -> Roles:
    """Return what the columns of a table are.

    The label is the column that is named, else ``label``, else the only one of ``coded``, which hold numbers of named
    classes, else the last, which is noted. The samples are the columns that are named; else a column ``text``; else the
    only one of ``images``; else all others but the groups.

    Raises
    ------
    DataError
        If there is no column of a name, one is named twice, or none is left.
    """
    named = columns.named()
    for key, name in named:
        if name not in header:
            more = f" and {len(header) - _SHOWN} more" if len(header) > _SHOWN else ""
            shown = ", ".join(header[:_SHOWN]) + more
            raise DataError(
                f"{where}: {key} = {name!r}: there is no such column; there are {shown}", "missing-column", name
            )
        if other := [them for them, twin in named if twin == name and them != key]:
            raise DataError(f"{where}: the column {name!r} is named by {key} and by {other[0]}; it can be one of them")
    lower = [title.lower() for title in header]
    inputs = [header.index(name) for name in columns.inputs]
    group = header.index(columns.group) if columns.group else None
    free = [place for place in range(len(header)) if place not in inputs and place != group]
    if not (columns.label or free):
        raise DataError(f"{where}: no column is left for the label; name fewer in input-columns")
    eligible = free
    if columns.offered is not None:
        places = range(len(header))
        eligible = [place for place in places if header[place] not in columns.offered] or list(places)
    likely = [place for place in eligible if lower[place] == "label"] or [place for place in eligible if place in coded]
    label = header.index(columns.label) if columns.label else (likely if len(likely) == 1 else eligible)[-1]
    if label in inputs or label == group:
        raise DataError(
            f"{where}: the column {header[label]!r} is the label of the site; use other columns, or name another label "
            "in the policy of the site",
            "label-column",
            header[label],
        )
    notes = []
    if not columns.label and len(likely) != 1:
        notes.append(Note(f"no column is named label; Posy uses the last one, {header[label]}"))
    free = [place for place in free if place != label]
    if group is None and (known := [place for place in free if lower[place] == "group"]):
        group = known[0]
    others = [place for place in free if place != group]
    if not (inputs or others):
        raise DataError(f"{where}: no column beside the label; at least one is needed")
    texts = [place for place in inputs or others if lower[place] == "text"] if len(inputs) < 2 else []
    pictures = [place for place in others if place in images]
    if inputs:
        return Roles(label, tuple(inputs), group, bool(texts), tuple(notes))
    if not texts and len(pictures) > 1:
        raise DataError(
            f"{where}: columns of images: {', '.join(header[place] for place in pictures)}; name one in input-columns"
        )
    chosen = tuple(texts or pictures or others)
    if unused := [header[place] for place in others if place not in chosen]:
        notes.append(Note(f"Posy does not use these columns: {', '.join(unused)}"))
    return Roles(label, chosen, group, bool(texts), tuple(notes))


def name_notes(names: Sequence[str], header: Sequence[str]) -> list[str]:
    """Return what may be a mistake in the names of features."""
    notes = [Note(f"column {1 + header.index('')} has no name and is a feature")] if "" in names else []
    return [*notes, *(Note(f"columns of nearly the same name: {', '.join(twins)}") for twins in nearly_equal(names))]


def names_in(key: str, text: str) -> tuple[str, ...]:
    """Return the names of a setting that lists them with commas between, or as JSON."""
    names: Any = text.split(",")
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{key} = {text!r:.200}: not a JSON list ({error})") from error
    if not all(isinstance(name, str) for name in names):
        raise SettingsError(f"{key} = {text!r:.200}: needed is a list of texts")
    found = tuple(label_name(name) for name in names)
    if len(set(found)) < len(found) or (key == "classes" and not all(found)):
        raise SettingsError(f"{key} = {text!r:.200}: needed are names, each once")
    return found
