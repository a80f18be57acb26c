"""Random streams: equal for equal keys, and different for different keys."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posy.randomness import model_seed, numpy_generator, seed_of, torch_generator

PURPOSES = ("batches", "cohort", "partition", "subset", "mask", "client-branch")
integers = st.integers(0, 2**31 - 1)


@given(integers, st.sampled_from(PURPOSES), st.lists(integers, max_size=4))
def test_the_same_key_gives_the_same_stream(seed: int, purpose: str, key: list[int]) -> None:
    assert 0 <= seed_of(seed, purpose, *key) < 2**63
    a, b = (numpy_generator(seed, purpose, *key).integers(2**62, size=4) for _ in range(2))
    assert np.array_equal(a, b)
    c, d = (torch.rand(4, generator=torch_generator(seed, purpose, *key)) for _ in range(2))
    assert torch.equal(c, d)


@given(integers, st.tuples(integers, integers, integers), st.tuples(integers, integers, integers))
def test_only_equal_keys_give_equal_seeds(seed: int, key: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert (seed_of(seed, "batches", *key) == seed_of(seed, "batches", *other)) == (key == other)


def test_many_keys_have_distinct_seeds() -> None:
    keys = itertools.product(range(3), PURPOSES, range(6), range(6), range(2))
    seeds = [seed_of(seed, purpose, *key) for seed, purpose, *key in keys]
    assert len(set(seeds)) == len(seeds) == 3 * 6 * 6 * 6 * 2


def test_round_and_client_are_not_interchangeable() -> None:
    assert seed_of(0, "batches", 1, 2) != seed_of(0, "batches", 2, 1)


def test_streams_are_stable_across_versions_and_platforms() -> None:
    """A run must have the same streams in every year. SeedSequence guarantees this."""
    state = np.random.SeedSequence([42, _crc32("batches"), 3, 7]).generate_state(1, np.uint64)
    assert seed_of(42, "batches", 3, 7) == int(state[0]) >> 1


def test_streams_do_not_change_the_global_generators() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch_generator(1, "batches", 2).initial_seed()
    torch.rand(3, generator=torch_generator(1, "batches", 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_stream_is_drawn_on_the_cpu() -> None:
    assert torch_generator(0, "batches").device == torch.device("cpu")


def test_models_of_neighbouring_runs_have_distinct_seeds() -> None:
    assert [model_seed(seed, 0) for seed in range(3)] == [0, 1, 2]  # as a single model
    seeds = [model_seed(seed, number) for seed in range(10) for number in range(10)]
    assert len(set(seeds)) == 100


def test_a_negative_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        seed_of(-1, "batches")


def _crc32(text: str) -> int:
    """Return the checksum bit by bit, as its standard defines it."""
    value = 0xFFFFFFFF
    for byte in text.encode():
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0xEDB88320 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
