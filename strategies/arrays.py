"""The arrays in a method's messages.

A method declares each array of a client's reply once. The shape check of the server, the limits on norms, the noise of
differential privacy and the masks of secure aggregation follow from this declaration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
"""The arrays of a message or of a reply, by name."""
Shape: TypeAlias = tuple[int, ...]
Dimensions: TypeAlias = tuple[int | str, ...]


class Refused(NamedTuple):
    """The verdict that a method does not support a feature, with the reason."""

    why: str


Answer: TypeAlias = Literal[True] | str
"""An author's answer: True, or the reason why the method does not support a feature."""
ALLOWED = None
"""The verdict that a method supports a feature."""


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
    """Name of the sent array from which the client starts; empty if the array is absolute."""
    is_change: bool = False
    """Whether the client sends the difference from its start instead of the changed array."""
    shape: Dimensions | Callable[[Arrays], Shape] | None = None
    """The shape as numbers, names of :func:`dimensions` and names of the method's settings, or a function of the sent
    arrays. None: the shape of the sent array ``change_of``."""
    limited: bool = True
    """Whether ``max-update-norm`` and ``max-norm-ratio`` cover the array."""
    has_statistics: bool = True
    """Whether an array in the shape of a model contains BatchNorm's running statistics; otherwise Posy sets these
    entries to 0."""

    def start(self, sent: Mapping[str, npt.NDArray[Any]], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the client's starting value of the array; zeros if the array is absolute or a difference."""
        return sent[self.change_of] if self.change_of and not self.is_change else np.zeros_like(array)


def verdict(answer: Answer) -> Refused | None:
    """Return the verdict of an author's answer; raise :class:`TypeError` unless it is True or a reason."""
    if answer is True:
        return ALLOWED
    if not isinstance(answer, str) or not answer:
        raise TypeError(f"noise, sums, dp_sgd and robust are True, or the reason why not; one of them is {answer!r}")
    return Refused(answer)


def model(
    *,
    noise: Answer,
    sums: Answer,
    change_of: str = "model",
    is_change: bool = False,
    shape: Dimensions | None = None,
) -> Returned:
    """Declare a trained model, or with ``is_change`` its difference from the model with which the client started.

    ``noise`` and ``sums`` are True, or the reason why the array does not tolerate noise and why the server needs more
    than the clients' mean.
    """
    return Returned(noise=verdict(noise), sums=verdict(sums), change_of=change_of, is_change=is_change, shape=shape)


def gradient(*, noise: Answer, sums: Answer, change_of: str) -> Returned:
    """Declare a change with one number per parameter, such as a control variate. It has no running statistics."""
    return Returned(noise=verdict(noise), sums=verdict(sums), change_of=change_of, is_change=True, has_statistics=False)


def numbers(
    *shape: int | str,
    noise: Answer,
    sums: Answer,
    change_of: str = "",
    limited: bool = False,
    shape_from: Callable[[Arrays], Shape] | None = None,
) -> Returned:
    """Declare other numbers, such as losses or class means.

    Parameters
    ----------
    *shape : int or str
        The dimensions: numbers, names of :func:`dimensions`, or names of the method's settings. A scalar has none.
    noise, sums : True or str
        Whether the array tolerates noise, and whether the server needs only the clients' mean; the reason if not.
    change_of : str
        The sent array that the client changes. Its shape is the default. Empty if the array is absolute.
    limited : bool
        Whether ``max-update-norm`` and ``max-norm-ratio`` cover the array.
    shape_from : callable, optional
        Returns the shape from the arrays that the client has received.
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
    """Declare the arrays of a client's reply by name, in their order."""
    return MappingProxyType(arrays)


UNIFORM_WEIGHTS = "uniform-weights"
"""Entry of ``train_config`` that gives all clients the weight 1 in the round's mean."""
RETURNS = "returns"
"""Entry of a message's config that names the arrays that the server expects, if it does not expect all of them."""
RETURNED = reply(model=model(noise=True, sums=True))
"""The arrays that a client returns by default: the trained model, whose weighted mean the server needs."""


def dimensions(network: Any, shared: int) -> dict[str, Callable[[], int]]:
    """Return the named dimensions of a network: all parameters, the shared ones, the classes and the features."""
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
        The named dimensions of :func:`dimensions`.
    method : MethodSettings
        The method's settings, whose whole numbers are dimensions too.
    """
    shape = declared.shape
    if shape is None:
        return sent[declared.change_of].shape
    if callable(shape):
        return shape(sent)
    return tuple(d if isinstance(d, int) else named[d]() if d in named else int(getattr(method, d)) for d in shape)


def check_names(kind: str, arrays: Mapping[str, Any], declared: tuple[str, ...], where: str) -> None:
    """Raise :class:`TypeError` if the names of the arrays differ from the method's declaration.

    Parameters
    ----------
    kind : str
        ``serve returns`` or ``the update has``, for the message.
    arrays : mapping
        The arrays by name.
    declared : tuple of str
        The declared names.
    where : str
        The declaration, such as ``FedMineSettings.sent``.
    """
    if set(arrays) != set(declared):
        raise TypeError(
            f"{kind} the arrays {', '.join(arrays) or 'none'}; {where} declares {', '.join(declared) or 'none'}"
        )
