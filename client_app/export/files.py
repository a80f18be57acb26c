"""Write a stored model to a file in one of the formats, and compare the file with the stored model."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posy.client_app.export import safetensors_file, torchscript_file
from posy.client_app.export.check import ExportError
from posy.client_app.export.programs import quiet
from posy.client_app.stored import ClientModel
from posy.extensions import format_error, is_custom
from posy.models.own import TORCHVISION
from posy.settings import SettingsError
from posy.storage import replace

SUFFIXES = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
"""The suffix of a file in each format."""
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
"""The packages that the export to ONNX needs."""
Writer = Callable[[ClientModel, Mapping[str, Any], Path], float]
"""A function that writes a model with its card to a file, and returns the difference from the stored model."""


def export_model(model: ClientModel, card: Mapping[str, Any], path: Path, file_format: str) -> float:
    """Write a model to a file, and return the largest difference between its outputs and the stored model's.

    Parameters
    ----------
    model : ClientModel
        The model.
    card : mapping
        The model card from :func:`posy.client_app.schema.model_card`.
    path : Path
        The file, which is replaced if it exists. It is only written if its outputs equal the stored model's.
    file_format : str
        ``onnx``, ``torchscript`` or ``safetensors``.

    Raises
    ------
    SettingsError
        If a package is not installed, the folder does not exist, or the network cannot be exported to this format.
    """
    if file_format not in SUFFIXES:
        raise SettingsError(f"--format {file_format}: it must be {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: the folder {path.parent} does not exist; create it, or choose another file")
    reasons: list[str] = []
    differences: list[float] = []
    for write in _writers(file_format):
        try:
            with quiet(), torch.no_grad():
                replace(path, partial(_write, write, model, card, differences))
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror or error}") from error
        except ExportError as error:
            reasons.append(str(error))
        except Exception as error:  # PyTorch, or the code of a custom network, may raise anything
            reasons.append(format_error(error))
        else:
            return differences[-1]
    raise ExportError(_message(model, file_format, reasons))


def _write(
    write: Writer, model: ClientModel, card: Mapping[str, Any], differences: list[float], temporary: Path
) -> None:
    differences.append(write(model, card, temporary))


def _writers(file_format: str) -> Sequence[Writer]:
    """Return the functions that write a format, in the order in which to try them: the fastest first."""
    if file_format == "safetensors":
        return (safetensors_file.write,)
    if file_format == "torchscript":
        return (torchscript_file.write,)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise SettingsError(
            f"--format onnx needs {' and '.join(missing)}, which {verb} not installed; install the packages: "
            "pip install 'posy[export]'"
        )
    from posy.client_app.export import onnx_file  # noqa: PLC0415 - optional packages

    return [partial(onnx_file.write, dynamo=dynamo) for dynamo in (False, True)]


def _message(model: ClientModel, file_format: str, reasons: Sequence[str]) -> str:
    """Return the error message for a model that no writer exports correctly."""
    name = model.settings.train.model
    alternatives = " or ".join(f"--format {other}" for other in SUFFIXES if other != file_format)
    advice = ""
    if is_custom(name) and not name.startswith(TORCHVISION):
        advice = (
            ", or change the network: use x.shape[0] instead of len(x), and no branches that depend on the values of "
            "samples"
        )
    problem = "; ".join(dict.fromkeys(reasons))
    return (
        f"model = {name!r}: the model cannot be exported with --format {file_format}: {problem}; no file was written; "
        f"use {alternatives}{advice}"
    )
