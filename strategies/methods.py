"""The methods by name: where their settings and strategies are found."""

from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from posy.extensions import is_own, module_of, word_of
from posy.settings import SettingsError, at, nearest, shown
from posy.strategies.method_settings import MethodSettings

T = TypeVar("T")

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
    "fedper": "FedPer",
    "fedbabu": "FedBABU",
    "fedprox-ft": "FedProxFT",
    "fedsam-ft": "FedSAMFT",
    "lg-fedavg": "LGFedAvg",
    "apfl": "APFL",
    "per-fedavg": "PerFedAvg",
    "pfedme": "PFedMe",
    "fedfomo": "FedFomo",
    "cfl": "CFL",
    "fedala": "FedALA",
    "fedmtl": "FedMTL",
    "fedmgda": "FedMGDA",
    "feduv": "FedUV",
    "fednh": "FedNH",
    "pfedfda": "PFedFDA",
    "confree": "ConFREE",
    "scaffold": "SCAFFOLD",
    "fedbn": "FedBN",
    "moon": "MOON",
    "fedproto": "FedProto",
    "fedpac": "FedPAC",
    "fedas": "FedAS",
    "fedcp": "FedCP",
}
"""Name in the settings, and the word that the names of the method's classes begin with."""


def check_method(method: str, where: str = "") -> None:
    """Raise :class:`SettingsError` for a method that does not exist, naming what is meant, or all.

    One of people's own, ``file:Name``, is looked for when it is loaded.
    """
    if method in METHODS or is_own(method):
        return
    near = nearest(method, METHODS)
    all_of_them = f"it must be one of {', '.join(METHODS)}, or file:Name of your own"
    hint = f"did you mean {near}? (`posy methods` lists all)" if near else all_of_them
    raise SettingsError(f"method = {shown(method)}" + (f" {at(where)}" if where else "") + f": {hint}")


def settings_class(method: str) -> Any:
    """Return the frozen dataclass with a method's own settings, and with what its server and clients agree on."""
    check_method(method)
    return _own_settings(method) if is_own(method) else getattr(_module(method), f"{METHODS[method]}Settings")


def strategy_class(method: str) -> Any:
    """Return the Flower strategy of a method: its own, or the one that all share, which is FedAvg."""
    from posy.strategies.base import PersonalisedStrategy  # noqa: PLC0415 - the names of the methods need no PyTorch

    check_method(method)
    if is_own(method):
        return own_class(method, "", PersonalisedStrategy)
    return getattr(_module(method), METHODS[method], PersonalisedStrategy)


def own_class(method: str, end: str, base: type[T]) -> type[T]:
    """Return the class of a method of people's own whose name ends on something, else the base of all such classes.

    Raises
    ------
    SettingsError
        If the file cannot be imported, or its class is no subclass of the base.
    """
    name = method.rpartition(":")[2] + end
    found = getattr(module_of(method, "method"), name, base)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise SettingsError(f"method = {shown(method)}: {name} must be a subclass of {base.__name__}")
    return found


def _own_settings(method: str) -> Any:
    """Return the declaration of a method of people's own, or say what is wrong with it."""
    what, word = f"method = {shown(method)}", word_of(method)
    name = method.rpartition(":")[2] + "Settings"
    found = own_class(method, "Settings", MethodSettings)
    if found is MethodSettings:
        held = ", ".join(key for key, value in vars(module_of(method, "method")).items() if isinstance(value, type))
        raise SettingsError(f"{what}: its file must declare {name}, a subclass of MethodSettings; it holds {held}")
    if word in METHODS:
        raise SettingsError(f"{what}: {word} is a method of Posy's; give yours another name")
    return found


def _module(method: str) -> ModuleType:
    return import_module(f"posy.strategies.{method.replace('-', '_')}")
