"""Lookup of client classes by method name."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from posy.client_app.base import PersonalClient
from posy.client_app.method_check import check_code
from posy.extensions import is_custom
from posy.strategies.methods import check_method, class_prefix, own_class, settings_class, strategy_class


@cache
def client_class(method: str) -> Any:
    """Return the NumPyClient class of a method. The default is the FedAvg client, :class:`PersonalClient`."""
    check_method(method)
    if is_custom(method):
        client = own_class(method, "Client", PersonalClient)
        check_code(method, settings_class(method), strategy_class(method), client)
        return client
    name = f"posy.client_app.{method.replace('-', '_')}"
    return getattr(import_module(name), f"{class_prefix(method)}Client") if find_spec(name) else PersonalClient
