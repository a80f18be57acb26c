"""What people bring along: functions of files beside their work, or of packages that are installed."""

import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from posy.paths import absolute, is_file
from posy.settings import OWN, SettingsError, shown


def is_own(text: str) -> bool:
    """Tell whether a setting names something of people's own, as in ``mynets:resnet``."""
    return OWN.fullmatch(text) is not None


def located(text: str) -> str:
    """Return ``file.py:name`` with the absolute path of the file that ``module:name`` is of.

    The file is looked for where the run was started. Where there is none, an installed module is meant.
    """
    module, _, name = text.rpartition(":")
    path = absolute(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    return f"{path}:{name}" if is_file(path) else text


def load(text: str, key: str) -> Any:
    """Return what ``module:name`` names; ``key`` is the setting that does, for the message of an error.

    Raises
    ------
    SettingsError
        If there is no such file or module, if it cannot be imported, or it holds no such name.
    """
    module, _, name = located(text).rpartition(":")
    found = _module(module, f"{key} = {shown(text)}")
    if not hasattr(found, name):
        known = ", ".join(word for word in vars(found) if not word.startswith("_")) or "nothing"
        raise SettingsError(f"{key} = {shown(text)}: {module} holds no {name}; it holds {known}")
    return getattr(found, name)


@lru_cache(maxsize=64)
def _module(name: str, what: str) -> Any:
    """Import a file or an installed module."""
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = Path(name)
        if not is_file(path):
            raise SettingsError(f"{what}: there is no file {path}")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last, so that its neighbours stand in for nothing
        spec = importlib.util.spec_from_file_location(f"posy_own_{path.stem}", path)
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
        raise SettingsError(f"{what}: {name} cannot be imported ({type(error).__name__}: {error})") from error
    return module
