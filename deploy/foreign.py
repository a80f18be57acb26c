"""What a run brings to a node that is not the code of the Posy that is installed there."""

import io
import os
import tomllib
import zipfile
from logging import getLogger
from pathlib import Path

_LOG = getLogger("flwr")  # the logger of a node
REFUSE = "POSY_REFUSE_FOREIGN_CODE"
"""Environment variable; where it is set, this node takes no other code than its own."""
_HERE = Path(__file__).resolve().parent.parent
_STARTED = {"serverapp": "posy.server_app.app:app", "clientapp": "posy.client_app.app:app"}
"""What Flower starts of the app."""
_DATA = {".yaml", ".yml", ".md", ".txt", ""}
"""Ends of the names of files that are not run."""


class ForeignCodeError(PermissionError):
    """A run brings code that this node does not take."""


def check_code(content: bytes) -> None:
    """Name in the log what of an app's bundle (the bytes of a zip file) is other code than that installed here.

    Raises
    ------
    ForeignCodeError
        If there is such code, and the node was told to refuse it. Nothing of the bundle has been unpacked then.
    """
    if not (files := foreign_code(content)):
        return
    told = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    if os.environ.get(REFUSE):
        raise ForeignCodeError(
            f"this node takes no code but that of the Posy installed on it (--refuse-foreign-code); the run has {told}"
        )
    _LOG.warning("this run brings code that is not that of the Posy installed here: %s", told)


def foreign_code(content: bytes) -> list[str]:
    """Return the files of a bundle that may be run and are not, byte by byte, those of this Posy."""
    found = []
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        for name in sorted(bundle.namelist()):
            data = bundle.read(name)
            if name == "pyproject.toml":  # Flower writes it anew
                same = tomllib.loads(data.decode())["tool"]["flwr"]["app"]["components"] == _STARTED
            else:
                same = Path(name).suffix in _DATA or name.startswith(".info/") or data == _installed(name)
            if not same:
                found.append(name)
    return found


def _installed(name: str) -> bytes | None:
    """Return the file of this Posy that has a place in the bundle; a wheel has all of them in one package."""
    for path in (_HERE / name, _HERE / name.removeprefix("posy/")):
        if path.is_file():
            return path.read_bytes()
    return None
