"""Flat vectors: layouts, parts of them, and the way there and back."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posy.models.parameters import Entry, Layout, Part, layout_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2, bias=False)


def small() -> tuple[Small, Layout]:
    module = Small()
    return module, layout_of(module, {"body": module.body, "norm": module.norm, "head": module.head})


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw up to six tensors of three layers, empty and scalar ones among them, layers not always in one piece."""
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=6))
    entries: list[Entry] = []
    for number, shape in enumerate(shapes):
        layer = draw(st.sampled_from("abc"))
        start = entries[-1].stop if entries else 0
        entries.append(Entry(f"{layer}.{number}", layer, shape, start, draw(st.booleans())))
    return Layout(tuple(entries))


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, Part]:
    """Draw a length and a part of it: sorted, disjoint slices."""
    cuts = sorted(draw(st.lists(st.integers(0, 20), max_size=8, unique=True)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    return draw(st.integers(max(cuts, default=0), 25)), Part(tuple(slice(a, b) for a, b in pairs))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape, np.float32)


# -- Part ------------------------------------------------------------------------------------------------


def test_two_slices_by_hand() -> None:
    part = Part((slice(1, 3), slice(4, 5)))
    flat = np.arange(6, dtype=np.float32)
    assert part.size == 3
    assert part.take(flat).tolist() == [1, 2, 4]
    assert part.put(flat, np.array([10, 20, 40], np.float32)).tolist() == [0, 10, 20, 3, 40, 5]
    rows = torch.arange(12.0).view(2, 6)
    assert part.take(rows).tolist() == [[1, 2, 4], [7, 8, 10]]
    part.put(rows, torch.tensor([-1.0, -2.0, -4.0]))  # one vector for all rows
    assert rows.tolist() == [[0, -1, -2, 3, -4, 5], [6, -1, -2, 9, -4, 11]]


@given(parts(), st.lists(st.integers(0, 3), max_size=2), st.booleans())
@settings(deadline=None)
def test_take_and_put_are_inverse(drawn: tuple[int, Part], lead: list[int], tensors: bool) -> None:
    size, part = drawn
    flat = numbers(*lead, size)
    selected = part.take(torch.from_numpy(flat.copy()) if tensors else flat.copy())
    assert tuple(selected.shape) == (*lead, part.size)
    values = numbers(*lead, part.size) + 1
    target = flat.copy()
    wrap: Callable[[np.ndarray], Any] = torch.from_numpy if tensors else np.asarray
    returned = part.put(wrap(target), wrap(values))
    assert np.array_equal(np.asarray(returned), target)  # in place
    assert np.array_equal(np.asarray(part.take(target)), values)
    inside = np.zeros(size, bool)
    for s in part.slices:
        inside[s] = True
    assert np.array_equal(target[..., ~inside], flat[..., ~inside])
    assert np.array_equal(part.put(target, np.asarray(selected)), flat)


def test_one_slice_is_a_view_and_several_are_a_copy() -> None:
    flat = np.zeros(6, np.float32)
    Part((slice(1, 3),)).take(flat)[:] = 1
    assert flat.tolist() == [0, 1, 1, 0, 0, 0]
    Part((slice(0, 1), slice(4, 6))).take(flat)[:] = 9
    assert flat.tolist() == [0, 1, 1, 0, 0, 0]


def test_gradients_flow_through_a_part() -> None:
    flat = torch.arange(6.0, requires_grad=True)
    Part((slice(1, 3), slice(4, 5))).take(flat).pow(2).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [0, 2, 4, 0, 8, 0]


def test_an_empty_part() -> None:
    part = Part(())
    assert part.size == 0
    assert part.take(np.ones((2, 3), np.float32)).shape == (2, 0)
    assert part.put(np.ones(3, np.float32), np.zeros(0, np.float32)).tolist() == [1, 1, 1]


# -- Layout ----------------------------------------------------------------------------------------------


@given(layouts(), st.sets(st.sampled_from("abc")))
@settings(deadline=None)
def test_a_part_and_its_complement_cover_the_layout(layout: Layout, chosen: set[str]) -> None:
    chosen &= set(layout.layers)
    part, complement = layout.part(chosen), layout.without(chosen)
    assert part.size + complement.size == layout.size
    flat = numbers(layout.size)
    rebuilt = np.full(layout.size, np.nan, np.float32)
    part.put(rebuilt, part.take(flat))
    complement.put(rebuilt, complement.take(flat))
    assert np.array_equal(rebuilt, flat)
    expected = [flat[e.start : e.stop] for e in layout.entries if e.layer in chosen]
    assert np.array_equal(part.take(flat), np.concatenate([*expected, np.zeros(0, np.float32)]))


@given(layouts(), st.sampled_from("abc"))
@settings(deadline=None)
def test_adjacent_entries_form_one_slice(layout: Layout, left_out: str) -> None:
    for part in (layout.select(lambda entry: True), layout.without([left_out])):
        gaps = [b.start - a.stop for a, b in zip(part.slices, part.slices[1:], strict=False)]
        assert all(gap > 0 for gap in gaps)
    assert len(layout.select(lambda entry: True).slices) == 1


@given(layouts(), st.lists(st.integers(1, 3), max_size=2), st.booleans())
@settings(deadline=None)
def test_views_and_flatten_are_inverse(layout: Layout, lead: list[int], tensors: bool) -> None:
    flat = numbers(*lead, layout.size)
    views = layout.views(torch.from_numpy(flat) if tensors else flat)
    assert [tuple(view.shape) for view in views.values()] == [(*lead, *e.shape) for e in layout.entries]
    if not lead:
        assert np.array_equal(layout.flatten({k: np.asarray(v) for k, v in views.items()}), flat)
    for view in views.values():
        view[...] = 7  # views, not copies
    assert (flat == 7).all()


def test_layout_of_a_module_by_hand() -> None:
    module, layout = small()
    assert [(e.name, e.layer, e.shape, e.start, e.trainable) for e in layout.entries] == [
        ("body.weight", "body", (3, 2), 0, True),
        ("body.bias", "body", (3,), 6, True),
        ("norm.weight", "norm", (3,), 9, True),
        ("norm.bias", "norm", (3,), 12, True),
        ("norm.running_mean", "norm", (3,), 15, False),
        ("norm.running_var", "norm", (3,), 18, False),
        ("head.weight", "head", (2, 3), 21, True),
    ]
    assert layout.size == 27
    assert layout.layers == ("body", "norm", "head")
    assert layout.part(["head", "body"]).slices == (slice(0, 9), slice(21, 27))
    assert layout.part(["norm", "head"]).slices == (slice(9, 27),)
    assert layout.without(["norm"]) == layout.part(["head", "body"])
    assert layout.without([]) == layout.part(layout.layers)
    named = {k: v.detach().numpy() for k, v in module.state_dict().items()}
    flat = layout.flatten(named)
    assert flat.dtype == np.float32
    for name, view in layout.views(flat).items():
        assert np.array_equal(view, named[name])


def test_flatten_uses_the_order_of_the_layout() -> None:
    module, layout = small()
    named = {k: v.detach().numpy() for k, v in module.state_dict().items()}
    assert np.array_equal(layout.flatten(dict(reversed(named.items()))), layout.flatten(named))


def test_unknown_names_raise_errors_that_list_known_names() -> None:
    _, layout = small()
    with pytest.raises(KeyError, match=r"heads.*body.*norm.*head"):
        layout.part(["heads"])
    with pytest.raises(KeyError, match=r"body\.weight"):
        layout.flatten({})


def test_an_empty_layout() -> None:
    assert Layout(()).size == 0
    assert Layout(()).without([]).size == 0
