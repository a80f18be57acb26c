"""YAML as people write it: scalars mean what YAML 1.2 says, and no file does harm or hangs the reader.

PyYAML by itself reads YAML 1.1, where ``010`` is 8, ``1:30`` is 90, ``on`` is true and ``1e-3`` is a text.
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
"""Limits of what is read; the content of an anchor counts once for each alias."""

_TAG = "tag:yaml.org,2002:"
# The first pattern that matches a whole plain scalar is its type; without a match it is a text.
_KINDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_WRONG = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What PyYAML raises: it believes a tag such as !!int or !!timestamp until the text turns out to be something else."""


class _Loader(Composer, yaml.CSafeLoader):
    """Reads the core schema of YAML 1.2, by libyaml's parser; refuses keys given twice and endless nesting."""

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)  # composes in Python what libyaml has parsed, which is four times as fast
        self._depth = 0
        self._sizes: dict[int, tuple[yaml.Node, int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        """Compose a node, and count what it holds."""
        self._depth += 1
        event: Any = self.peek_event()
        alias, mark = isinstance(event, yaml.AliasEvent), event.start_mark
        if self._depth > MAX_DEPTH:
            raise ConstructorError(None, None, f"it is nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise ConstructorError(None, None, "an alias that stands for what it is in", mark)
        if not alias:
            held = [node.value] if isinstance(node, yaml.SequenceNode) else []
            held = list(zip(*node.value, strict=True)) if isinstance(node, yaml.MappingNode) else held
            sizes = [self._sizes[id(child)] for children in held for child in children]
            count, depth = 1 + sum(size[1] for size in sizes), 1 + max((size[2] for size in sizes), default=0)
            if count > MAX_NODES or depth > MAX_DEPTH:
                raise ConstructorError(None, None, f"it holds more than {MAX_NODES} values, with its aliases", mark)
            self._sizes[id(node)] = node, count, depth
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Read a mapping; PyYAML would silently take the last of two equal keys."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ConstructorError(None, None, f"{', '.join(twice)} given twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Read a whole number: 010 is ten."""
        text = str(self.construct_scalar(node))
        return int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else int(text)


_PATTERNS = [(_TAG + kind, re.compile(rf"(?:{pattern})\Z", re.ASCII)) for kind, pattern in _KINDS.items()]
_Loader.yaml_implicit_resolvers = {None: _PATTERNS}
_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Writes texts so that readers of YAML 1.1 and of 1.2 read them as texts."""


for _tag, _pattern in _PATTERNS:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def parse(text: str) -> Any:
    """Return what a text of YAML holds; raise :class:`ValueError` in one line if it is none or exceeds the limits."""
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
    """Return an object as a text of YAML, keys in their order."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of YAML that holds a mapping.

    Raises :class:`SettingsError` if it cannot be read, is not a file of at most 4 MiB, or holds something else.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            raise SettingsError(f"{path} must be a file of at most {MAX_BYTES >> 20} MiB")
        content = deepcopy(_parsed(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except SettingsError:
        raise
    except ValueError as error:  # a text that is not UTF-8 too
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"{path} must hold `key: value` lines, one for each setting")
    return content


_parsed = lru_cache(maxsize=1024)(parse)
"""What a text holds, which is not to be changed: a table reads the file of a run several times."""
