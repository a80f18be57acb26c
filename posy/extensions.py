"""Load custom code: functions and classes from the user's files or from installed packages."""

import ast
import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import Any

from posy.paths import absolute, is_file, sha256_of
from posy.settings import CUSTOM_NAME, SettingsError, quoted

BUNDLED = "own"
"""Folder for custom files in the app's bundle, which a run sends to the SuperLink and the nodes."""
CUSTOM_MODULE = "posy_own_"
"""Prefix of the module names of code that Posy imports from a file."""
_BUNDLE = Path(__file__).resolve().parent.parent


def is_custom(text: str) -> bool:
    """Return whether a setting names custom code, as in ``mynets:resnet``."""
    return CUSTOM_NAME.fullmatch(text) is not None


def key_prefix(method: str) -> str:
    """Return the key prefix of a method's settings: the method's name, or a custom class's name in lower case."""
    return method.rpartition(":")[2].lower()


def located(text: str) -> str:
    """Return ``file.py:name`` with the absolute path of the file that contains ``module:name``.

    Posy looks for the file in the directory where the run was started. If the file does not exist, ``text`` names an
    installed module and is returned unchanged. ``own/file.py:name`` refers to a file in the bundle on every machine.
    Outside the bundle, for example when a user loads the run's models, this name refers to the user's ``file.py``.
    """
    module, _, name = text.rpartition(":")
    if module.startswith(f"{BUNDLED}/"):
        if is_file(_BUNDLE / module):
            return text
        module = module.removeprefix(f"{BUNDLED}/")
    path = absolute(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    return f"{path}:{name}" if is_file(path) else text


def bundle_files(text: str) -> tuple[str, dict[str, Path]]:
    """Return the name of ``module:name`` in the app's bundle, and its files, keyed by their paths in the bundle.

    The files are the named file and the modules that it imports from its folder. An installed module keeps its name
    and must be installed on every machine of the run.
    """
    origin, _, name = located(text).rpartition(":")
    file = Path(origin)
    if not file.is_absolute():
        return text, {}
    files = {f"{BUNDLED}/{path.relative_to(file.parent).as_posix()}": path for path in local_imports(file)}
    return f"{BUNDLED}/{file.name}:{name}", files


def local_imports(file: Path) -> list[Path]:
    """Return a file, and the modules and packages in its folder that it imports directly or indirectly."""
    files, queue = [file], [file]
    while queue:
        for node in ast.walk(ast.parse(queue.pop().read_bytes())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for root in {name.partition(".")[0] for name in names} - {""}:
                module, package = file.parent / f"{root}.py", file.parent / root
                parts = [module] if is_file(module) else []
                parts = sorted(package.rglob("*.py")) if is_file(package / "__init__.py") else parts
                new_files = [part for part in parts if part not in files]
                files += new_files
                queue += new_files
    return files


def code_digest(text: str) -> str:
    """Return the SHA-256 of the file of ``module:name`` and of its local imports; empty for an installed module."""
    file = _BUNDLE / located(text).rpartition(":")[0]
    if not is_file(file):
        return ""
    try:
        files = local_imports(file)
    except SyntaxError:  # importing the file reports the error
        files = [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(file.parent).as_posix()} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def module_of(text: str, key: str) -> ModuleType:
    """Return the module of ``module:name``. Error messages name the setting ``key``.

    Raises
    ------
    SettingsError
        If the file or module does not exist or cannot be imported.
    """
    return _module(located(text).rpartition(":")[0], f"{key} = {quoted(text)}")


def load(text: str, key: str) -> Any:
    """Return the object that ``module:name`` names.

    Raises
    ------
    SettingsError
        As in :func:`module_of`, or if the module does not define the name.
    """
    module, name = module_of(text, key), text.rpartition(":")[2]
    if not hasattr(module, name):
        names = ", ".join(word for word in vars(module) if not word.startswith("_")) or "nothing"
        origin = located(text).rpartition(":")[0]
        raise SettingsError(f"{key} = {quoted(text)}: {origin} does not define {name}; it defines {names}")
    return getattr(module, name)


def format_error(error: Exception) -> str:
    """Return an exception's type and message on one line, with the file and line if custom code raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if is_custom_frame(frame)]
    return f"{text} ({Path(frames[-1].f_code.co_filename).name}, line {frames[-1].f_lineno})" if frames else text


_LONGEST = 300
"""Maximum number of characters to quote from an exception."""
_BUNDLED_HINT = (
    "; it was submitted with the run: to use the run's models, change to the folder that contains this file; to resume "
    "the run on a SuperLink, repeat the settings that name custom code"
)


@lru_cache(maxsize=64)
def _module(name: str, setting: str) -> ModuleType:
    """Import a file or an installed module. The error messages quote ``setting``, of the form ``key = value``."""
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = _BUNDLE / name
        if not is_file(path):
            is_bundled = name.startswith(f"{BUNDLED}/")
            problem = f"the file {path.name if is_bundled else path} does not exist"
            raise SettingsError(f"{setting}: {problem}{_BUNDLED_HINT * is_bundled}")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that local modules do not shadow installed ones
        spec = importlib.util.spec_from_file_location(f"{CUSTOM_MODULE}{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module there
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] == error.name:
            where = f"a file {name}.py where the run was started"
            raise SettingsError(f"{setting}: there is neither {where} nor an installed module {name}") from error
        raise SettingsError(f"{setting}: {name} cannot be imported ({error})") from error
    except SettingsError:
        raise
    except Exception as error:  # custom code may raise any exception
        raise SettingsError(f"{setting}: {name} cannot be imported ({format_error(error)})") from error
    return module


def is_custom_frame(frame: FrameType) -> bool:
    """Return whether a frame belongs to custom code that was imported from a file."""
    return str(frame.f_globals.get("__name__", "")).startswith(CUSTOM_MODULE)
