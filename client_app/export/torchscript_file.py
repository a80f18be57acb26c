"""Export to TorchScript: a module that ``torch.jit.load`` reads, with the model card as an extra file."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posy.client_app.export.check import compare
from posy.client_app.export.graph import NUMBERS, RawModel, codes_of, columns_by_input
from posy.client_app.export.programs import tracing
from posy.client_app.export.samples import network_inputs, random_check
from posy.client_app.stored import ClientModel

CARD = "posy.json"
"""Name of the extra file that contains the model card."""
CALL = "call"
"""Key of the card that describes the arguments."""


def write(model: ClientModel, card: Mapping[str, Any], path: Path) -> float:
    """Write a model to a TorchScript file, and return its largest difference from the stored model.

    Raises
    ------
    ExportError
        If the file's outputs differ from the stored model's.
    Exception
        If PyTorch cannot trace the network.
    """
    preprocessing, encoder = model.preprocessing, model.preprocessing.encoder
    groups = columns_by_input(encoder) if encoder else {}
    examples = network_inputs(preprocessing, random_check(model).inputs)
    raw = RawModel(model)
    with tracing(raw, examples):
        traced = torch.jit.trace(raw, examples, check_trace=False)  # type: ignore[no-untyped-call]
    names = {name: [column.name for column in columns] for name, columns in groups.items()}
    call = f"model({', '.join(entry['name'] for entry in card['inputs'])})"
    if categorical := groups.get("codes"):
        tables = [codes_of(column) for column in categorical]
        unknown_codes = [len(column.categories) for column in categorical]
        kind = NumbersAndCategories if NUMBERS in groups else Categories
        traced = torch.jit.script(kind(traced, tables, unknown_codes))
        call = f"model({'numbers, ' * (NUMBERS in groups)}categories)"
    elif groups:
        call = "model(numbers)"
    arguments = {"numbers": names.get(NUMBERS, []), "categories": names.get("codes", [])} if groups else {}
    about = json.dumps({**card, CALL: call, "arguments": arguments}, ensure_ascii=False)
    _save(traced, path, about)
    loaded = torch.jit.load(path)  # type: ignore[no-untyped-call]

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        tensors: list[Any] = list(network_inputs(preprocessing, inputs))
        if "codes" in names:
            tensors[-1] = [list(inputs[name]) for name in names["codes"]]
        return np.asarray(loaded(*tensors))

    return compare(model, run)


class Categories(nn.Module):
    """A network whose only input is a list of categorical columns, each a list of strings."""

    tables: list[dict[str, int]]
    unknown_codes: list[int]

    def __init__(self, network: nn.Module, tables: list[dict[str, int]], unknown_codes: list[int]) -> None:
        super().__init__()
        self.network, self.tables, self.unknown_codes = network, tables, unknown_codes

    def forward(self, categories: list[list[str]]) -> Tensor:
        """Return the outputs ``(N, C)``."""
        outputs: Tensor = self.network(codes_in(categories, self.tables, self.unknown_codes))
        return outputs


class NumbersAndCategories(Categories):
    """A network with numeric columns, float64 ``(N, K)``, and categorical columns."""

    def forward(self, numbers: Tensor, categories: list[list[str]]) -> Tensor:  # type: ignore[override]
        """Return the outputs ``(N, C)``."""
        outputs: Tensor = self.network(numbers, codes_in(categories, self.tables, self.unknown_codes))
        return outputs


def codes_in(categories: list[list[str]], tables: list[dict[str, int]], unknown_codes: list[int]) -> Tensor:
    """Return the codes of categorical columns, int64 ``(N, M)``."""
    columns: list[Tensor] = []
    for number, column in enumerate(categories):
        codes: list[int] = []
        for value in column:
            table = tables[number]
            codes.append(table[value] if value in table else unknown_codes[number])
        columns.append(torch.tensor(codes, dtype=torch.int64))
    return torch.stack(columns, dim=1)


def _save(module: torch.jit.ScriptModule, path: Path, card: str) -> None:
    """Write a module without its debug information, which contains the paths of source files."""
    content = io.BytesIO()
    torch.jit.save(module, content, _extra_files={CARD: card})
    with zipfile.ZipFile(content) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                target.writestr(entry, source.read(entry))
