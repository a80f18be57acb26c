"""Texts as tokens: AG News, Sentiment140, and the word vocabulary they share."""

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from posy.data.dataset import Dataset, check_lengths, known_labels, numbered, text_dataset
from posy.data.errors import DataError, missing
from posy.data.files import check_fits, check_regular

PADDING, UNKNOWN = 0, 1
TABLE_GROWTH = 4
"""By how much a table grows, at the least, when its cells become Python's texts."""
MAX_LINE = 1 << 25
MAX_WORDS = 20_000
MAX_LENGTH = 200
_WORD = re.compile(r"\w+(?:'\w+)?")
_MIN_TEST = 8  # PPFE, appendix A.2: users with fewer test samples are removed


def tokenise(texts: Iterable[str], length: int = MAX_LENGTH, max_words: int = MAX_WORDS) -> tuple[np.ndarray, int]:
    """Turn texts into numbers of lower-case words.

    Parameters
    ----------
    texts : iterable of str
        N texts.
    length : int
        L: longer texts are cut, shorter ones padded with 0. A text without words is one unknown word.
    max_words : int
        The vocabulary holds the most frequent words, equally frequent ones in alphabetical order.

    Returns
    -------
    tuple
        ``(N, L)`` int64 tokens: 0 padding, 1 unknown, words from 2; and the number of tokens.
    """
    words = [words_of(text) for text in texts]
    counts = Counter(word for line in words for word in line)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    number = {word: token for token, word in enumerate(ranked, UNKNOWN + 1)}
    tokens = np.full((len(words), length), PADDING, np.int64)
    for row, line in zip(tokens, words, strict=True):
        found = [number.get(word, UNKNOWN) for word in line[:length]] or [UNKNOWN]
        row[: len(found)] = found
    return tokens, len(ranked) + 2


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def load_agnews(data_dir: Path) -> Dataset:
    """Read AG News: rows of class 1-4, title, description; 100 words of title and description."""
    names = ("World", "Sports", "Business", "Sci/Tech")
    pair = [data_dir / "agnews" / "train.csv", data_dir / "agnews" / "test.csv"]
    files = pair if any(path.is_file() for path in pair) else [data_dir / "agnews.csv"]
    if absent := [path for path in files if not path.is_file()]:
        looked_for = absent if files is pair else [*pair, *absent]
        raise missing("agnews", looked_for, "put there the rows: class 1-4, title, description")
    labels: list[int] = []
    texts: list[str] = []
    for path in files:
        for number, row in rows_of(path):
            if number == 1 and row[0].strip().lower() in ("class index", "class", "label"):
                continue  # some mirrors add a header
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DataError(f"{path}: row {number}: {row!r:.80}; needed are class 1 to 4, title, description")
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
    check_lengths(str(files[0]), rows=len(labels))
    tokens, vocabulary = tokenise(texts, 100)
    return text_dataset("agnews", tokens, np.array(labels, np.int64), names, vocabulary=vocabulary)


def load_sent140(data_dir: Path, test_fraction: float) -> Dataset:
    """Read Sentiment140: polarity 0 or 4, id, date, query, user, text; 64 words of the text.

    The user is the group; users whose test split would have fewer than 8 samples are left out (PPFE,
    appendix A.2).
    """
    published = "training.1600000.processed.noemoticon.csv"
    places = [data_dir / "sent140" / published, data_dir / published, data_dir / "sent140.csv"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise missing("sent140", places, "unpack trainingandtestdata.zip there")
    rows = []
    for number, row in rows_of(path, "latin-1"):
        if len(row) != 6 or row[0] not in ("0", "4"):
            raise DataError(
                f"{path}: row {number}: {row!r:.80}; needed are polarity 0 or 4, id, date, query, user, text"
            )
        rows.append((row[4], row[0] == "4", row[5]))
    tweets = Counter(user for user, _, _ in rows)
    rows = [row for row in rows if round(tweets[row[0]] * test_fraction) >= _MIN_TEST]
    if not rows:
        raise DataError(f"{path}: no user has {_MIN_TEST} test samples at test-fraction = {test_fraction}; raise it")
    tokens, vocabulary = tokenise((text for _, _, text in rows), 64)
    y = known_labels(np.array([positive for _, positive, _ in rows]), 2, str(path))
    groups = numbered(np.array([user for user, _, _ in rows]))
    return text_dataset("sent140", tokens, y, ("negative", "positive"), groups, vocabulary=vocabulary)


def rows_of(path: Path, encoding: str = "utf-8-sig", delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield number (from 1) and fields of the rows of a .csv file; empty lines are passed over.

    Raises
    ------
    DataError
        If it is no regular file, more than fits into memory, or cannot be read as text or as .csv.
    """
    check_fits(TABLE_GROWTH * check_regular(path), str(path))
    number = 0
    try:
        with path.open(encoding=encoding, newline="") as file:
            for number, row in enumerate(csv.reader(_lines(file, path), delimiter=delimiter), 1):
                if row:
                    yield number, row
    except csv.Error as error:
        raise DataError(f"{path}: row {number + 1}: not a .csv file that can be read ({error})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a text file in {encoding} ({error})") from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file that are no longer than a table's can be, and text."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE)
        if "\0" in line:
            raise DataError(f"{path}: line {number} holds a NUL byte; it is not a text file")
        if len(line) == MAX_LINE:
            raise DataError(f"{path}: line {number} is longer than {MAX_LINE:,} characters; it is not a table")
        if not line:
            return
        yield line
