"""Checks of a custom method's code before the first round, for mistakes that Python itself does not report."""

import inspect
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from posy.client_app.base import PersonalClient
from posy.settings import SettingsError, quoted
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.settings import MethodSettings

BASES = (MethodSettings, PersonalisedStrategy, PersonalClient)
"""The classes whose hooks a method overrides."""
SIMILAR = 0.8
"""Minimum similarity at which a name is considered a misspelt hook."""


def check_code(method: str, settings: type[MethodSettings], strategy: type[Any], client: type[Any]) -> None:
    """Check the classes of a custom method.

    Raises
    ------
    SettingsError
        If a hook is misspelt or has the wrong parameters, if ``local_round`` is not a generator, if a class overrides
        ``aggregate`` or ``local_round`` but the settings do not declare ``returned``, or if a class overrides
        ``mean_weights`` but the settings declare that the method supports secure aggregation.
    """
    prefix = f"method = {quoted(method)}"
    for cls, base in zip((settings, strategy, client), BASES, strict=True):
        for kind in cls.__mro__[: cls.__mro__.index(base)]:
            if not kind.__module__.startswith("posy."):
                _check_names(prefix, kind, base)
                _check_parameters(prefix, kind, base)
    _check_returned(prefix, settings, strategy, client)
    if strategy.mean_weights is not PersonalisedStrategy.mean_weights and not settings.sums:
        raise SettingsError(
            f"{prefix}: {strategy.__name__}.mean_weights needs each client's update, which secure aggregation hides; "
            f"in {settings.__name__}.returned, replace sums=True with a reason, such as "
            'sums="the server weights each update"'
        )
    if not inspect.isgeneratorfunction(client.local_round):
        raise SettingsError(
            f"{prefix}: {client.__name__}.local_round is not a generator; it must yield its training requests, as in "
            "`trained = yield Train(start)`"
        )


def _check_names(prefix: str, kind: type[Any], base: type[Any]) -> None:
    """Raise :class:`SettingsError` if a new public name in a class resembles a name in its base class."""
    base_names = [
        name
        for name in (*dir(base), *(name for part in base.__mro__ for name in getattr(part, "__annotations__", ())))
        if not name.startswith("_")
    ]
    settings: Any = kind
    setting_fields = {field.name for field in fields(settings)} if is_dataclass(kind) else set()
    for name in vars(kind):
        if name.startswith("_") or name in base_names or name in setting_fields:
            continue
        if close := get_close_matches(name, base_names, 1, SIMILAR):
            raise SettingsError(
                f"{prefix}: {kind.__name__}.{name} is not used: did you mean {close[0]}? If not, begin its name with _"
            )


def _check_parameters(prefix: str, kind: type[Any], base: type[Any]) -> None:
    """Raise :class:`SettingsError` if a hook does not accept the positional parameters of the base class's hook."""
    for name, function in vars(kind).items():
        hook = getattr(base, name, None)
        if name.startswith("_") or not (inspect.isfunction(function) and inspect.isfunction(hook)):
            continue
        expected = [p for p in inspect.signature(hook).parameters.values() if p.default is p.empty]
        try:
            inspect.signature(function).bind(*expected)
        except TypeError as error:
            names = ", ".join(parameter.name for parameter in expected)
            raise SettingsError(
                f"{prefix}: {kind.__name__}.{name}{inspect.signature(function)} must accept ({names}): {error}"
            ) from error


def _check_returned(prefix: str, settings: type[MethodSettings], strategy: type[Any], client: type[Any]) -> None:
    """Raise :class:`SettingsError` if ``aggregate`` or ``local_round`` is overridden but ``returned`` is not."""
    if any("returned" in vars(kind) for kind in settings.__mro__[: settings.__mro__.index(MethodSettings)]):
        return
    for kind, base, hook, effect in (
        (strategy, PersonalisedStrategy, "aggregate", "uses the replies"),
        (client, PersonalClient, "local_round", "builds the reply"),
    ):
        if getattr(kind, hook) is not getattr(base, hook):
            raise SettingsError(
                f"{prefix}: {kind.__name__}.{hook} {effect}, so {settings.__name__} must declare `returned`: each "
                "array, and whether it tolerates noise and sums; if the server needs only the mean of the models, "
                'set returned = {"model": model(noise=True, sums=True)}'
            )
