"""Flower arrays that hold a NumPy array by reference."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import flwr.app
import numpy as np
import numpy.typing as npt
from flwr.common.constant import SType


class Array(flwr.app.Array):
    """A Flower array that is serialised only when a transport asks for its bytes, and then once.

    Between a strategy and clients of one process nothing is copied: whoever reads the array must not
    write to it. On the wire it is an ordinary ``Array``, for which it needs that name.

    Parameters
    ----------
    ndarray : numpy.ndarray
        The array; a scalar's array keeps its shape ``()``.
    """

    def __init__(self, ndarray: npt.NDArray[Any]) -> None:
        self.__dict__.update(
            dtype=str(ndarray.dtype), shape=tuple(ndarray.shape), stype=str(SType.NUMPY), _ndarray=ndarray
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of the array as ``numpy.save`` writes them."""
        if "_data" not in self.__dict__:
            buffer = BytesIO()
            np.save(buffer, np.asarray(self.__dict__["_ndarray"], order="C"), allow_pickle=False)
            self.__dict__["_data"] = buffer.getvalue()
        data: bytes = self.__dict__["_data"]
        return data

    def numpy(self) -> npt.NDArray[Any]:
        """Return the array itself."""
        ndarray: npt.NDArray[Any] = self.__dict__["_ndarray"]
        return ndarray


def record_of(arrays: Mapping[str, npt.NDArray[Any]]) -> flwr.app.ArrayRecord:
    """Return a Flower record that holds arrays by reference."""
    return record_of_arrays({name: Array(array) for name, array in arrays.items()})


def record_of_arrays(arrays: Mapping[str, Array]) -> flwr.app.ArrayRecord:
    """Return a Flower record of these very arrays; its own constructor would copy their bytes."""
    record = flwr.app.ArrayRecord()
    for name, array in arrays.items():
        record[name] = array
    return record
