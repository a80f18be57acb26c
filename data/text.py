"""Convert texts to tokens: word indices from a vocabulary, or from a hash that is the same on every machine."""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from posy.data.files import check_fits

PADDING, UNKNOWN = 0, 1
MAX_WORDS = 20_000
MAX_LENGTH = 200
_UNCHECKED = 1 << 26
"""Posy checks the free memory only for tokens that occupy more bytes than this."""
_WORD = re.compile(r"\w+(?:'\w+)?")


def tokenise(
    texts: Iterable[str], length: int = MAX_LENGTH, max_words: int = MAX_WORDS, rows: np.ndarray | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Convert the lower-cased words of N texts to tokens.

    Texts longer than L words are truncated, and shorter texts are padded with 0. A text without words becomes one
    unknown word. The vocabulary contains the ``max_words`` most frequent words of the texts at ``rows`` (``None``: all
    texts), with equally frequent words in alphabetical order. The function returns ``(N, L)`` int64 tokens (0: padding,
    1: unknown, from 2: words), and the words in token order.
    """
    lines = [_words(text) for text in texts]
    counted = lines if rows is None else [lines[row] for row in rows.tolist()]
    counts = Counter(word for line in counted for word in line)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    return _padded(lines, length, _numbers(ranked)), tuple(ranked)


def tokens_of(text: str, length: int, words: Sequence[str]) -> np.ndarray:
    """Return the tokens ``(L,)`` of a text for a vocabulary returned by :func:`tokenise`."""
    tokens: np.ndarray = all_tokens_of([text], length, words)[0]
    return tokens


def all_tokens_of(texts: Iterable[str], length: int, words: Sequence[str]) -> np.ndarray:
    """Return the tokens ``(N, L)`` of N texts for a vocabulary returned by :func:`tokenise`."""
    return _padded([_words(text) for text in texts], length, _numbers(words))


def hashed(texts: Iterable[str], length: int, vocabulary: int) -> np.ndarray:
    """Hash the lower-cased words of texts to tokens that are the same on every machine.

    The sites do not need a common vocabulary, so no site reveals its words. Different words may share a token. The
    function returns int64 tokens ``(N, L)`` as :func:`tokenise` does, with tokens 2 to V-1 for words.
    """
    lines = [_words(text)[:length] for text in texts]
    return _padded(lines, length, lambda word: 2 + zlib.crc32(word.encode()) % (vocabulary - 2))


def describe_tokens(length: int, vocabulary: int, has_words: bool | None) -> str:
    """Describe the tokens of a network's input, so that other programs can compute them.

    Parameters
    ----------
    length, vocabulary : int
        The number of tokens in a text, and the number of different tokens.
    has_words : bool or None
        Whether the words have a vocabulary. If it is false, their tokens are hashes. If it is None, the samples are
        tokens.
    """
    if has_words is None:
        return f"tokens from 1 to {vocabulary - 1}, padded with {PADDING} at the end"
    token = f"{UNKNOWN} + its position in preprocessing.words, counted from 1, or {UNKNOWN} if the list lacks it"
    if not has_words:
        token = f"2 + crc32(word in UTF-8) mod {vocabulary - 2}"
    return (
        f"tokens of the first {length} words of a text in lower case, padded with {PADDING} at the end; a word matches "
        f"{_WORD.pattern}; its token is {token}; a text without words consists of the token {UNKNOWN}"
    )


def _numbers(words: Iterable[str]) -> Callable[[str], int]:
    return defaultdict(lambda: UNKNOWN, {word: token for token, word in enumerate(words, UNKNOWN + 1)}).__getitem__


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _padded(lines: list[list[str]], length: int, token_of: Callable[[str], int]) -> np.ndarray:
    if (size := 8 * len(lines) * length) > _UNCHECKED:
        check_fits(size, f"{len(lines)} texts of {length} tokens")
    tokens = np.full((len(lines), length), PADDING, np.int64)
    for row, line in zip(tokens, lines, strict=True):
        numbers = [token_of(word) for word in line[:length]] or [UNKNOWN]
        row[: len(numbers)] = numbers
    return tokens
