"""Compares a run's code with the Posy that is installed on a node."""

import io
import os
import tomllib
import zipfile
from logging import getLogger
from pathlib import Path

from posy.data.policy import Policy
from posy.deploy.install import LARGEST_PROJECT

_LOG = getLogger("flwr")  # the logger of a node
REFUSE = "POSY_REFUSE_FOREIGN_CODE"
"""Environment variable that, if set, makes the node run only its installed code."""
_HERE = Path(__file__).resolve().parent.parent
_STARTED = {"serverapp": "posy.serverapp:app", "clientapp": "posy.clientapp:app"}
"""The components of Posy's app, which Flower starts."""
_DATA = (".yaml", ".yml", ".md", ".txt")
"""Suffixes of data files. The installed Posy does not read these files from a bundle."""


class ForeignCodeError(PermissionError):
    """A run contains code that this node refuses. The message of this error names only files of the run."""

    shareable = True


def code_rule(policy: Policy | None) -> str:
    """Return a node's rule for code: ``installed``, ``signed`` or ``any``."""
    if os.environ.get(REFUSE):
        return "installed"
    return policy.code if policy else "any"


def check_code(content: bytes, rule: str, *, signed: bool = False) -> bool:
    """Return whether a node runs its installed Posy instead of an app's bundle (the bytes of a zip file).

    With the rule ``installed``, the node runs its installed Posy, and neither unpacks nor runs anything from the
    bundle. With any other rule, the node runs the bundle, and this function logs the files that differ from the
    installed Posy. ``signed`` states whether a trusted entity has signed the bundle.

    Raises
    ------
    ForeignCodeError
        If the rule is ``installed`` and the bundle contains other code, or the rule is ``signed`` and no trusted entity
        has signed the bundle.
    """
    files = foreign_code(content)
    names = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    if rule == "installed" and files:
        raise ForeignCodeError(
            f"this node runs only its installed Posy (rule code of its policy, or --refuse-foreign-code), but the run "
            f"contains {names}"
        )
    if rule == "signed" and not signed:
        raise ForeignCodeError(
            "this node runs only signed apps (rule code of its policy), but no trusted entity has signed this app; "
            "start the node with --trusted-entities"
        )
    if files:
        _LOG.warning("this run contains code that differs from the installed Posy: %s", names)
    return rule == "installed"


def foreign_code(content: bytes) -> list[str]:
    """Return the code files in a bundle that differ from the installed Posy's files."""
    foreign = []
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        for entry in sorted(bundle.infolist(), key=lambda entry: entry.filename):
            name = entry.filename
            if name == "pyproject.toml":  # Flower rewrites it
                same = entry.file_size <= LARGEST_PROJECT and _starts_posy(bundle.read(entry))
            else:
                same = _is_data(name) or _is_installed(bundle, entry)
            if not same:
                foreign.append(name)
    return foreign


def _starts_posy(project: bytes) -> bool:
    """Return whether a ``pyproject.toml`` declares Posy's apps."""
    try:
        started: object = tomllib.loads(project.decode())["tool"]["flwr"]["app"]["components"]
    except (ValueError, LookupError, TypeError):  # not UTF-8 TOML, or without Flower's tables
        return False
    return started == _STARTED


def _is_installed(bundle: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    """Return whether an entry in a bundle is identical to a file of the installed Posy.

    The function does not unpack an entry of a different size, because it could be much larger than the bundle.
    """
    installed = _installed(entry.filename)
    return installed is not None and entry.file_size == len(installed) and bundle.read(entry) == installed


def _is_data(name: str) -> bool:
    """Return whether the name of a file in a bundle belongs to a data file; dotfiles count as code."""
    file = name.rpartition("/")[2].lower()
    return name.startswith(".info/") or "." not in file or file.endswith(_DATA)


def _installed(name: str) -> bytes | None:
    """Return the content of the installed file that corresponds to a bundle's file.

    A wheel contains all files in the package posy.
    """
    for path in (_HERE / name, _HERE / name.removeprefix("posy/")):
        if path.is_file():
            return path.read_bytes()
    return None
