"""Caches keyed by identity: Posy processes a model only once if many clients receive the same object."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def is_shared(objects: Sequence[object]) -> bool:
    """Return whether all clients have the same object, such as the model that the server sent to them."""
    return all(each is objects[0] for each in objects)


class IdentityCache(Generic[S, T]):
    """A cache keyed by identity. It calls ``make`` once per object, and keeps up to ``most`` recently used results."""

    def __init__(self, make: Callable[[S], T], most: int | None = None) -> None:
        self._make = make
        self._most = most
        self._made: OrderedDict[int, tuple[S, T]] = OrderedDict()
        self._lock = RLock()

    def __call__(self, source: S) -> T:
        """Return the result of ``make`` for an object."""
        with self._lock:
            # Keep a reference to the object, so that its id remains unique.
            entry = self._made.pop(id(source), None) or (source, self._make(source))
            self._made[id(source)] = entry
            if self._most is not None and len(self._made) > self._most:
                self._made.popitem(last=False)
            return entry[1]
