"""A stored model as a module of tensor operations: raw samples in, probabilities or values out."""

import copy
import itertools

import torch
from torch import Tensor, nn

from posy.client_app.stored import ClientModel
from posy.data.encoding import EncodedColumn, Encoder
from posy.data.inputs import scaled
from posy.data.labels import written_label
from posy.data.readers.cells import MISSING
from posy.models import series, text

NUMBERS, CODES = "numbers", "codes"
"""The inputs of :class:`EncodedTable`."""


class RawModel(nn.Module):
    """A model that takes raw samples, as tensors.

    The input is the only input in :func:`posy.client_app.schema.input_specs`. With an encoder, the model takes the
    inputs of :class:`EncodedTable` that have columns.
    """

    centre: Tensor
    width: Tensor

    def __init__(self, model: ClientModel) -> None:
        super().__init__()
        self.kind = model.preprocessing.task.kind
        self.register_buffer("centre", torch.from_numpy(model.preprocessing.mean))
        self.register_buffer("width", torch.from_numpy(model.preprocessing.std))
        self.model = with_standard_layers(model)
        self.table = EncodedTable(model.preprocessing.encoder) if model.preprocessing.encoder else None
        self.eval()

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        """Return the probabilities or values, ``(N, C)``."""
        x = self.table(first, second) if self.table is not None else first.clone()  # the normalisation is in place
        if self.kind == "image":
            x = x.permute(0, 2, 3, 1)
        outputs: Tensor = self.model(scaled(x, self.kind, self.centre, self.width))
        return outputs


class EncodedTable(nn.Module):
    """The encoding of :class:`posy.data.encoding.Encoder` in tensor operations.

    Its inputs are the numeric columns, float64 ``(N, K)`` with NaN for missing values, and the codes of the categorical
    columns, int64 ``(N, M)``: the index of a category, the number of categories for another value, or -1 for a missing
    value. Where a column lacks a required value, the output contains NaN.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.columns = [column for column in encoder.columns if column.is_used]
        self.has_numbers = NUMBERS in columns_by_input(encoder)

    def forward(self, first: Tensor, second: Tensor | None) -> Tensor:
        """Return the encoded columns, float64 ``(N, F)``."""
        numbers, codes = (first, second) if self.has_numbers else (None, first)
        parts: list[Tensor] = []
        position = {True: 0, False: 0}
        for column in self.columns:
            is_number = column.mean is not None
            source = numbers if is_number else codes
            assert source is not None
            values = source[:, position[is_number] : position[is_number] + 1]
            position[is_number] += 1
            count = len(column.categories)
            gaps = torch.isnan(values) if is_number else values < 0
            filled = torch.full_like(values, column.mean or 0.0, dtype=torch.float64)
            if is_number:
                parts.append(torch.where(gaps, filled, values) if column.imputes else values)
                rare = torch.zeros_like(gaps)
            else:
                required = filled if column.imputes else torch.where(gaps, torch.full_like(filled, torch.nan), filled)
                parts.append((values == torch.arange(count)).double() + required)
                rare = (values == count) | gaps if not column.missing else values == count
            if column.missing:
                parts.append(gaps.double())
            if column.other:
                parts.append(rare.double())
        return torch.cat(parts, dim=1)


def columns_by_input(encoder: Encoder) -> dict[str, list[EncodedColumn]]:
    """Return the columns of each input of :class:`EncodedTable` that has columns."""
    columns = [column for column in encoder.columns if column.is_used]
    numeric = [column for column in columns if column.mean is not None]
    categorical = [column for column in columns if column.mean is None]
    return {name: part for name, part in ((NUMBERS, numeric), (CODES, categorical)) if part}


def codes_of(column: EncodedColumn) -> dict[str, int]:
    """Return the code of each category of a column, as in :class:`EncodedTable`, and -1 for missing values.

    The keys include the spellings of missing values that Posy accepts in a table, and whole numbers with a point.
    """
    codes: dict[str, int] = {}
    for code, category in enumerate(column.categories):
        codes[category] = code
        if written_label(f"{category}.0") == category:
            codes[f"{category}.0"] = code
    for spelling in MISSING:
        letters = [(letter.lower(), letter.upper()) for letter in spelling]
        codes |= {"".join(chosen): -1 for chosen in itertools.product(*letters)}
    return codes


class SkippingLSTM(nn.Module):
    """:class:`posy.models.text.LSTM` as an ``nn.LSTM``, so that the graph does not contain every step.

    The tokens whose vector is zero move behind the others, where they cannot affect the output after the last token.
    """

    def __init__(self, layer: text.LSTM) -> None:
        super().__init__()
        self.lstm = nn.LSTM(layer.input.shape[1], layer.units, batch_first=True)
        values = (layer.input, layer.recurrent, layer.bias, torch.zeros_like(layer.bias))
        _load(self.lstm, values)

    def forward(self, x: Tensor) -> Tensor:
        """Map vectors ``(B, L, inputs)`` to ``(B, units)``."""
        length = x.shape[1]
        present = (x != 0).any(-1)
        # The keys differ, because the order of equal keys would be undefined.
        keys = torch.arange(length) + length * (~present).long()
        order = keys.topk(length, dim=1, largest=False, sorted=True).indices
        outputs, _ = self.lstm(x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[2])))
        count = present.long().sum(1)
        last = (count - 1).clamp_min(0).reshape(-1, 1, 1).expand(-1, 1, outputs.shape[2])
        return outputs.gather(1, last).squeeze(1) * (count > 0).unsqueeze(1)


class LastGRU(nn.Module):
    """:class:`posy.models.series.GRU` as an ``nn.GRU``, so that the graph does not contain every step."""

    def __init__(self, layer: series.GRU) -> None:
        super().__init__()
        self.gru = nn.GRU(layer.input.shape[1], layer.units, batch_first=True)
        _load(self.gru, (layer.input, layer.recurrent, layer.input_bias, layer.recurrent_bias))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, inputs)`` to ``(B, units)``."""
        outputs, _ = self.gru(x)
        last: Tensor = outputs[:, -1]
        return last


def with_standard_layers(model: ClientModel) -> ClientModel:
    """Return a copy of a model whose recurrent layers are PyTorch's; the outputs are equal up to rounding."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if type(layer) is text.LSTM:
            setattr(model.get_submodule(owner), name, SkippingLSTM(layer))
        elif type(layer) is series.GRU:
            setattr(model.get_submodule(owner), name, LastGRU(layer))
    return model.eval().requires_grad_(False)


def _load(layer: nn.RNNBase, values: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Set the input weight, the recurrent weight and the two biases of a recurrent layer."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    layer.load_state_dict(dict(zip(names, values, strict=True)))
