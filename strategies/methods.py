"""The registry of methods: it maps a method's name to its settings and its strategy."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from posy.extensions import is_custom, key_prefix, module_of
from posy.settings import SettingsError, nearest, quoted, set_in
from posy.strategies.settings import MethodSettings

T = TypeVar("T")
PICTURES = "posy.strategies.pictures"
"""Package of the modules that draw the pictures of individual methods."""

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
"""Each method's name in the settings, mapped to the prefix of its class names."""
REFERENCES = {"pooled": "Pooled"}
"""References without federation, for comparison with the methods; the format is the same as in :data:`METHODS`."""
_CLASSES = METHODS | REFERENCES


def class_prefix(method: str) -> str:
    """Return the class-name prefix of one of Posy's methods or references."""
    return _CLASSES[method]


def paper_name(method: str) -> str:
    """Return the name of a method in its paper, such as ``cwFedAvg``, from the first line of its module's docstring.

    The name of a custom method is its class name, and an unknown name is returned unchanged.
    """
    if method not in _CLASSES:
        return method.rpartition(":")[2]
    summary = (_module(method).__doc__ or "").partition("\n")[0]
    return summary.partition(":")[0].partition(" (")[0]


def check_method(method: str, where: str = "") -> None:
    """Raise :class:`SettingsError` for an unknown method, and suggest the most similar name or list all methods.

    A custom method, ``file:Name``, is checked when Posy loads it.
    """
    if method in _CLASSES or is_custom(method):
        return
    near = nearest(method, _CLASSES)
    allowed = f"it must be one of {', '.join(_CLASSES)}, or file:Name for a custom method"
    hint = f"did you mean {near}? (`posy methods` lists all)" if near else allowed
    raise SettingsError(f"method = {quoted(method)}" + (f" {set_in(where)}" if where else "") + f": {hint}")


def settings_class(method: str) -> Any:
    """Return the frozen dataclass of a method's settings, which also declares the method's messages."""
    check_method(method)
    return _own_settings(method) if is_custom(method) else getattr(_module(method), f"{class_prefix(method)}Settings")


def strategy_class(method: str) -> Any:
    """Return the Flower strategy class of a method; by default the shared base strategy, which implements FedAvg."""
    from posy.strategies.base import PersonalisedStrategy  # noqa: PLC0415 - looking up names does not need PyTorch

    check_method(method)
    if is_custom(method):
        return own_class(method, "", PersonalisedStrategy)
    return getattr(_module(method), class_prefix(method), PersonalisedStrategy)


def drawing_of(strategy: type[Any]) -> Callable[[Any, Path], None] | None:
    """Return the function ``draw(strategy, folder)`` that draws a strategy's pictures into a folder, or None.

    Posy searches the strategy's class first, then its base classes. For Posy's methods, ``draw`` is in the module of
    the same name in :mod:`posy.strategies.pictures`. For a custom method, ``draw`` is in the method's file.
    """
    for kind in strategy.__mro__:
        package, _, name = kind.__module__.rpartition(".")
        if package == __package__ and find_spec(f"{PICTURES}.{name}"):
            return cast("Callable[[Any, Path], None]", import_module(f"{PICTURES}.{name}").draw)
        if package != __package__ and (draw := getattr(sys.modules.get(kind.__module__), "draw", None)):
            return cast("Callable[[Any, Path], None]", draw)
    return None


def own_class(method: str, end: str, base: type[T]) -> type[T]:
    """Return the class ``Name`` + ``end`` of a custom method ``file:Name``; by default, the base class.

    Raises
    ------
    SettingsError
        If Posy cannot import the file, or the class does not inherit from the base class.
    """
    name = method.rpartition(":")[2] + end
    custom_class = getattr(module_of(method, "method"), name, base)
    if not (isinstance(custom_class, type) and issubclass(custom_class, base)):
        raise SettingsError(f"method = {quoted(method)}: {name} must be a subclass of {base.__name__}")
    return custom_class


def _own_settings(method: str) -> Any:
    """Return the settings class of a custom method; raise :class:`SettingsError` if it is missing or unusable."""
    prefix, method_key = f"method = {quoted(method)}", key_prefix(method)
    name = method.rpartition(":")[2] + "Settings"
    declared = own_class(method, "Settings", MethodSettings)
    if declared is MethodSettings:
        classes = ", ".join(key for key, value in vars(module_of(method, "method")).items() if isinstance(value, type))
        raise SettingsError(
            f"{prefix}: its file must declare {name}, a subclass of MethodSettings; it declares {classes}"
        )
    if method_key in _CLASSES:
        raise SettingsError(f"{prefix}: Posy already has a method named {method_key}; choose another name")
    return declared


def _module(method: str) -> ModuleType:
    return import_module(f"posy.strategies.{method.replace('-', '_')}")
