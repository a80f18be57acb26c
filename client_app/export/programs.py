"""Programs that PyTorch records from a network, for any number of samples."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from posy.client_app.export.check import ExportError
from posy.client_app.export.graph import RawModel

SAMPLES = "samples"
"""The name of the axis of samples."""
_PYTHON_VALUES = ("Converting a tensor to a Python", "Using len to get", "Iterating over a tensor")
"""The beginnings of PyTorch's warnings about values that a trace does not record."""


def exported_program(raw: RawModel, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Return the program that PyTorch derives from the code of a network; it takes longer than a trace.

    A network with branches that depend on the values of a sample raises an exception.
    """
    shapes = tuple({0: torch.export.Dim(SAMPLES)} for _ in examples)
    return torch.export.export(raw, examples, dynamic_shapes=shapes, strict=True)


@contextlib.contextmanager
def tracing(raw: RawModel, examples: tuple[Tensor, ...]) -> Iterator[None]:
    """Raise :class:`ExportError` if a trace in the context may lack branches of a custom network.

    A trace repeats the branches that the examples took. If custom code reads a tensor in Python, the network must also
    have an exported program, which cannot contain branches that depend on the values of samples.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    package = Path(torch.__file__).parent.parent  # PyTorch and torchvision only read shapes
    for entry in caught:
        file = Path(entry.filename)
        if str(entry.message).startswith(_PYTHON_VALUES) and not file.is_relative_to(package):
            try:
                exported_program(raw, examples)
            except Exception as error:
                line = f"{file.name}, line {entry.lineno}"
                raise ExportError(f"{line}, reads the value of a tensor in Python ({type(error).__name__})") from error
            return


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and the output of PyTorch's exporters, which repeat the exception at length."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
