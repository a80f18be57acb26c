"""The clients of the methods by name."""

from importlib import import_module
from typing import Any

from posy.strategies.methods import METHODS, check_method


def client_class(method: str) -> Any:
    """Return the NumPyClient of a method."""
    check_method(method)
    module = import_module(f"posy.client_app.{method.replace('-', '_')}")
    return getattr(module, f"{METHODS[method]}Client")
