"""The server's state as named arrays, for checkpoints and saved models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.settings import SettingsError

if TYPE_CHECKING:
    from posy.strategies.base import PersonalisedStrategy

FINISHED_IN = "finished-in"
"""Name of the array with the rounds after which the arrays of ``sent_once`` were complete."""


def state_of(strategy: "PersonalisedStrategy") -> dict[str, npt.NDArray[np.generic]]:
    """Return the server's state by name."""
    state = {name: getattr(strategy, name) for name in _names(strategy)}
    if strategy.method.sent_once:
        state |= strategy.exchange.arrays_once()
        state[FINISHED_IN] = np.array(strategy.exchange.finished_in, np.int64)
    return state


def load_state(strategy: "PersonalisedStrategy", arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Load the state that :func:`state_of` has returned for a strategy with the same settings.

    Raises
    ------
    KeyError, ValueError
        If an array is missing, or has another type or shape than this strategy's array. The strategy then keeps its
        state.
    """
    for name in _names(strategy):
        array, fresh = arrays[name], getattr(strategy, name)
        rows = int(fresh.shape[:1] == (0,))  # an array without rows may grow rows
        same = array.ndim == fresh.ndim and (array.shape[rows:] == fresh.shape[rows:] or name in strategy.resized)
        if array.dtype != fresh.dtype or not same:
            raise ValueError(f"{name}: {array.dtype} {array.shape} instead of {fresh.dtype} {fresh.shape}")
    if once := strategy.method.sent_once:
        finished_in = arrays[FINISHED_IN].tolist()
        setattr(strategy, once, [arrays[f"{once}-{number}"] for number in range(1, len(finished_in) + 1)])
        strategy.exchange.finished_in = finished_in
    for name in _names(strategy):
        setattr(strategy, name, np.require(arrays[name], requirements=("C", "W")))


def check_state(strategy: "PersonalisedStrategy") -> None:
    """Raise :class:`SettingsError` if ``initialise`` has set something other than an array that ``state`` names."""
    kind = type(strategy).__name__
    for name in _names(strategy):
        value: Any = getattr(strategy, name, None)
        if not isinstance(value, np.ndarray):
            raise SettingsError(
                f"method = {strategy.settings.run.method!r}: {kind}.state names {name!r}, but {kind}.initialise has set it to {value!r}; it must be a NumPy array"
            )


def _names(strategy: "PersonalisedStrategy") -> tuple[str, ...]:
    """Return the names of the state's arrays; with adaptive clipping also the clipping norm."""
    return (*strategy.state, "dp_clip") if strategy.settings.train.dp_clip_quantile else strategy.state
