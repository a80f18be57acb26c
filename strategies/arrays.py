"""The arrays in a method's messages.

A method declares each array of a client's reply once. The server's shape checks, the norm limits, the noise of
differential privacy and the masks of secure aggregation all follow from this declaration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""The arrays of a message or reply, keyed by name."""
Shape: TypeAlias = tuple[int, ...]
Dimensions: TypeAlias = tuple[int | str, ...]


class Refused(NamedTuple):
    """The reason why a method does not support a feature."""

    why: str


Answer: TypeAlias = Literal[True] | str
"""An author's declaration: True if the method supports a feature, otherwise the reason why it does not."""
ALLOWED = None
"""Used instead of :class:`Refused` if a method supports a feature."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """An array in a client's reply. Use :func:`model`, :func:`gradient` or :func:`numbers` to declare one."""

    noise: Refused | None
    """Why the array does not tolerate noise (``dp = local``); :data:`ALLOWED` if it does."""
    sums: Refused | None
    """Why the server needs more than the weighted mean of the clients' arrays; :data:`ALLOWED` if the mean is enough.

    Secure aggregation and ``dp = central`` reveal only the mean.
    """
    change_of: str = ""
    """Name of the sent array that the client updates to obtain this array; empty if there is none."""
    is_change: bool = False
    """Whether the client sends the array's change from its starting value instead of its final value."""
    shape: Dimensions | Callable[[Arrays], Shape] | None = None
    """The dimensions (numbers, names from :func:`dimensions` or names of the method's settings), or a function that
    computes the shape from the sent arrays. None means the shape of the sent array ``change_of``."""
    limited: bool = True
    """Whether ``max-update-norm`` and ``max-norm-ratio`` apply to the array."""
    has_statistics: bool = True
    """Whether a model-shaped array contains BatchNorm's running statistics; if not, Posy sets these entries to 0."""

    def start(self, sent: Mapping[str, npt.NDArray[Any]], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array's starting value on the client: zeros if it is a change or does not update a sent array."""
        return sent[self.change_of] if self.change_of and not self.is_change else np.zeros_like(array)


def verdict(answer: Answer) -> Refused | None:
    """Convert an author's declaration; raise :class:`TypeError` if it is neither True nor a reason."""
    if answer is True:
        return ALLOWED
    if not isinstance(answer, str) or not answer:
        raise TypeError(f"noise, sums, dp_sgd and robust must be True or the reason why not; one of them is {answer!r}")
    return Refused(answer)


def model(
    *,
    noise: Answer,
    sums: Answer,
    change_of: str = "model",
    is_change: bool = False,
    shape: Dimensions | None = None,
) -> Returned:
    """Declare a trained model or, with ``is_change``, its difference from the model that the client started from.

    ``noise`` is True, or the reason why the array does not tolerate noise. ``sums`` is True, or the reason why the
    server needs more than the clients' mean.
    """
    return Returned(noise=verdict(noise), sums=verdict(sums), change_of=change_of, is_change=is_change, shape=shape)


def gradient(*, noise: Answer, sums: Answer, change_of: str) -> Returned:
    """Declare the change in an array, such as a control variate, with the model's shape but no running statistics."""
    return Returned(noise=verdict(noise), sums=verdict(sums), change_of=change_of, is_change=True, has_statistics=False)


def numbers(
    *shape: int | str,
    noise: Answer,
    sums: Answer,
    change_of: str = "",
    limited: bool = False,
    shape_from: Callable[[Arrays], Shape] | None = None,
) -> Returned:
    """Declare an array of other numbers, such as losses or class means.

    Parameters
    ----------
    *shape : int or str
        The dimensions: numbers, names of :func:`dimensions`, or names of the method's settings. A scalar has none.
    noise, sums : True or str
        True if the array tolerates noise (``noise``) or if the server needs only the clients' mean (``sums``);
        otherwise the reason why not.
    change_of : str
        Name of the sent array that the client updates, whose shape is the default; empty if there is none.
    limited : bool
        Whether ``max-update-norm`` and ``max-norm-ratio`` apply to the array.
    shape_from : callable, optional
        Function that computes the shape from the arrays that the client has received.
    """
    default = None if change_of and not shape else shape
    return Returned(
        noise=verdict(noise),
        sums=verdict(sums),
        change_of=change_of,
        shape=shape_from or default,
        limited=limited,
    )


def reply(**arrays: Returned) -> Mapping[str, Returned]:
    """Declare the arrays of a client's reply by name, in order."""
    return MappingProxyType(arrays)


UNIFORM_WEIGHTS = "uniform-weights"
"""Entry of ``train_config`` that gives every client a weight of 1 in the round's mean."""
RETURNS = "returns"
"""Entry of a message's config that lists the arrays the server expects back, if it does not expect all of them."""
RETURNED = reply(model=model(noise=True, sums=True))
"""The arrays that a client returns by default: the trained model, of which the server needs only the weighted mean."""


def dimensions(network: Any, shared: int) -> dict[str, Callable[[], int]]:
    """Return functions that count a network's parameters, shared parameters, classes and features, keyed by name."""
    return {
        "parameters": lambda: int(network.layout.size),
        "shared": lambda: shared,
        "classes": lambda: int(network.task.num_classes),
        "features": lambda: int(network.embedding_dim),
    }


def shape_of(declared: Returned, sent: Arrays, named: Mapping[str, Callable[[], int]], method: object) -> Shape:
    """Return the shape of an array in a client's reply.

    Parameters
    ----------
    declared : Returned
        The declaration of the array.
    sent : dict
        The arrays that the client has received.
    named : mapping
        The functions that :func:`dimensions` returns, keyed by name.
    method : MethodSettings
        The method's settings; integer settings can serve as dimensions too.
    """
    shape = declared.shape
    if shape is None:
        return sent[declared.change_of].shape
    if callable(shape):
        return shape(sent)
    return tuple(d if isinstance(d, int) else named[d]() if d in named else int(getattr(method, d)) for d in shape)


def check_names(kind: str, arrays: Mapping[str, Any], declared: tuple[str, ...], where: str) -> None:
    """Raise :class:`TypeError` if the arrays' names differ from the declared names.

    Parameters
    ----------
    kind : str
        Start of the error message: ``serve returns`` or ``the update has``.
    arrays : mapping
        The arrays, keyed by name.
    declared : tuple of str
        The declared names.
    where : str
        Where the names are declared, such as ``FedMineSettings.sent``.
    """
    if set(arrays) != set(declared):
        raise TypeError(
            f"{kind} the arrays {', '.join(arrays) or 'none'}; {where} declares {', '.join(declared) or 'none'}"
        )
