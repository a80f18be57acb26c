"""The methods by name: where their settings and strategies are found."""

from importlib import import_module
from typing import Any

from posy.settings import SettingsError, nearest, shown

METHODS = {
    "fedfew": "FedFew",
    "cwfedavg": "CwFedAvg",
    "fedacs": "FedACS",
    "feddrm": "FedDRM",
    "ppfe": "PPFE",
    "local": "Local",
    "fedavg": "FedAvg",
    "fedavg-ft": "FedAvgFT",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "fedamp": "FedAMP",
    "ifca": "IFCA",
}
"""Name in the settings, and the word that the names of the method's classes begin with."""


def check_method(method: str, where: str = "") -> None:
    """Raise :class:`SettingsError` for a method that does not exist, naming the one that is meant or all.

    Parameters
    ----------
    method : str
        Its name.
    where : str
        Where it was set.
    """
    if method in METHODS:
        return
    near = nearest(method, METHODS)
    hint = f"did you mean {near}? (`posy methods` lists all)" if near else f"it must be one of {', '.join(METHODS)}"
    raise SettingsError(f"method = {shown(method)}" + (f" in {where}" if where else "") + f": {hint}")


def strategy_class(method: str) -> Any:
    """Return the Flower strategy of a method."""
    return _attribute("posy.strategies", method, "")


def settings_class(method: str) -> Any:
    """Return the frozen dataclass with a method's own settings."""
    return _attribute("posy.strategies", method, "Settings")


def _attribute(package: str, method: str, suffix: str) -> Any:
    check_method(method)
    module = import_module(f"{package}.{method.replace('-', '_')}")
    return getattr(module, METHODS[method] + suffix)
