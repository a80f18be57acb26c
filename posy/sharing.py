"""One model for many clients is one object: it is recognised by identity, and work on it is done once."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def is_shared(objects: Sequence[object]) -> bool:
    """Tell whether clients have the very same object, such as the model that the server sent to all of them."""
    return all(each is objects[0] for each in objects)


class Once(Generic[S, T]):
    """Makes something of each object once, and returns it again for the same one; remembers the ``most`` used last."""

    def __init__(self, make: Callable[[S], T], most: int | None = None) -> None:
        self._make = make
        self._most = most
        self._made: OrderedDict[int, tuple[S, T]] = OrderedDict()
        self._lock = RLock()

    def __call__(self, source: S) -> T:
        """Return what belongs to an object."""
        with self._lock:
            # The object is held as well: its id stays its own.
            held = self._made.pop(id(source), None) or (source, self._make(source))
            self._made[id(source)] = held
            if self._most is not None and len(self._made) > self._most:
                self._made.popitem(last=False)
            return held[1]
