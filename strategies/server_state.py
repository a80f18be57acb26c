"""The server's state as named arrays, for checkpoints and saved models."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.settings import SettingsError
from posy.strategies.arrays import Arrays
from posy.strategies.hooks import ServerHooks

FINISHED_IN = "finished-in"
"""Name of the array that contains, for each array in the list ``sent_once``, the round that completed it."""


def arrays_once(strategy: ServerHooks, first: int = 0) -> Arrays:
    """Return the arrays in the list ``sent_once`` by name, skipping the first ``first`` arrays."""
    if not (name := strategy.method.sent_once):
        return {}
    finished: list[npt.NDArray[Any]] = getattr(strategy, name)
    return {f"{name}-{number}": array for number, array in enumerate(finished[first:], start=first + 1)}


def state_of(strategy: ServerHooks) -> dict[str, npt.NDArray[np.generic]]:
    """Return the server's state by name."""
    state = {name: getattr(strategy, name) for name in _names(strategy)}
    if strategy.method.sent_once:
        state |= arrays_once(strategy)
        state[FINISHED_IN] = np.array(strategy.finished_in, np.int64)
    return state


def load_state(strategy: ServerHooks, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Load a state that :func:`state_of` returned for a strategy with the same settings.

    Raises
    ------
    KeyError, ValueError
        If an array is missing, or differs from the strategy's array in type or shape. The strategy then keeps its
        state.
    """
    for name in _names(strategy):
        array, fresh = arrays[name], getattr(strategy, name)
        rows = int(fresh.shape[:1] == (0,))  # an array without rows may gain rows
        matches = array.ndim == fresh.ndim and (array.shape[rows:] == fresh.shape[rows:] or name in strategy.resized)
        if array.dtype != fresh.dtype or not matches:
            raise ValueError(f"{name}: {array.dtype} {array.shape} instead of {fresh.dtype} {fresh.shape}")
    if list_name := strategy.method.sent_once:
        finished_in = arrays[FINISHED_IN].tolist()
        setattr(strategy, list_name, [arrays[f"{list_name}-{number}"] for number in range(1, len(finished_in) + 1)])
        strategy.finished_in = finished_in
    for name in _names(strategy):
        setattr(strategy, name, np.require(arrays[name], requirements=("C", "W")))


def check_state(strategy: ServerHooks) -> None:
    """Raise :class:`SettingsError` unless ``initialise`` has set every name in ``state`` to an array."""
    kind = type(strategy).__name__
    for name in _names(strategy):
        value: Any = getattr(strategy, name, None)
        if not isinstance(value, np.ndarray):
            raise SettingsError(
                f"method = {strategy.settings.run.method!r}: {kind}.state names {name!r}, but {kind}.initialise "
                f"set it to {value!r}; it must be a NumPy array"
            )


def _names(strategy: ServerHooks) -> tuple[str, ...]:
    """Return the names of the state's arrays; with adaptive clipping, they include the clipping norm."""
    return (*strategy.state, "dp_clip") if strategy.settings.train.dp_clip_quantile else strategy.state
