"""What people bring along: functions and classes of files beside their work, or of packages that are installed."""

import ast
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import Any

from posy.paths import absolute, is_file
from posy.settings import OWN, SettingsError, shown

BUNDLED = "own"
"""Folder of the app's bundle in which people's own files travel to the SuperLink and the nodes."""
OWN_MODULE = "posy_own_"
"""What the names of modules begin with that are imported from a file."""
_BUNDLE = Path(__file__).resolve().parent.parent


def is_own(text: str) -> bool:
    """Tell whether a setting names something of people's own, as in ``mynets:resnet``."""
    return OWN.fullmatch(text) is not None


def word_of(method: str) -> str:
    """Return what the keys of a method's settings begin with: its name; of one of people's own, that in lower case."""
    return method.rpartition(":")[2].lower()


def located(text: str) -> str:
    """Return ``file.py:name`` with the absolute path of the file that ``module:name`` is of.

    The file is looked for where the run was started. Where there is none, an installed module is meant. What has
    travelled with the run, ``own/file.py:name``, is said in the same way everywhere, and is ``file.py`` to whoever
    uses the models of that run.
    """
    module, _, name = text.rpartition(":")
    if module.startswith(f"{BUNDLED}/"):
        if is_file(_BUNDLE / module):
            return text
        module = module.removeprefix(f"{BUNDLED}/")
    path = absolute(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    return f"{path}:{name}" if is_file(path) else text


def to_travel(text: str) -> tuple[str, dict[str, Path]]:
    """Return what ``module:name`` is called in the app's bundle, and which files go there, by their places in it.

    These are the file that it names and those beside that which are imported by it. What is installed stays as it is,
    and must be installed wherever the run goes.
    """
    place, _, name = located(text).rpartition(":")
    file = Path(place)
    if not file.is_absolute():
        return text, {}
    files = {f"{BUNDLED}/{path.relative_to(file.parent).as_posix()}": path for path in with_neighbours(file)}
    return f"{BUNDLED}/{file.name}:{name}", files


def with_neighbours(file: Path) -> list[Path]:
    """Return a file, and the modules and packages beside it that it imports, directly or through each other."""
    found, left = [file], [file]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_bytes())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for first in {name.partition(".")[0] for name in names} - {""}:
                module, package = file.parent / f"{first}.py", file.parent / first
                parts = [module] if is_file(module) else []
                parts = sorted(package.rglob("*.py")) if is_file(package / "__init__.py") else parts
                fresh = [part for part in parts if part not in found]
                found += fresh
                left += fresh
    return found


def module_of(text: str, key: str) -> ModuleType:
    """Return the module of ``module:name``; ``key`` is the setting that names it, for the message of an error.

    Raises
    ------
    SettingsError
        If there is no such file or module, or it cannot be imported.
    """
    return _module(located(text).rpartition(":")[0], f"{key} = {shown(text)}")


def load(text: str, key: str) -> Any:
    """Return what ``module:name`` names.

    Raises
    ------
    SettingsError
        As :func:`module_of` does, and if the module holds no such name.
    """
    module, name = module_of(text, key), text.rpartition(":")[2]
    if not hasattr(module, name):
        known = ", ".join(word for word in vars(module) if not word.startswith("_")) or "nothing"
        place = located(text).rpartition(":")[0]
        raise SettingsError(f"{key} = {shown(text)}: {place} holds no {name}; it holds {known}")
    return getattr(module, name)


def said(error: Exception) -> str:
    """Return what an exception says, on one line, and the line of people's own file that has raised it, if one has."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if is_custom(frame)]
    return f"{text} ({Path(frames[-1].f_code.co_filename).name}, line {frames[-1].f_lineno})" if frames else text


_LONGEST = 300
"""Characters of what an exception says that are repeated."""
_TRAVELLED = (
    "; it has travelled with the run: whoever uses its models is in the folder that holds it, and a run that is "
    "resumed on a SuperLink is given its own code again, as when it was first submitted"
)


@lru_cache(maxsize=64)
def _module(name: str, what: str) -> ModuleType:
    """Import a file or an installed module."""
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = _BUNDLE / name
        if not is_file(path):
            travelled = name.startswith(f"{BUNDLED}/")
            raise SettingsError(f"{what}: there is no file {path.name if travelled else path}{_TRAVELLED * travelled}")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that its neighbours stand in for nothing
        spec = importlib.util.spec_from_file_location(f"{OWN_MODULE}{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] == error.name:
            where = f"a file {name}.py where the run was started"
            raise SettingsError(f"{what}: there is neither {where} nor such a module") from error
        raise SettingsError(f"{what}: {name} cannot be imported ({error})") from error
    except SettingsError:
        raise
    except Exception as error:  # whatever the code of somebody else may raise
        raise SettingsError(f"{what}: {name} cannot be imported ({said(error)})") from error
    return module


def is_custom(frame: FrameType) -> bool:
    """Return whether a frame belongs to custom code that was imported from a file."""
    return str(frame.f_globals.get("__name__", "")).startswith(OWN_MODULE)
