"""cwFedAvg's Figure 1: samples, averages and largest weights of small networks, and the numbers in its text."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from posy import figures
from posy.commands.papers import pathways
from posy.commands.papers.compare import Comparison
from posy.commands.papers.item import item
from posy.commands.papers.page import write
from posy.commands.papers.pathways import (
    PANELS,
    Layers,
    clients_samples,
    critical,
    leading,
    networks,
    shared,
    simulate,
    weights_of,
)

Panels = dict[str, npt.NDArray[np.float32]]

HIDDEN = [[9, -8, 0.1], [0.2, 7, 0.3], [-6, 0.4, 0.5], [0.6, 0.7, 0.8]]
OUTPUT = [[5, 0.0, -4, 0.9], [1.0, 3, 1.1, -2]]
"""The 8 largest are 9 to 2: four in the hidden layer, and two for each output."""


def flat(
    hidden: npt.ArrayLike, output: npt.ArrayLike, biases: tuple[float, float] = (100.0, -100.0)
) -> npt.NDArray[np.float32]:
    """Return a flat network whose biases are larger than any weight, and do not count as weights."""
    parts = [np.ravel(hidden), np.full(4, biases[0]), np.ravel(output), np.full(2, biases[1])]
    return np.concatenate(parts).astype(np.float32)


@pytest.fixture(scope="module")
def simulations() -> list[Panels]:
    return simulate()


# -- by hand ---------------------------------------------------------------------------------------------


def test_critical_weights_by_hand() -> None:
    model = flat(HIDDEN, OUTPUT)
    weights = weights_of(model)
    np.testing.assert_allclose(weights.hidden, HIDDEN, rtol=1e-6)
    np.testing.assert_allclose(weights.output, OUTPUT, rtol=1e-6)
    chosen = critical(weights)
    assert chosen.hidden.tolist() == [[True, True, False], [False, True, False], [True, False, False], [False] * 3]
    assert chosen.output.tolist() == [[True, False, True, False], [False, True, False, True]]
    assert leading(model) == [2, 2]
    assert critical(weights, 5).output.tolist() == [[True, False, False, False], [False] * 4]


def test_ties_between_weights_go_to_the_first() -> None:
    chosen = critical(Layers(np.ones((4, 3), np.float32), -np.ones((2, 4), np.float32)))
    assert chosen.hidden.ravel().tolist() == [True] * 8 + [False] * 4
    assert not chosen.output.any()


def test_shared_critical_weights_by_hand() -> None:
    model = flat(HIDDEN, OUTPUT)
    other = flat(HIDDEN, [[-5, 0, 0, 20], [0, 0, 0, 2]])
    assert shared(model, model) == shared(model, flat(HIDDEN, np.negative(OUTPUT))) == 8
    # Both contain 9, 8, 7, 6, 5 and 2. The second has 20 and 0.8 instead of 4 and 3.
    assert shared(model, other) == 6


def test_panels_by_hand() -> None:
    """Output rows of norm (3, 1), (1, 3) and (1, 1): p̃ = (3/4, 1/4), (1/4, 3/4), (1/2, 1/2).

    n = 3000, 2000, 1000, so n p̃ is 2250, 500, 500 for class 0 and 750, 1500, 500 for class 1.
    """
    norms = [(3, 1), (1, 3), (1, 1)]
    personal = np.stack(
        [flat(np.full((4, 3), k), [[a, 0, 0, 0], [0, 0, -b, 0]], (k, k)) for k, (a, b) in enumerate(norms)]
    )
    plain = np.stack([flat(np.full((4, 3), k), np.full((2, 4), 6.0 * k), (k, k)) for k in range(3)])
    panels = dict(zip(PANELS, networks(plain, personal), strict=True))
    for letters, models in (("abc", plain), ("efg", personal)):
        for letter, model in zip(letters, models, strict=True):
            np.testing.assert_array_equal(panels[letter], model)
    np.testing.assert_allclose(panels["d"], (3 * plain[0] + 2 * plain[1] + plain[2]) / 6, rtol=1e-6)
    class0, class1 = np.array([9, 2, 2]) / 13 @ personal, np.array([3, 6, 2]) / 11 @ personal  # Eqs. 5 and 6
    np.testing.assert_allclose(panels["h"], class0, rtol=1e-5)
    np.testing.assert_allclose(panels["i"], class1, rtol=1e-5)
    for letter, share in (("j", 0.75), ("k", 0.25), ("l", 0.5)):  # Eq. 7
        np.testing.assert_allclose(panels[letter], share * class0 + (1 - share) * class1, rtol=1e-5)


def test_equal_local_models_give_equal_panels() -> None:
    model = flat(HIDDEN, [[1, 2, 3, 4], [4, 3, 2, 1]])
    panels = networks(np.stack([model] * 3), np.stack([model] * 3))
    assert len(panels) == len(PANELS) == 12
    for panel in panels:
        np.testing.assert_allclose(panel, model, rtol=1e-5)


# -- the simulation --------------------------------------------------------------------------------------


def test_the_clients_samples_follow_the_paper() -> None:
    samples = clients_samples(np.random.default_rng(0))
    assert [client.x.shape for client in samples] == [(3000, 3), (2000, 3), (1000, 3)]
    counts = [np.bincount(client.y).tolist() for client in samples]
    assert counts == [[2700, 300], [200, 1800], [500, 500]]
    assert np.sum(counts, axis=0).tolist() == [3400, 2600]
    x, y = (np.concatenate(parts) for parts in zip(*samples, strict=True))
    centres = np.random.default_rng(0).normal(size=(2, 3))
    for label in (0, 1):
        # The mean of 2600 numbers of variance 1 has a standard error of 0.02.
        np.testing.assert_allclose(x[y == label].mean(axis=0), centres[label], atol=0.08)
        np.testing.assert_allclose(x[y == label].std(axis=0), 1, atol=0.06)


def test_the_same_seeds_give_the_same_networks() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    first, again = simulate([0, 1], steps=20), simulate([0, 1], steps=20)
    for a, b in zip(first, again, strict=True):
        assert list(a) == list(PANELS)
        assert all(model.shape == (26,) and np.isfinite(model).all() for model in a.values())
        assert all((a[letter] == b[letter]).all() for letter in PANELS)
    assert not np.allclose(first[0]["a"], first[1]["a"])
    # The other seeds of a call change only the last bits.
    np.testing.assert_allclose(simulate([1], steps=20)[0]["l"], first[1]["l"], rtol=1e-3, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_a_step_without_the_regulariser_follows_the_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of FedAvg's clients from a network of zeros: each bias of the output moves by lr (share - 1/2)."""

    def of_zeros() -> torch.nn.Sequential:
        network = original()
        for tensor in network.parameters():
            tensor.data.zero_()
        return network

    original = pathways._network
    monkeypatch.setattr(pathways, "_network", of_zeros)
    (panels,) = simulate([3], steps=1)
    for letter in "abc":
        model = panels[letter]
        assert not model[:-2].any()
        step = model[-2:] / pathways.RATE
        assert step.sum() == pytest.approx(0, abs=1e-5)
        # Ten samples: the share of a class is a tenth of a whole number.
        assert 10 * (step[0] + 0.5) == pytest.approx(round(float(10 * (step[0] + 0.5))), abs=1e-3)


def test_the_regulariser_moves_output_norms_to_the_class_shares(simulations: list[Panels]) -> None:
    for panels in simulations:
        for letter, share in zip("efg", (0.9, 0.1, 0.5), strict=True):
            norms = np.linalg.norm(weights_of(panels[letter]).output, axis=1)
            assert norms[0] / norms.sum() == pytest.approx(share, abs=0.03)


# -- the figure ------------------------------------------------------------------------------------------


def test_the_figures_text_matches_the_simulation(simulations: list[Panels]) -> None:
    text = " ".join(str(item("cwfedavg", "figure1").content["here"]).split())
    assert len(simulations) == 10
    reached = {letter: [leading(panels[letter]) for panels in simulations] for letter in PANELS}
    both = {letter: [min(counts) > 0 for counts in reached[letter]] for letter in PANELS}
    assert sum(map(all, zip(*(both[letter] for letter in "abcd"), strict=True))) == 8
    assert "Models (a) to (d) all lead to both outputs in 8 of the ten seeds." in text
    single = {letter: sum(not reaches for reaches in both[letter]) for letter in "efhijk"}
    assert single == {"e": 10, "f": 10, "h": 9, "i": 8, "j": 6, "k": 3}
    assert (
        "(e) and (f) lead to only one output in all ten seeds, model (h) in 9 seeds, and model (i) in 8 seeds." in text
    )
    assert "model (j) leads to both outputs in 4 seeds, and model (k) in 7 seeds." in text
    # It is the output of the larger class.
    for letter, larger in (("e", 0), ("f", 1), ("h", 0), ("i", 1)):
        assert all(counts[larger] > counts[1 - larger] for counts in reached[letter])
    shared_counts = [
        min(shared(panels[a], panels[b]) for panels in simulations for a, b in pairs)
        for pairs in (("ad", "bd", "cd"), ("eh", "fi"), ("ej", "fk", "gl"))
    ]
    assert shared_counts == [6, 7, 5]
    assert "FedAvg's model shares at least 6 of its 8 largest weights with each of (a) to (c)" in text
    assert "(h) and (i) share at least 7 of these weights with (e) and (f) respectively" in text
    assert "(j) to (l) share at least 5 with (e) to (g)" in text


@pytest.mark.slow
def test_the_figures_text_matches_longer_training() -> None:
    simulations = simulate(steps=3000)
    assert [sum(0 in leading(panels[letter]) for panels in simulations) for letter in "hi"] == [6, 2]
    text = " ".join(str(item("cwfedavg", "figure1").content["here"]).split())
    assert "After 3000 steps, model (h) leads to only one output in 6 seeds, and model (i) in 2 seeds." in text
    assert f"one round of {pathways.STEPS} steps" in text


def test_the_page_shows_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulations: list[Panels]) -> None:
    """The figure needs no runs, so it has no numbers that are not run."""
    figure = item("cwfedavg", "figure1")
    assert figure.draws_alone
    assert not figure.has_runs
    assert Comparison(figure).entries == []
    monkeypatch.setattr(pathways, "simulate", lambda seeds: simulations[: len(seeds)])
    monkeypatch.setattr("posy.commands.papers.page.items", lambda _: [figure])
    monkeypatch.setattr("posy.commands.papers.claims.main_claims", lambda _: [])  # they need tables
    write("cwfedavg", tmp_path)
    assert (tmp_path / "cwfedavg-figure1.png").is_file()
    assert "![Figure 1](cwfedavg-figure1.png)" in (tmp_path / "cwfedavg.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("error")
def test_networks_are_drawn(tmp_path: Path) -> None:
    weights = weights_of(flat(HIDDEN, OUTPUT))
    layers = list(zip(weights, critical(weights), strict=True))
    zeros = [(np.zeros((1, 2)), np.zeros((1, 2), bool))]
    for name, panels in {
        "one": {"a": layers},
        "more": {str(n): layers for n in range(5)},
        "zeros": {"a": zeros},
    }.items():
        figures.networks(panels, tmp_path / f"{name}.png", title="t")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    figures.networks({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
