"""Load the ClientApp of a run in a node's worker."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from flwr.clientapp import ClientApp

from posy.deploy.foreign import check_code
from posy.deploy.install import client_app_of, install_whole
from posy.deploy.tasks import Bundle
from posy.deploy.trusted import check_signatures
from posy.extensions import BUNDLED, CUSTOM_MODULE
from posy.flower import ClientAppCallable


class Apps:
    """The ClientApp from a run's code, loaded once and reloaded when the code changes.

    ``entities`` maps the ids of trusted entities to their public keys. One of these entities must have signed the code.
    If ``entities`` is None, the code needs no signature.
    """

    def __init__(self, entities: Mapping[str, str] | None = None) -> None:
        self._entities = entities
        self.signers: list[str] = []
        """The ids of the trusted keys that have signed the loaded code."""
        self._hash = ""
        self._folder: Path | None = None
        self._app: ClientAppCallable | None = None

    def load(self, bundle: Bundle, rule: str) -> ClientAppCallable:
        """Return the node's own ClientApp, or install a new bundle and return the bundle's ClientApp.

        :func:`posy.deploy.foreign.check_code` chooses between them according to the node's ``code`` rule. The method
        raises the errors of :func:`check_code`, :func:`check_signatures` and :func:`install_whole`.
        """
        if self._app is None or self._hash != bundle.hash:
            self._app = None
            self.signers = [] if self._entities is None else check_signatures(bundle, self._entities)
            if check_code(bundle.content, rule, signed=bool(self.signers)):
                from posy.client_app.app import app as installed  # noqa: PLC0415 - imports PyTorch

                self._hash, self._app = bundle.hash, installed
                return self._app
            folder = install_whole(bundle.content, bundle.hash)
            _forget(self._folder, folder)
            self._app = _import(folder)
            self._folder, self._hash = folder, bundle.hash
        return self._app


def _import(folder: Path) -> ClientApp:
    """Import the ClientApp from installed code."""
    name, attribute = client_app_of(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    app = getattr(importlib.import_module(name), attribute)
    if not isinstance(app, ClientApp):
        raise TypeError(f"{name}:{attribute} (clientapp in the run's pyproject.toml) is not a ClientApp")
    return app


def _forget(old: Path | None, new: Path) -> None:
    """Unload all custom modules, and the packages that the new code replaces, which may include Posy."""
    for folder in (old, old / BUNDLED) if old else ():
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
    paths = [path for folder in (new, new / BUNDLED) if folder.is_dir() for path in folder.iterdir()]
    names = {path.stem for path in paths if path.is_dir() or path.suffix == ".py"}
    names |= {name for name in sys.modules if name.startswith(CUSTOM_MODULE)}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
