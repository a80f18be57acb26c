"""Mini-batches of one client, and of several clients side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posy.models.parameters import FloatArray

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")


class Samples(NamedTuple):
    """Samples on the training device: inputs ``(n, ...)``, and classes ``(n,)``, or labels or values ``(n, C)``."""

    x: Tensor
    y: Tensor


class Batch(NamedTuple):
    """A mini-batch: inputs ``(B, ...)``, targets and optional sample weights ``(B,)``.

    The targets are classes ``(B,)``, or labels or standardised values ``(B, C)``.

    ``notes`` ``(B, ...)`` contains per-sample constants, and ``numbers`` ``(B, k)`` random numbers for dropout.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    notes: Tensor | None = None
    numbers: Tensor | None = None


class Augment(NamedTuple):
    """Augments inputs with random numbers, which are drawn on the CPU and moved to the device once per pass.

    ``draw(count, generator)`` returns one batch's numbers ``(count, k)``. ``change(x, numbers)`` returns the augmented
    inputs, each of which depends only on its own row of numbers. All batches draw from the same generator, in order.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    change: Callable[[Tensor, Tensor], Tensor]
    generator: torch.Generator

    def numbers(self, counts: Sequence[int]) -> Tensor:
        """Return random numbers ``(sum of counts, k)`` for batches of the given sizes."""
        return torch.cat([self.draw(count, self.generator) for count in counts])


class DropoutNumbers(NamedTuple):
    """Draws random numbers for dropout on the CPU, in order from one generator, as :class:`Augment` does."""

    width: int
    generator: torch.Generator

    def numbers(self, counts: Sequence[int]) -> Tensor:
        """Return random numbers ``(sum of counts, width)`` for batches of the given sizes."""
        return torch.cat([torch.rand(count, self.width, generator=self.generator) for count in counts])


def plan_passes(epochs: int, steps: int, count: int, size: int, smallest: int = 1) -> list[int | None]:
    """Return the number of steps in each pass over ``count`` samples, with None for a full pass.

    Unless ``steps`` is 0, it replaces ``epochs``. A last batch with fewer than ``smallest`` samples is skipped.
    """
    if not steps:
        return [None] * epochs
    batches, remainder = divmod(count, size)
    full_passes, extra_steps = divmod(steps, max(1, batches + (remainder >= smallest)))
    return [None] * full_passes + ([extra_steps] if extra_steps else [])


def full_batches(size: int, count: int, least: int) -> int:
    """Return the smallest batch size, at least ``size``, for which no batch has fewer than ``least`` samples."""
    while size < count and 0 < count % size < least:
        size += 1
    return size


@dataclass(slots=True)
class Share:
    """One client's samples, and its passes over them in random order."""

    samples: Samples
    passes: Sequence[int | None]  # number of steps in each pass, or None for a full pass
    generator: torch.Generator
    size: int  # samples per batch
    smallest: int = 1  # minimum number of samples in a batch; a smaller last batch is skipped
    weight: Tensor | None = None  # (n,), the weight of each sample
    odds: Tensor | None = None  # (n,); a pass draws n samples with replacement, in proportion to the odds
    augment: Augment | None = None
    notes: Tensor | None = None  # (n, ...), per-sample constants
    dropout: DropoutNumbers | None = None

    @property
    def count(self) -> int:
        """The number of samples, n."""
        return self.samples.y.shape[0]

    def length(self, steps: int | None) -> int:
        """Return the number of samples in a pass of ``steps`` steps, or in a full pass if None."""
        count = self.count
        count = count if steps is None else min(count, steps * self.size)
        remainder = count % self.size
        return count - remainder if remainder < self.smallest else count

    @property
    def total(self) -> int:
        """Number of samples in all passes."""
        return sum(map(self.length, self.passes))

    @property
    def last_pass_count(self) -> int:
        """Number of samples in the last pass."""
        return self.length(self.passes[-1])

    @property
    def steps(self) -> int:
        """Number of mini-batches in all passes."""
        return sum(-(-self.length(steps) // self.size) for steps in self.passes)

    def order(self, steps: int | None) -> Tensor:
        """Return the sample indices of a pass in random order."""
        count = self.count
        if self.odds is None:
            order = torch.randperm(count, generator=self.generator)
        else:
            order = torch.multinomial(self.odds.cpu(), count, replacement=True, generator=self.generator)
        return order[: self.length(steps)]

    def batches(self, steps: int | None) -> Iterator[Batch]:
        """Yield the mini-batches of one pass, in a fresh random order."""
        order = self.order(steps).to(self.samples.y.device)
        # Samples are shuffled once per pass, so batches are views and a step copies nothing.
        x = self.samples.x
        x = x.permute(0, 2, 3, 1)[order].permute(0, 3, 1, 2) if x.dim() == 4 else x[order]
        y, weight, notes = (None if each is None else each[order] for each in (self.samples.y, self.weight, self.notes))
        assert y is not None
        pieces = [slice(start, min(start + self.size, len(y))) for start in range(0, len(y), self.size)]
        counts = [piece.stop - piece.start for piece in pieces]
        draws, dropout = (
            None if source is None else source.numbers(counts).to(x.device) for source in (self.augment, self.dropout)
        )
        for piece in pieces:
            inputs = x[piece] if self.augment is None or draws is None else self.augment.change(x[piece], draws[piece])
            yield Batch(inputs, y[piece], *(None if each is None else each[piece] for each in (weight, notes, dropout)))

    def __iter__(self) -> Iterator[tuple[Batch, int | None]]:
        """Yield all batches, each with its weight in the mean loss: its size in the last pass, otherwise None."""
        for number, steps in enumerate(self.passes, start=1):
            for batch in self.batches(steps):
                yield batch, len(batch.y) if number == len(self.passes) else None

    def draw(self, index: IntArray, sizes: FloatArray, last_sizes: FloatArray) -> None:
        """Draw all passes, and fill in each step's sample indices ``(S, width)`` and batch size ``(S,)``.

        ``last_sizes`` ``(S,)`` receives only the batch sizes of the last pass.
        """
        step, width = 0, index.shape[1]  # the width is less than the batch size only if one batch contains all samples
        for steps in self.passes:
            order = self.order(steps).numpy()
            batches, remainder = divmod(len(order), self.size)
            index.reshape(-1)[step * width : step * width + len(order)] = order
            end = step + batches + bool(remainder)
            sizes[step:end] = self.size
            if remainder:
                sizes[end - 1] = remainder
            begin, step = step, end
        last_sizes[begin:step] = sizes[begin:step]


class Schedule:
    """The mini-batches of P clients side by side. Each client's batches are the same as if it trained alone.

    The clients are sorted by decreasing number of steps, so the clients that are still training at any step come first.
    All
    batches are padded to the size of the largest batch, and the padding has weight 0. ``order`` contains the index of
    the share at each position. ``last_pass_count`` ``(P, 1)`` is the number of samples in each client's last pass.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        device = shares[0].samples.y.device
        width = min(shares[0].size, max(share.count for share in shares))
        self.order = sorted(range(len(shares)), key=lambda i: -shares[i].steps)
        shares = [shares[i] for i in self.order]
        max_steps = shares[0].steps
        indices = np.zeros((len(shares), max_steps, width), np.int64)
        sizes, last_sizes = np.zeros((2, len(shares), max_steps), np.float32)
        for share, *rows in zip(shares, indices, sizes, last_sizes, strict=True):
            share.draw(*rows)
        index, step_sizes, counted = (
            torch.from_numpy(table).transpose(0, 1).contiguous() for table in (indices, sizes, last_sizes)
        )
        self._active = (step_sizes > 0).sum(1).tolist()
        # Several models of one client share its samples, so the samples are stored only once.
        keys = [(id(share.samples.x), id(share.weight), id(share.notes)) for share in shares]
        by_key = dict(zip(keys, shares, strict=True))
        distinct_shares = list(by_key.values())
        offsets = dict(zip(by_key, np.cumsum([0, *(share.count for share in distinct_shares)]).tolist(), strict=False))
        starts = torch.tensor([offsets[key] for key in keys])
        mask = torch.arange(width) < step_sizes[..., None]
        self._index = (index + starts[:, None]).to(device)
        self._weight = (mask * (width / step_sizes[..., None].clamp_min(1))).to(device)
        self._counted = counted[..., None].to(device)
        self.last_pass_count = self._counted.sum(0)
        self._x = torch.cat([share.samples.x for share in distinct_shares]).contiguous()
        self._y = torch.cat([share.samples.y for share in distinct_shares])
        self._sample_weight = None
        if any(share.weight is not None for share in distinct_shares):
            weights = [torch.ones(s.count, device=device) if s.weight is None else s.weight for s in distinct_shares]
            self._sample_weight = torch.cat(weights)
        self._notes = (
            None if shares[0].notes is None else torch.cat([_not_none(share.notes) for share in distinct_shares])
        )
        self._augment = shares[0].augment
        self._augment_numbers = _draw_numbers([share.augment for share in shares], sizes, mask, device)
        self._dropout_numbers = _draw_numbers([share.dropout for share in shares], sizes, mask, device)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the batches of all steps."""
        for step, active in enumerate(self._active):
            yield self.at(step, active)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(begin, end, A)`` for each range of consecutive steps in which the same A clients train."""
        begin = 0
        for active, steps in groupby(self._active):
            end = begin + len(list(steps))
            yield begin, end, active
            begin = end

    def at(self, step: int | Tensor, active: int) -> tuple[Batch, Tensor]:
        """Return the batches ``(A, B, ...)`` of a step, and their weights in the loss ``(A, 1)``.

        A is the number of clients that still train at this step. The step number may be a tensor ``(1,)`` on the
        device. The sample weights make the mean over a client's padded row equal to the mean over its samples.
        """

        def rows_at_step(table: Tensor) -> Tensor:
            if isinstance(step, Tensor):
                return table[:, :active].index_select(0, step)[0]
            return table[step, :active]

        index, weight = rows_at_step(self._index), rows_at_step(self._weight)
        x = self._x[index]
        if self._augment is not None:
            numbers = rows_at_step(_not_none(self._augment_numbers))
            x = self._augment.change(x.flatten(0, 1), numbers.flatten(0, 1)).view(x.shape)
        if self._sample_weight is not None:
            weight = weight * self._sample_weight[index]
        notes = None if self._notes is None else self._notes[index]
        dropout = None if self._dropout_numbers is None else rows_at_step(self._dropout_numbers)
        return Batch(x, self._y[index], weight, notes, dropout), rows_at_step(self._counted)


def _draw_numbers(
    sources: Sequence[Augment | DropoutNumbers | None], sizes: FloatArray, mask: Tensor, device: torch.device
) -> Tensor | None:
    """Return random numbers ``(S, P, B, k)`` for P clients' batches, whose ``sizes`` are ``(P, S)``, or None.

    The numbers are 0 for padding, where ``mask`` ``(S, P, B)`` is False. Drawing numbers for padding would change the
    client's random stream.
    """
    tables = []
    for source, counts, is_sample in zip(sources, sizes.astype(int), mask.unbind(1), strict=True):
        if source is None:  # if one source is None, all are
            return None
        numbers = source.numbers(counts[counts > 0].tolist())
        tables.append(torch.zeros(*is_sample.shape, numbers.shape[1]))
        tables[-1][is_sample] = numbers
    return torch.stack(tables, 1).to(device)


def _not_none(value: T | None) -> T:
    assert value is not None  # either all jobs of the same kind have a value, or none has one
    return value
