"""The methods by name: where their settings and strategies are found."""

from importlib import import_module
from types import ModuleType
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
    """Raise :class:`SettingsError` for a method that does not exist, naming what is meant, or all."""
    if method in METHODS:
        return
    near = nearest(method, METHODS)
    hint = f"did you mean {near}? (`posy methods` lists all)" if near else f"it must be one of {', '.join(METHODS)}"
    raise SettingsError(f"method = {shown(method)}" + (f" in {where}" if where else "") + f": {hint}")


def settings_class(method: str) -> Any:
    """Return the frozen dataclass with a method's own settings, and with what its server and clients agree on."""
    return getattr(_module(method), f"{METHODS[method]}Settings")


def strategy_class(method: str) -> Any:
    """Return the Flower strategy of a method: its own, or the one that all share, which is FedAvg."""
    from posy.strategies.base import PersonalisedStrategy  # noqa: PLC0415 - the names of the methods need no PyTorch

    return getattr(_module(method), METHODS[method], PersonalisedStrategy)


def _module(method: str) -> ModuleType:
    check_method(method)
    return import_module(f"posy.strategies.{method.replace('-', '_')}")
