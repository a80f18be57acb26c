"""Read and write YAML with YAML 1.2 scalars. A malicious file can neither cause harm nor block the reader.

By default, PyYAML reads YAML 1.1, where ``010`` is 8, ``1:30`` is 90, ``on`` is true and ``1e-3`` is a string.
"""

import re
import stat
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError

from posy.settings import SettingsError

MAX_BYTES, MAX_DEPTH, MAX_NODES = 4 << 20, 50, 200_000
"""Limits for a file. Each alias counts all values of its anchor again."""

_TAG = "tag:yaml.org,2002:"
# A plain scalar has the type of the first pattern that matches all of it. If none matches, it is a string.
_KINDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_WRONG = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions that PyYAML may raise, for example if a text does not match its tag, such as !!int or !!timestamp."""


class _Loader(Composer, yaml.CSafeLoader):
    """A loader for the YAML 1.2 core schema, based on libyaml, that rejects duplicate keys and excessive nesting."""

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)  # libyaml's parser is four times as fast as a parser in Python
        self._depth = 0
        self._sizes: dict[int, tuple[yaml.Node, int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        """Compose a node, and count its values."""
        self._depth += 1
        event: Any = self.peek_event()
        alias, mark = isinstance(event, yaml.AliasEvent), event.start_mark
        if self._depth > MAX_DEPTH:
            raise ConstructorError(None, None, f"it is nested more than {MAX_DEPTH} levels deep", mark)
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise ConstructorError(None, None, "an alias that contains itself", mark)
        if not alias:
            groups = [node.value] if isinstance(node, yaml.SequenceNode) else []
            groups = list(zip(*node.value, strict=True)) if isinstance(node, yaml.MappingNode) else groups
            sizes = [self._sizes[id(child)] for children in groups for child in children]
            count, depth = 1 + sum(size[1] for size in sizes), 1 + max((size[2] for size in sizes), default=0)
            if count > MAX_NODES or depth > MAX_DEPTH:
                raise ConstructorError(None, None, f"it has more than {MAX_NODES} values, including aliases", mark)
            self._sizes[id(node)] = node, count, depth
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, and reject duplicate keys; PyYAML would silently use the last value."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if duplicates := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ConstructorError(None, None, f"{', '.join(duplicates)} given twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Construct an integer; 010 is ten."""
        text = str(self.construct_scalar(node))
        return int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else int(text)


_PATTERNS = [(_TAG + kind, re.compile(rf"(?:{pattern})\Z", re.ASCII)) for kind, pattern in _KINDS.items()]
_Loader.yaml_implicit_resolvers = {None: _PATTERNS}
_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Dumper that writes strings so that both YAML 1.1 and YAML 1.2 readers load them as strings."""


for _tag, _pattern in _PATTERNS:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def parse(text: str) -> Any:
    """Return the content of a YAML text. Raise :class:`ValueError` if it is malformed or exceeds the limits."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except _WRONG as error:
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        mark = getattr(error, "problem_mark", None)
        raise ValueError(problem + (f" (line {mark.line + 1})" if mark else "")) from error
    finally:
        if loader is not None:
            loader.dispose()


def dump(content: Any) -> str:
    """Return an object as YAML, keeping the order of keys."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path, keys: tuple[type, ...] = (str,)) -> dict[Any, Any]:
    """Return the mapping in a YAML file. Its keys must have one of the types ``keys``.

    Raise :class:`SettingsError` if the file cannot be read, is larger than 4 MiB, is not a regular file, or does not
    contain a mapping.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise SettingsError(f"{path} must be a file of at most {MAX_BYTES >> 20} MiB")
        content = deepcopy(_parsed(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except SettingsError:
        raise
    except ValueError as error:  # including text that is not UTF-8
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(type(key) in keys for key in content):
        raise SettingsError(f"{path} must hold `key: value` lines, one for each setting")
    return content


_parsed = lru_cache(maxsize=1024)(parse)
"""A cached version of :func:`parse`, because building a table reads a run's file several times.

Do not modify its results.
"""
