"""Mini-batches: of one client, and of several clients side by side."""

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
    """Samples on the device that trains: inputs ``(n, ...)`` and labels ``(n,)``."""

    x: Tensor
    y: Tensor


class Batch(NamedTuple):
    """A mini-batch: inputs ``(B, ...)``, labels ``(B,)``, optional sample weights ``(B,)`` and notes ``(B, ...)``.

    ``numbers`` ``(B, k)`` are for a network with dropout.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    notes: Tensor | None = None
    numbers: Tensor | None = None


class Augment(NamedTuple):
    """Changes inputs by random numbers, which are drawn on the CPU and moved to the device once a pass.

    ``draw(count, generator)`` returns the numbers of one batch ``(count, k)``, and ``change(x, numbers)`` the changed
    inputs, each of which depends on its own numbers alone. The generator is one stream for all batches, in their order.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    change: Callable[[Tensor, Tensor], Tensor]
    generator: torch.Generator

    def numbers(self, counts: Sequence[int]) -> Tensor:
        """Return the numbers of some batches ``(sum of counts, k)``."""
        return torch.cat([self.draw(count, self.generator) for count in counts])


class DropoutNumbers(NamedTuple):
    """Draws the numbers of a network with dropout as :class:`Augment` draws its own: on the CPU, from one stream."""

    width: int
    generator: torch.Generator

    def numbers(self, counts: Sequence[int]) -> Tensor:
        """Return the numbers of some batches ``(sum of counts, width)``."""
        return torch.cat([torch.rand(count, self.width, generator=self.generator) for count in counts])


def plan_passes(epochs: int, steps: int, count: int, size: int, smallest: int = 1) -> list[int | None]:
    """Return the number of steps of each pass over ``count`` samples; None means a whole pass.

    ``steps`` takes the place of ``epochs`` unless it is 0. A last batch of fewer than ``smallest`` samples is skipped.
    """
    if not steps:
        return [None] * epochs
    whole, rest = divmod(count, size)
    full, rest = divmod(steps, max(1, whole + (rest >= smallest)))
    return [None] * full + ([rest] if rest else [])


def full_batches(size: int, count: int, least: int) -> int:
    """Return the smallest batch size from ``size`` on with which a pass has no batch below ``least`` samples."""
    while size < count and 0 < count % size < least:
        size += 1
    return size


@dataclass(slots=True)
class Share:
    """One client's samples, and the passes that it makes over them in random order."""

    samples: Samples
    passes: Sequence[int | None]  # steps of each pass; None: all samples
    generator: torch.Generator
    size: int  # samples in a batch
    smallest: int = 1  # fewest samples in a batch: a smaller last batch is skipped
    weight: Tensor | None = None  # (n,), of each sample
    odds: Tensor | None = None  # (n,); a pass is n draws with replacement in proportion to them
    augment: Augment | None = None
    notes: Tensor | None = None  # (n, ...), constants that go with the samples
    dropout: DropoutNumbers | None = None

    @property
    def count(self) -> int:
        """Number n of samples."""
        return self.samples.y.shape[0]

    def length(self, steps: int | None) -> int:
        """Return the number of samples in a pass of some steps."""
        count = self.count
        count = count if steps is None else min(count, steps * self.size)
        rest = count % self.size
        return count - rest if rest < self.smallest else count

    @property
    def total(self) -> int:
        """Number of samples in all passes."""
        return sum(map(self.length, self.passes))

    @property
    def seen(self) -> int:
        """Number of samples in the last pass."""
        return self.length(self.passes[-1])

    @property
    def steps(self) -> int:
        """Number of mini-batches in all passes."""
        return sum(-(-self.length(steps) // self.size) for steps in self.passes)

    def order(self, steps: int | None) -> Tensor:
        """Draw the indices of the samples of a pass."""
        count = self.count
        if self.odds is None:
            order = torch.randperm(count, generator=self.generator)
        else:
            order = torch.multinomial(self.odds.cpu(), count, replacement=True, generator=self.generator)
        return order[: self.length(steps)]

    def batches(self, steps: int | None) -> Iterator[Batch]:
        """Yield the mini-batches of one pass, in a fresh random order."""
        order = self.order(steps).to(self.samples.y.device)
        # Shuffled once a pass: batches are then views, with no gather and no copy in a step.
        x = self.samples.x
        x = x.permute(0, 2, 3, 1)[order].permute(0, 3, 1, 2) if x.dim() == 4 else x[order]
        y, weight, notes = (None if each is None else each[order] for each in (self.samples.y, self.weight, self.notes))
        assert y is not None
        pieces = [slice(start, min(start + self.size, len(y))) for start in range(0, len(y), self.size)]
        counts = [piece.stop - piece.start for piece in pieces]
        boxes, dropped = (
            None if source is None else source.numbers(counts).to(x.device) for source in (self.augment, self.dropout)
        )
        for piece in pieces:
            inputs = x[piece] if self.augment is None or boxes is None else self.augment.change(x[piece], boxes[piece])
            yield Batch(inputs, y[piece], *(None if each is None else each[piece] for each in (weight, notes, dropped)))

    def __iter__(self) -> Iterator[tuple[Batch, int | None]]:
        """Yield the batches of all passes with their weights in the loss: the size, or None before the last pass."""
        for number, steps in enumerate(self.passes, start=1):
            for batch in self.batches(steps):
                yield batch, len(batch.y) if number == len(self.passes) else None

    def draw(self, index: IntArray, held: FloatArray, counted: FloatArray) -> None:
        """Draw all passes: write the samples ``(S, width)`` of each step, their number ``(S,)``, and how many count."""
        step, width = 0, index.shape[1]  # narrower than a batch only if one holds all
        for steps in self.passes:
            order = self.order(steps).numpy()
            whole, rest = divmod(len(order), self.size)
            index.reshape(-1)[step * width : step * width + len(order)] = order
            end = step + whole + bool(rest)
            held[step:end] = self.size
            if rest:
                held[end - 1] = rest
            begin, step = step, end
        counted[begin:step] = held[begin:step]


class Schedule:
    """The mini-batches of P clients side by side; each client has the batches that it would draw alone.

    The clients are sorted by their numbers of steps, the longest training first. The clients that still train at a step
    are therefore the first ones. All batches are as wide as the widest, and the padding has weight 0. ``order`` has the
    index of the share at each position, ``seen`` ``(P, 1)`` the number of samples in its last pass.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        device = shares[0].samples.y.device
        width = min(shares[0].size, max(share.count for share in shares))
        self.order = sorted(range(len(shares)), key=lambda i: -shares[i].steps)
        shares = [shares[i] for i in self.order]
        most = shares[0].steps
        indices = np.zeros((len(shares), most, width), np.int64)
        sizes, last = np.zeros((2, len(shares), most), np.float32)
        for share, *rows in zip(shares, indices, sizes, last, strict=True):
            share.draw(*rows)
        index, held, counted = (
            torch.from_numpy(table).transpose(0, 1).contiguous() for table in (indices, sizes, last)
        )
        self._active = (held > 0).sum(1).tolist()
        # Several models of one client have its samples in common: they are held once.
        holdings = [(id(share.samples.x), id(share.weight), id(share.notes)) for share in shares]
        holders = dict(zip(holdings, shares, strict=True))
        owners = list(holders.values())
        begin = dict(zip(holders, np.cumsum([0, *(share.count for share in owners)]).tolist(), strict=False))
        starts = torch.tensor([begin[holding] for holding in holdings])
        mask = torch.arange(width) < held[..., None]
        self._index = (index + starts[:, None]).to(device)
        self._weight = (mask * (width / held[..., None].clamp_min(1))).to(device)
        self._counted = counted[..., None].to(device)
        self.seen = self._counted.sum(0)
        self._x = torch.cat([share.samples.x for share in owners]).contiguous()
        self._y = torch.cat([share.samples.y for share in owners])
        self._sample_weight = None
        if any(share.weight is not None for share in owners):
            ones = [torch.ones(s.count, device=device) if s.weight is None else s.weight for s in owners]
            self._sample_weight = torch.cat(ones)
        self._notes = None if shares[0].notes is None else torch.cat([_present(share.notes) for share in owners])
        self._augment = shares[0].augment
        self._boxes = _drawn([share.augment for share in shares], sizes, mask, device)
        self._dropped = _drawn([share.dropout for share in shares], sizes, mask, device)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the batches of all steps."""
        for step, active in enumerate(self._active):
            yield self.at(step, active)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first of consecutive steps in which the same A clients train, the one after the last, and A."""
        begin = 0
        for active, steps in groupby(self._active):
            end = begin + len(list(steps))
            yield begin, end, active
            begin = end

    def at(self, step: int | Tensor, active: int) -> tuple[Batch, Tensor]:
        """Return the batches ``(A, B, ...)`` of a step, and their weights in the loss ``(A, 1)``.

        A is how many clients still train then; the step's number may be a tensor ``(1,)`` on the device. Sample weights
        are such that the mean over a client's whole row is the mean over its samples.
        """

        def own(table: Tensor) -> Tensor:
            if isinstance(step, Tensor):
                return table[:, :active].index_select(0, step)[0]
            return table[step, :active]

        index, weight = own(self._index), own(self._weight)
        x = self._x[index]
        if self._augment is not None:
            x = self._augment.change(x.flatten(0, 1), own(_present(self._boxes)).flatten(0, 1)).view(x.shape)
        if self._sample_weight is not None:
            weight = weight * self._sample_weight[index]
        notes = None if self._notes is None else self._notes[index]
        dropped = None if self._dropped is None else own(self._dropped)
        return Batch(x, self._y[index], weight, notes, dropped), own(self._counted)


def _drawn(
    sources: Sequence[Augment | DropoutNumbers | None], sizes: FloatArray, mask: Tensor, device: torch.device
) -> Tensor | None:
    """Return the numbers ``(S, P, B, k)`` of P clients' steps, whose batches have ``sizes`` ``(P, S)``, or None.

    What fills up a batch, where ``mask`` ``(S, P, B)`` is not set, gets none: they would come from the client's stream.
    """
    drawn = []
    for source, counts, own in zip(sources, sizes.astype(int), mask.unbind(1), strict=True):
        if source is None:  # then no client has any
            return None
        numbers = source.numbers(counts[counts > 0].tolist())
        drawn.append(torch.zeros(*own.shape, numbers.shape[1]))
        drawn[-1][own] = numbers
    return torch.stack(drawn, 1).to(device)


def _present(value: T | None) -> T:
    assert value is not None  # trainings of one kind all have it
    return value
