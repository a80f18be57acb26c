"""What a client keeps between rounds: named arrays that never leave its node unless a method sends them."""

from collections.abc import Iterator, MutableMapping

import numpy as np
import numpy.typing as npt
from flwr.app import Context

from posy.arrays import record_of


class State(MutableMapping[str, npt.NDArray[np.generic]]):
    """The named arrays of one client."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[np.generic]] = {}
        self.changed = False

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        return self._arrays[name]

    def __setitem__(self, name: str, value: npt.NDArray[np.generic]) -> None:
        self._arrays[name] = value
        self.changed = True

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def load_state(context: Context, client: int) -> State:
    """Read the state of one client from a node's Flower context (a node may host several clients)."""
    state = State()
    record = context.state.array_records.get(_key(client))
    if record is not None:
        for name, array in record.items():
            state[name] = array.numpy()
    state.changed = False
    return state


def save_state(context: Context, client: int, state: State) -> None:
    """Write the state of one client to a node's Flower context, if it has changed."""
    if state.changed:
        context.state[_key(client)] = record_of({name: np.asarray(value) for name, value in state.items()})
        state.changed = False


def _key(client: int) -> str:
    return f"client-{client}"
