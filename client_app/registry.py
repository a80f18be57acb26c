"""The clients of the methods by name."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from posy.client_app.base import PersonalClient
from posy.extensions import is_own
from posy.strategies.methods import METHODS, check_method, own_class


@cache
def client_class(method: str) -> Any:
    """Return the NumPyClient class of a method; by default FedAvg's class, which all methods share."""
    check_method(method)
    if is_own(method):
        return own_class(method, "Client", PersonalClient)
    name = f"posy.client_app.{method.replace('-', '_')}"
    return getattr(import_module(name), f"{METHODS[method]}Client") if find_spec(name) else PersonalClient
