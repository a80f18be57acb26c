"""Every method has a page in docs/methods, and its card agrees with real runs."""

import re
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MessageType

from posy.client_app.app import Call
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError, settings_of
from posy.strategies.arrays import model
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.server_state import state_of
from posy.strategies.settings import MethodSettings

ROOT = Path(__file__).resolve().parent.parent
Make = Callable[..., Any]
LARGEST = 1e-5
"""Largest difference from a published program that a check may allow."""
REPEATED = re.compile(r"\b(each|every|up to)\b")
"""Words in an entry of a message that say that the message holds this array any number of times."""
OPTIONAL = re.compile(r"\bonly\b|\bif\b|\bunless\b|\bwithout\b|\bwith `")
"""Words in an entry of a message that say that some messages lack the array."""

every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    """Return the functions of docs/generate.py by name."""
    return runpy.run_path(str(ROOT / "docs/generate.py"))


class RecordingGrid(InProcessGrid):
    """Counts the arrays in the messages of training and evaluation, and in the replies after training."""

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients)
        self.sent: set[int] = set()
        self.returned: set[int] = set()

    def _receive(self, message: Message) -> Message | Call:
        if message.metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE) and "arrays" in message.content:
            self.sent.add(len(array_record(message)))
        return super()._receive(message)

    def _answers(self, messages: Any, end: float) -> list[Message]:
        replies = super()._answers(messages, end)
        training = {m.metadata.message_id for m in messages if m.metadata.message_type == MessageType.TRAIN}
        for reply in replies:
            if reply.metadata.reply_to_message_id in training and not reply.has_error():
                self.returned.add(len(array_record(reply)))
        return replies


def array_record(message: Message) -> ArrayRecord:
    record = message.content["arrays"]
    assert isinstance(record, ArrayRecord)
    return record


def card_of(method: str) -> MethodCard:
    card = vars(settings_class(method)).get("card")
    assert isinstance(card, MethodCard), f"{settings_class(method).__name__} must declare a card itself"
    return card


def numbered(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for names of stored arrays. ``personal-t`` matches ``personal-1``, ``personal-2`` and so on."""
    patterns = [re.sub(r"\\-[a-zA-Z]$", r"-\\d+", re.escape(name)) for name in names]
    return re.compile("|".join(patterns) or "(?!)")


def variants(method: str) -> Iterator[dict[str, Any]]:
    """Yield the default settings of a method, and every other value of a single choice or switch."""
    yield {}
    for key, setting in settings_of(settings_class(method), method).items():
        values = setting.choices or ((True, False) if setting.kind is bool else ())
        yield from ({key.replace("-", "_"): value} for value in values if value != setting.default)


def federated(make_config: Make, federate: Make, method: str, **settings: Any) -> Any:
    """Return a finished federation of two rounds, or None if Posy rejects the settings."""
    common = {"num_server_rounds": 4 if method == "ppfe" else 2, "validation_fraction": 0.25, "model": "mlp"}
    try:
        return federate(make_config(method, **{**common, **settings}), grid=RecordingGrid)
    except SettingsError:
        return None


def allowed_counts(entries: Mapping[str, str]) -> Callable[[int], bool]:
    """Return a check of the number of arrays in a message against the entries of a card."""
    texts = [f"{key}: {meaning}" for key, meaning in entries.items()]
    optional = [text for text in texts if OPTIONAL.search(text) or REPEATED.search(text)]
    least = len(texts) - len(optional)
    most = np.inf if any(map(REPEATED.search, texts)) else len(texts)
    return lambda count: least <= count <= most


@every_method
def test_card_is_complete(method: str) -> None:
    card = card_of(method)
    if card.paper is not None:
        assert all(vars(card.paper).values()) and card.paper.url.startswith("https://")
    assert card.equations and card.reveals and card.scored
    for texts in (card.equations, card.deviations):
        assert isinstance(texts, tuple) and all(text.strip() for text in texts)
    for entries in (card.sent, card.returned, card.server_state, card.client_state):
        assert all(key.strip() and meaning.strip() for key, meaning in entries.items())
    assert (card.program is None) == bool(card.no_program)
    if card.program is not None:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", card.program.repository)
        assert re.fullmatch(r"[0-9a-f]{40}", card.program.commit)
        assert card.program.entry and 0 < card.program.difference <= LARGEST
        assert (ROOT / f"tests/programs/test_program_{method.replace('-', '_')}.py").is_file()


def test_every_setting_has_a_source() -> None:
    settings = {
        key: setting for method in METHODS for key, setting in settings_of(settings_class(method), method).items()
    }
    assert [key for key, setting in settings.items() if not setting.source] == []


@every_method
def test_card_agrees_with_real_runs(make_config: Make, federate: Make, method: str) -> None:
    """Arrays of the messages and names of the stored arrays, with the defaults and with each other single choice."""
    card = card_of(method)
    sent_allowed, returned_allowed = allowed_counts(card.sent), allowed_counts(card.returned)
    server_names, client_names = numbered(card.server_state), numbered(card.client_state)
    finished = 0
    for settings in variants(method):
        if (run := federated(make_config, federate, method, **settings)) is None:
            continue
        finished += 1
        assert all(map(sent_allowed, run.grid.sent)), (settings, run.grid.sent)
        assert all(map(returned_allowed, run.grid.returned)), (settings, run.grid.returned)
        stored = state_of(run.strategy)
        assert [name for name in stored if not server_names.fullmatch(name)] == [], settings
        if not settings:
            assert [name for name in card.server_state if not any(map(numbered([name]).fullmatch, stored))] == []
        for client in range(4):
            names = [name for name in run.kept(client) if not name.startswith("optimiser-")]
            assert [name for name in names if not client_names.fullmatch(name)] == [], settings
    assert finished


def test_pages_of_unknown_methods_are_stale(
    generate: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / "methods"
    pages.mkdir()
    (pages / "fedgone.md").write_text("# FedGone\n", encoding="utf-8")
    functions = generate["stale"].__globals__
    monkeypatch.setitem(functions, "PAGES", pages)
    monkeypatch.setitem(functions, "MARKED", re.compile("(?!)"))  # only the pages of methods
    stale = generate["stale"]()
    assert stale[pages / "fedgone.md"] is None
    assert stale[pages / "fedavg.md"].count("\n## ") == 9


class ExampleSettings(MethodSettings):
    """Settings of a method that only this test has."""

    returned = {"model": model(noise="noise hides it", sums=True)}  # noqa: RUF012 - Posy does not change it
    card = MethodCard(
        paper=Paper("Doe et al.", 2024, "A title", "Venue", "https://example.org/paper"),
        equations=("w ← f(w | x) (Eq. 3; Algorithm 1, line 2)", "a step without a number"),
        sent={"model (d,)": "the model w"},
        returned={},
        reveals="the client's model",
        server_state={"model": "the model w (d,)"},
        client_state={},
        scored="The local model.",
        deviations=("It is measured in docs/benchmarks/choices.md.",),
        program=Program("owner/name", "a" * 40, "main.py, train", 3e-7, by_authors=False),
    )

    def refusals(self) -> dict[str, str]:
        """Refuse momentum."""
        return {"momentum": "its steps are plain"}


def test_generated_page_sections(generate: dict[str, Any]) -> None:
    card = ExampleSettings.card
    assert generate["cited"](card) == "Doe et al. [A title](https://example.org/paper). Venue, 2024."
    equations = generate["equations"](card).splitlines()
    assert equations[2:] == [r"| w ← f(w \| x) | Eq. 3; Algorithm 1, line 2 |", "| a step without a number |  |"]
    messages = generate["messages"](card, ExampleSettings)
    assert "| model | `(d,)` | the model w |" in messages
    assert "returns no arrays" in messages and "support `secure-aggregation`." in messages
    assert "stores nothing between rounds" in generate["state"](card)
    refusals = generate["refused"](ExampleSettings).splitlines()
    momentum, *privacy, robust = refusals[2:]
    assert momentum == "| `momentum` | its steps are plain |"
    assert privacy[:2] == ["| `dp=local` | noise hides it |", "| `dp=central` | noise hides it |"]
    (sample,) = privacy[2:]
    assert sample.startswith("| `dp=sample` | ") and "gradients of individual samples" in sample
    assert robust.startswith("| `robust` | ") and "weighted mean of models" in robust
    assert generate["warns"](ExampleSettings) == ""
    assert generate["warns"](settings_class("fedfew")).startswith("Before round 1 Posy warns if ")
    check = generate["checked_with"]("example", card)
    assert (
        "not by the paper's authors" in check
        and "commit aaaaaaaaaa). Code compared: main.py, train." in check
        and "at most 3e-7" in check
    )
    assert generate["unwrapped"]("Two facts:\n\n* one\n  more\n* two\n") == "Two facts:\n- one more\n- two"
    assert generate["markdown"]("See ``x`` and :class:`~a.b.Name`.") == "See `x` and `Name`."


@pytest.mark.parametrize("method", METHODS)
def test_card_arrays_match_the_declared_arrays(method: str) -> None:
    cls = settings_class(method)
    sent, returned = ([key.partition(" (")[0] for key in arrays] for arrays in (cls.card.sent, cls.card.returned))
    sent_once = [name for name in sent if cls.sent_once and name.startswith(f"{cls.sent_once}-")]
    assert [name for name in sent if name not in sent_once] == list(cls.sent)
    assert bool(sent_once) == bool(cls.sent_once)
    assert returned == list(cls.returned)
