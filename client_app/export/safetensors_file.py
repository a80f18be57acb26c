"""Export to safetensors: the tensors of the networks, with the model card in the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from posy.client_app.export.check import ExportError
from posy.client_app.stored import ClientModel
from posy.models.assembly import chain_of

CARD = "posy"
"""Key of the metadata that contains the model card."""


def write(model: ClientModel, card: Mapping[str, Any], path: Path) -> float:
    """Write a model's tensors to a file, and return the difference from the stored model, which is 0.

    The tensors of a custom network have the names of the user's module. In an ensemble, the names of member t start
    with ``stage<t>.``, as in stored models.

    Raises
    ------
    ExportError
        If the file's tensors differ from the stored model's.
    """
    tensors: dict[str, Tensor] = {}
    is_ensemble = len(model.members) > 1
    for number, member in enumerate(model.members, start=1):
        prefix = f"stage{number}." if is_ensemble else ""
        state = member.state_dict()
        names = chain_of(member).given_names(state) if chain_of(member) is member else {name: name for name in state}
        tensors |= {prefix + names[name]: tensor.contiguous() for name, tensor in state.items()}
        if is_ensemble:
            tensors[f"{prefix}coefficient"] = model.coefficients[number - 1 : number].clone()
    safetensors.torch.save_file(tensors, path, {CARD: json.dumps(card, ensure_ascii=False)})
    stored = safetensors.torch.load_file(path)
    if different := [name for name, tensor in tensors.items() if not torch.equal(stored[name], tensor)]:
        raise ExportError(f"the tensor {different[0]} differs from the stored model's")
    return 0.0
