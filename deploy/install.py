"""Installs a run's code atomically.

Flower copies the code to a folder file by file, and treats the code as installed as soon as the folder exists. If two
runs with the same code start at the same time, the second run may therefore fail because a file is missing. A run that
starts after an interrupted copy fails too.
"""

import hashlib
import io
import re
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from posy.paths import flwr_home

LIST = ".info/CONTENT"
"""Path of the list of files in a bundle. Each line contains a path, SHA-256 and size, separated by commas."""


LARGEST_PROJECT = 1 << 20
"""Maximum size of a ``pyproject.toml`` in bytes."""


class BundleError(ValueError):
    """A bundle is malformed."""


def install_whole(content: bytes, hash_text: str) -> Path:
    """Install a bundle's code in Flower's folder, either completely or not at all, and return the code's folder.

    Code that is already installed stays unchanged.

    Raises
    ------
    BundleError
        If the content is not a Flower bundle, or its files do not match the bundle's list.
    OSError
        If the folder cannot be written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            return _install(bundle, hash_text)
    except (zipfile.BadZipFile, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BundleError(f"the code of the run is not a Flower bundle: {error}") from error


def _install(bundle: zipfile.ZipFile, hash_text: str) -> Path:
    project = tomllib.loads(bundle.read("pyproject.toml").decode())
    app, metadata = project["tool"]["flwr"]["app"], project["project"]
    name_parts = [app["publisher"], metadata["name"], metadata["version"], hash_text[:8]]
    if not all(re.fullmatch(r"\w[\w.+-]*", part) for part in name_parts):
        raise BundleError(f"the app's name {'/'.join(name_parts)} must consist of letters, digits and . _ - +")
    apps = flwr_home() / "apps"
    installed = apps / ".".join(name_parts)
    if installed.is_dir():
        return installed
    apps.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=apps, prefix=".new-"))
    try:
        for line in bundle.read(LIST).decode().splitlines():
            path, digest, _ = line.rsplit(",", 2)
            if hashlib.sha256(bundle.read(path)).hexdigest() != digest:
                raise BundleError(f"the file {path} of the bundle does not match the bundle's list")
            bundle.extract(path, folder)  # never outside the folder
        folder.chmod(0o755)
        try:
            folder.rename(installed)
        except OSError:
            if not installed.is_dir():  # otherwise another process has installed the code in the meantime
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return installed


def client_app_of(folder: Path) -> tuple[str, str]:
    """Return the module and the attribute of the ClientApp in installed code."""
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, attribute = str(project["tool"]["flwr"]["app"]["components"]["clientapp"]).partition(":")
    return module, attribute


@lru_cache(maxsize=1)
def default_config(content: bytes) -> dict[str, Any]:
    """Return the settings in a bundle's ``pyproject.toml``, with the keys of nested tables joined by dots.

    For a malformed bundle, the result is empty; :func:`posy.deploy.foreign.check_code` raises the error.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            entry = bundle.getinfo("pyproject.toml")
            text = bundle.read(entry) if entry.file_size <= LARGEST_PROJECT else b""
        return dict(_flat(tomllib.loads(text.decode())["tool"]["flwr"]["app"]["config"]))
    except (zipfile.BadZipFile, LookupError, TypeError, ValueError):
        return {}


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
