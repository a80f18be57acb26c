"""Mini-batches: of one client, and of several clients side by side."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """Samples on the device that trains: inputs ``(n, ...)`` and labels ``(n,)``."""

    x: Tensor
    y: Tensor


class Batch(NamedTuple):
    """A mini-batch: inputs ``(B, ...)``, labels ``(B,)`` and optional sample weights ``(B,)``."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


class Augment(NamedTuple):
    """Changes inputs by random numbers: drawn on the CPU, for a whole training, and moved to its device at once.

    Attributes
    ----------
    draw : callable
        ``draw(count, generator)`` returns the numbers of one batch ``(count, k)``, on the CPU.
    change : callable
        ``change(x, numbers)`` returns the inputs ``(B, ...)`` changed; each by its own numbers alone.
    generator : torch.Generator
        One stream for all batches of the training, in their order.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    change: Callable[[Tensor, Tensor], Tensor]
    generator: torch.Generator

    def numbers(self, counts: Sequence[int]) -> Tensor:
        """Return the numbers of some batches ``(sum of counts, k)``."""
        return torch.cat([self.draw(count, self.generator) for count in counts])


def plan_epochs(epochs: int, steps: int, count: int, size: int, smallest: int = 1) -> list[int | None]:
    """Return the number of steps of each pass over ``count`` samples; None means a whole pass.

    ``steps`` takes the place of ``epochs`` unless it is 0. A last batch of fewer than ``smallest`` samples is none.
    """
    if not steps:
        return [None] * epochs
    whole, rest = divmod(count, size)
    full, rest = divmod(steps, max(1, whole + (rest >= smallest)))
    return [None] * full + ([rest] if rest else [])


def batches(
    samples: Samples,
    weight: Tensor | None,
    size: int,
    steps: int | None,
    generator: torch.Generator,
    smallest: int = 1,
    odds: Tensor | None = None,
    augment: Augment | None = None,
) -> Iterator[Batch]:
    """Yield the mini-batches of one pass (or its first ``steps``) in a fresh random order.

    A last batch of fewer than ``smallest`` samples is left out. With ``odds`` ``(n,)`` a pass is n draws
    with replacement in proportion to them. ``augment`` changes the inputs.
    """
    order = _order(len(samples.y), size, steps, generator, smallest, odds).to(samples.y.device)
    # Shuffled once a pass: batches are then views, with no gather and no copy on the step.
    x = samples.x.permute(0, 2, 3, 1)[order].permute(0, 3, 1, 2) if samples.x.dim() == 4 else samples.x[order]
    y = samples.y[order]
    w = None if weight is None else weight[order]
    pieces = [slice(start, min(start + size, len(order))) for start in range(0, len(order), size)]
    numbers = None
    if augment is not None:
        numbers = augment.numbers([piece.stop - piece.start for piece in pieces]).to(x.device)
    for piece in pieces:
        inputs = x[piece] if augment is None or numbers is None else augment.change(x[piece], numbers[piece])
        yield Batch(inputs, y[piece], None if w is None else w[piece])


def _order(
    count: int, size: int, steps: int | None, generator: torch.Generator, smallest: int, odds: Tensor | None
) -> Tensor:
    if odds is None:
        order = torch.randperm(count, generator=generator)
    else:
        order = torch.multinomial(odds.cpu(), count, replacement=True, generator=generator)
    if steps is not None:
        order = order[: steps * size]
    rest = len(order) % size
    return order[: len(order) - rest] if rest < smallest else order


class Share(NamedTuple):
    """One client's part in a :class:`Schedule`."""

    samples: Samples
    weight: Tensor | None
    epochs: Sequence[int | None]
    generator: torch.Generator
    augment: Augment | None
    odds: Tensor | None = None


class Schedule:
    """The mini-batches of P clients side by side, each client's the very ones that it would draw alone.

    Clients come in the order of their numbers of steps, the longest training first, so that those which
    still train at a step are the first ones and none computes in vain. Batches are as wide as the widest;
    what fills them up has weight 0.

    Parameters
    ----------
    shares : sequence of Share
        The clients.
    size, smallest : int
        Samples in a batch, and fewer than which make none.
    device : torch.device
        Where the samples are.

    Attributes
    ----------
    order : list of int
        Which share stands at each place.
    seen : Tensor, ``(P, 1)``
        Samples of each client's last pass, in that order.
    """

    def __init__(self, shares: Sequence[Share], size: int, smallest: int, device: torch.device) -> None:
        width = min(size, max(len(share.samples.y) for share in shares))
        tables = [_table(share, size, width, smallest) for share in shares]
        self.order = sorted(range(len(shares)), key=lambda i: -len(tables[i][0]))
        shares, tables = [shares[i] for i in self.order], [tables[i] for i in self.order]
        longest, number = len(tables[0][0]), len(shares)
        index = torch.zeros(longest, number, width, dtype=torch.int64)
        weight = torch.zeros(longest, number, width)
        counted = torch.zeros(longest, number)
        offset = 0
        for place, (rows, mask, last) in enumerate(tables):
            index[: len(rows), place] = rows + offset
            weight[: len(rows), place] = mask
            counted[: len(rows), place] = last
            offset += len(shares[place].samples.y)
        lengths = torch.tensor([len(rows) for rows, _, _ in tables])
        self._active = (lengths[None, :] > torch.arange(longest)[:, None]).sum(1).tolist()
        self.seen = counted.sum(0)[:, None].to(device)
        self._index, self._weight, self._counted = index.to(device), weight.to(device), counted.to(device)
        self._x = torch.cat([share.samples.x for share in shares]).contiguous()
        self._y = torch.cat([share.samples.y for share in shares])
        self._sample_weight = None
        if any(share.weight is not None for share in shares):
            ones = [torch.ones(len(s.samples.y), device=device) if s.weight is None else s.weight for s in shares]
            self._sample_weight = torch.cat(ones)
        self._augment = shares[0].augment
        if self._augment is not None:
            # What fills up a batch has no numbers of its own: it would draw from the client's stream.
            drawn = []
            for share, (_, mask, _) in zip(shares, tables, strict=True):
                assert share.augment is not None
                numbers = share.augment.numbers((mask > 0).sum(1).tolist())
                row = torch.zeros(longest, width, numbers.shape[1])
                row[: len(mask)][mask > 0] = numbers
                drawn.append(row)
            self._numbers = torch.stack(drawn, 1).to(device)

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches ``(A, B, ...)`` of the A clients still training, and what each counts in the loss ``(A, 1)``.

        Each sample's weight is such that the mean over a client's whole row is the mean over its samples.
        """
        for step, active in enumerate(self._active):
            index = self._index[step, :active]
            weight = self._weight[step, :active]
            x = self._x[index]
            if self._augment is not None:
                numbers = self._numbers[step, :active].flatten(0, 1)
                x = self._augment.change(x.flatten(0, 1), numbers).view(x.shape)
            if self._sample_weight is not None:
                weight = weight * self._sample_weight[index]
            yield Batch(x, self._y[index], weight), self._counted[step, :active, None]


def _table(share: Share, size: int, width: int, smallest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a client's samples ``(S, width)`` by step, their weights, and what each step counts ``(S,)``."""
    indices, sizes, last = [], [], torch.zeros(0)
    for steps in share.epochs:
        order = _order(len(share.samples.y), size, steps, share.generator, smallest, share.odds)
        rows = -(-len(order) // size)
        padded = torch.zeros(rows, width, dtype=torch.int64)  # narrower than a batch only where one holds all samples
        padded.view(-1)[: len(order)] = order
        held = torch.full((rows,), float(size))
        if len(order) % size:
            held[-1] = len(order) % size
        indices.append(padded)
        sizes.append(held)
        last = held
    rows_held = torch.cat(sizes)
    counted = torch.zeros_like(rows_held)
    if len(last):
        counted[-len(last) :] = last
    mask = torch.arange(width)[None, :] < rows_held[:, None]
    return torch.cat(indices), mask * (width / rows_held[:, None]), counted
