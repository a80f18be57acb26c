"""The shared part of all strategies: cohorts, messages, checks of the replies, learning rate, evaluation."""

import io
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from posy.flower import Array as ByReference
from posy.flower import raised
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.strategies import influence, schedule
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.methods import METHODS
from posy.strategies.replies import BadReplyError, Update, num_examples, stacked, weighted_mean
from posy.strategies.server_state import load_state, state_of

MakeStrategy = Callable[..., Any]
Change = Callable[[RecordDict], None]
GOOD, BAD = (0, 2, 3), 1


def send(
    strategy: PersonalisedStrategy,
    server_round: int = 1,
    phase: str = "train",
    config: ConfigRecord | None = None,
    grid: InProcessGrid | None = None,
) -> tuple[list[Message], list[Message]]:
    """Send the messages of the strategy to real clients and return both the messages and the replies."""
    grid = grid or InProcessGrid(strategy.num_clients)
    configure = strategy.configure_train if phase == "train" else strategy.configure_evaluate
    messages = configure(server_round, ArrayRecord(), config or ConfigRecord(), grid)
    return messages, list(grid.send_and_receive(messages))


def take(
    strategy: PersonalisedStrategy, replies: Iterable[Message], server_round: int = 1, phase: str = "train"
) -> Any:
    aggregate = strategy.aggregate_train if phase == "train" else strategy.aggregate_evaluate
    return aggregate(server_round, replies)


def state_bytes(strategy: PersonalisedStrategy) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state_of(strategy).items()}


def metrics(**values: Any) -> Change:
    def change(content: RecordDict) -> None:
        for key, value in values.items():
            content.metric_records["metrics"][key.replace("_", "-")] = value

    return change


def without_metric(key: str) -> Change:
    def change(content: RecordDict) -> None:
        del content.metric_records["metrics"][key]

    return change


def without_record(name: str) -> Change:
    def change(content: RecordDict) -> None:
        del content[name]

    return change


def change_model(make: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        record["model"] = Array(make(record["model"].numpy().copy()))

    return change


def set_first(value: float) -> Change:
    def make(values: np.ndarray) -> np.ndarray:
        values[0] = value
        return values

    return change_model(make)


def encode_model(content_bytes: bytes, stype: str = "numpy.ndarray") -> Change:
    def change(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        record["model"] = Array(dtype="float32", shape=record["model"].shape, stype=stype, data=content_bytes)

    return change


def npz_bytes() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3, np.float32))
    return buffer.getvalue()


def npy_header(shape: str) -> bytes:
    """Return the start of an .npy file whose header claims a shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8)


def add_array(content: RecordDict) -> None:
    content.array_records["arrays"]["1"] = Array(np.zeros(2, np.float32))


def remove_arrays(content: RecordDict) -> None:
    content.array_records["arrays"].clear()


TRAIN_FAULTS: dict[str, tuple[Change, str]] = {
    "NaN": (set_first(math.nan), "NaN or Inf"),
    "Inf": (set_first(math.inf), "NaN or Inf"),
    "-Inf": (set_first(-math.inf), "NaN or Inf"),
    "too large for float32": (change_model(lambda a: np.full(a.shape, 1e300)), "NaN or Inf"),
    "complex": (change_model(lambda a: a.astype(np.complex64)), "complex64"),
    "texts": (change_model(lambda a: np.full(a.shape, "1")), "instead of numbers"),
    "booleans": (change_model(lambda a: a > 0), "bool"),
    "one element less": (change_model(lambda a: a[:-1]), "model has the shape ("),
    "one axis more": (change_model(lambda a: a[None]), "model has the shape ("),
    "scalar": (change_model(lambda a: np.array(1.0, np.float32)), "model has the shape ("),
    "one array more": (add_array, "the reply has 2 arrays instead of 1"),
    "no arrays": (remove_arrays, "the reply lacks the array model"),
    "no bytes": (encode_model(b""), "malformed"),
    "noise": (encode_model(b"noise" * 100), "malformed"),
    "a zip": (encode_model(b"PK\x03\x04" + bytes(100)), "malformed"),
    "a complete zip": (encode_model(npz_bytes()), "malformed"),
    "a header that claims petabytes": (encode_model(npy_header("(1000000000000000,)")), "malformed"),
    "a header that is code": (encode_model(npy_header("__import__('os').getcwd()")), "malformed"),
    "a pickle": (encode_model(pickle.dumps([1, 2])), "malformed"),
    "another kind of array": (encode_model(b"", "torch.tensor"), "malformed"),
    "no record of arrays": (without_record("arrays"), "malformed"),
    "no record of metrics": (without_record("metrics"), "malformed"),
    "no num-examples": (without_metric("num-examples"), "num-examples"),
    "no num-test": (without_metric("num-test"), "num-test"),
    "no train-loss": (without_metric("train-loss"), "train-loss"),
    "num-examples 0": (metrics(num_examples=0), "num-examples = 0"),
    "num-examples -1": (metrics(num_examples=-1), "num-examples = -1"),
    "num-examples 1e12": (metrics(num_examples=1e12), "num-examples = 1000000000000"),
    "num-examples NaN": (metrics(num_examples=math.nan), "num-examples = nan"),
    "num-examples Inf": (metrics(num_examples=math.inf), "num-examples = inf"),
    "num-examples 1.5": (metrics(num_examples=1.5), "num-examples = 1.5"),
    "num-examples a list": (metrics(num_examples=[3]), "malformed"),
    "num-test -1": (metrics(num_test=-1), "num-test = -1"),
    "num-test NaN": (metrics(num_test=math.nan), "num-test = nan"),
    "samples -1": (metrics(samples=-1), "samples = -1"),
    "samples NaN": (metrics(samples=math.nan), "samples = nan"),
    "train-loss NaN": (metrics(train_loss=math.nan), "train-loss = nan"),
    "train-loss Inf": (metrics(train_loss=math.inf), "train-loss = inf"),
    "train-loss a list": (metrics(train_loss=[1.0]), "malformed"),
    "accuracy NaN": (metrics(local_accuracy=math.nan), "local-accuracy = nan"),
    "accuracy 1.5": (metrics(local_accuracy=1.5), "local-accuracy = 1.5"),
    "accuracy -0.1": (metrics(local_accuracy=-0.1), "local-accuracy = -0.1"),
    "loss Inf": (metrics(local_loss=math.inf), "local-loss = inf"),
}

EVALUATE_FAULTS: dict[str, tuple[Change, str]] = {
    "no record of metrics": (without_record("metrics"), "malformed"),
    "no record of texts": (without_record("config"), "malformed"),
    "no num-train": (without_metric("num-train"), "num-train"),
    "no num-examples": (without_metric("num-examples"), "num-examples"),
    "num-train 0": (metrics(num_train=0), "num-train = 0"),
    "num-train NaN": (metrics(num_train=math.nan), "num-train = nan"),
    "num-train 1e12": (metrics(num_train=1e12), "num-train = 1000000000000"),
    "num-examples -1": (metrics(num_examples=-1), "num-examples = -1"),
    "samples -1": (metrics(samples=-1), "samples = -1"),
    "accuracy NaN": (metrics(served_accuracy=math.nan), "served-accuracy = nan"),
    "accuracy 2": (metrics(served_accuracy=2.0), "served-accuracy = 2"),
    "loss Inf": (metrics(served_loss=math.inf), "served-loss = inf"),
    "loss a list": (metrics(served_loss=[1.0]), "malformed"),
}


@pytest.mark.parametrize("fault", TRAIN_FAULTS)
def test_a_bad_training_reply_is_dropped(
    fault: str, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = TRAIN_FAULTS[fault]
    expected, strategy = make_strategy("fedavg"), make_strategy("fedavg")
    _, replies = send(expected)
    take(expected, [replies[c] for c in GOOD])

    _, replies = send(strategy)
    monkeypatch.setattr(strategy, "lost", None)  # no client loses its state
    change(replies[BAD].content)
    take(strategy, replies)
    assert state_bytes(strategy) == state_bytes(expected)
    assert [client for client, _ in strategy.record.dropped] == [BAD]
    assert reason in strategy.record.dropped[0][1]
    assert sorted(strategy.exchange.states.versions) == list(GOOD)
    # The record has only the bytes of the message to the client.
    assert set(strategy.record.row(BAD)) == {"bytes_up", "bytes_down"}
    assert strategy.record.row(BAD)["bytes_up"] == 0
    assert strategy.record.bytes_up == sum(strategy.record.row(c)["bytes_up"] for c in GOOD) > 0


@pytest.mark.parametrize("fault", EVALUATE_FAULTS)
def test_a_bad_evaluation_reply_is_dropped(
    fault: str, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, reason = EVALUATE_FAULTS[fault]
    strategy = make_strategy("fedavg", fraction_train=0.5)  # so that some rows have only an evaluation
    cohort = strategy.rounds.cohort(1)
    _, replies = send(strategy)
    take(strategy, replies)
    before = state_bytes(strategy)
    faulty = next(c for c in range(4) if c not in cohort)
    _, replies = send(strategy, phase="evaluate")
    monkeypatch.setattr(strategy, "lost", None)  # no client loses its state
    change(replies[faulty].content)
    take(strategy, replies, phase="evaluate")
    assert state_bytes(strategy) == before
    assert [client for client, _ in strategy.record.dropped] == [faulty]
    assert reason in strategy.record.dropped[0][1]
    assert sorted(strategy.exchange.states.versions) == [c for c in range(4) if c != faulty]
    assert set(strategy.record.row(faulty)) == {"bytes_up", "bytes_down"}
    assert all("n_train" in strategy.record.row(c) for c in range(4) if c != faulty)


def test_unusable_replies_are_recorded_by_reason(make_strategy: MakeStrategy) -> None:
    expected, strategy = make_strategy("fedavg"), make_strategy("fedavg")
    _, replies = send(expected)
    take(expected, [replies[0]])

    messages, replies = send(strategy)
    error = Message(Error(7, "out of memory"), reply_to=messages[1])
    foreign = Message(replies[2].content, reply_to=messages[2])
    foreign.metadata.__dict__["_reply_to_message_id"] = "of another run"
    take(strategy, [replies[0], replies[0], error, foreign])
    assert state_bytes(strategy) == state_bytes(expected)
    foreign_reply, invalid_app, missing = "reply that matches no message", "not valid: out of memory", "no reply"
    phrases = Counter(
        (client, phrase)
        for client, reason in strategy.record.dropped
        for phrase in (foreign_reply, invalid_app, missing)
        if phrase in reason
    )
    assert len(strategy.record.dropped) == 5
    assert phrases == {(-1, foreign_reply): 2, (1, invalid_app): 1, (2, missing): 1, (3, missing): 1}


ERRORS: dict[str, tuple[Error, str]] = {
    "unavailable": (Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable — …"), "node is gone"),
    "lost": (Error(ErrorCode.MESSAGE_UNAVAILABLE, "of 17"), "was lost or arrived too late"),
    "late": (Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "of 17"), "reply arrived too late"),
    "raised": (Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "<class 'x.E'>:<'no\nfile'>"), "failed: no file"),
    "died": (Error(ErrorCode.CLIENT_APP_CRASHED, "signal 9"), "crashed: signal 9"),
    "no app": (Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION, "no x"), "not be loaded: no x"),
    "unknown": (Error(99, "{odd}"), "error 99: {odd}"),
    "silent": (Error(99), "error 99: no reason given"),
    "endless": (Error(99, "x" * 10_000), "error 99: " + "x" * 289 + "…"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_logged_in_plain_words_with_the_sites_name(
    error: str, make_strategy: MakeStrategy, warnings: pytest.LogCaptureFixture
) -> None:
    sent, phrase = ERRORS[error]
    strategy = make_strategy("fedavg")
    strategy.clients[2].name = "site-c"
    messages, replies = send(strategy)
    take(strategy, [*(replies[c] for c in (0, 1, 3)), Message(sent, reply_to=messages[2])])
    messages, replies = send(strategy, phase="evaluate")
    answers = [*(replies[c] for c in (0, 1, 3)), Message(sent, reply_to=messages[2])]
    take(strategy, answers, phase="evaluate")
    [line] = lines_of(warnings)  # once, although it failed twice
    (client, reason), repeated = strategy.record.dropped
    assert client == 2 and reason.endswith(phrase) and repeated == (2, reason)
    assert line == f"round 1: site-c (client 2) is dropped: {reason}"
    assert strategy.record.missing == [2]


def test_clients_dropped_for_one_reason_share_a_warning(
    make_strategy: MakeStrategy, warnings: pytest.LogCaptureFixture
) -> None:
    strategy = make_strategy("fedavg")
    messages, replies = send(strategy)
    set_first(math.nan)(replies[1].content)
    set_first(math.inf)(replies[0].content)
    foreign = Message(replies[2].content, reply_to=messages[2])
    foreign.metadata.__dict__["_reply_to_message_id"] = "of another run"
    take(strategy, [replies[1], replies[0], foreign])
    foreign_line, invalid_line, missing_line = lines_of(warnings)[:3]
    assert foreign_line.startswith("round 1: dropped: a reply that matches no message")
    assert invalid_line.startswith("round 1: client 0 and client 1 are dropped: NaN or Inf")
    assert missing_line.startswith("round 1: client 2 and client 3 are dropped: no reply")
    for client, member in strategy.clients.items():
        member.name = f"site-{'abcd'[client]}"
    send(strategy, server_round=2)
    warnings.clear()
    take(strategy, [], server_round=2)
    assert lines_of(warnings)[0].startswith("round 2: 4 of 4 clients (site-a, site-b, site-c, …) are dropped: no reply")


def lines_of(warnings: pytest.LogCaptureFixture) -> list[str]:
    return list({id(record): record.getMessage() for record in warnings.records if record.levelno == WARNING}.values())


def test_clients_outside_the_cohort_are_not_missing(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", fraction_train=0.5)
    member = strategy.clients.pop(3)
    _, replies = send(strategy)
    take(strategy, replies)
    assert strategy.record.missing == [3]
    strategy.clients[3] = member
    _, replies = send(strategy, server_round=2)
    take(strategy, replies[1:], server_round=2)
    assert strategy.record.missing == [strategy.rounds.cohort(2)[0]]


def test_a_reply_counts_for_the_messages_recipient(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    _, replies = send(strategy)
    replies[0].content.config_records["config"]["client"] = 3
    replies[0].content.metric_records["metrics"]["client"] = 3
    take(strategy, [replies[0]])
    assert "train_loss" in strategy.record.row(0)
    assert "train_loss" not in strategy.record.row(3)


def test_unsent_messages_count_as_no_reply(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    grid = InProcessGrid(4)
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    take(strategy, grid.send_and_receive(messages[:1]))  # the other messages never reach the grid and have no id
    assert strategy.record.dropped == [(c, "no reply") for c in (1, 2, 3)]


def test_evaluation_ignores_training_replies(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    _, training_replies = send(strategy)
    take(strategy, training_replies)
    send(strategy, phase="evaluate")
    assert take(strategy, training_replies, phase="evaluate") is None
    assert [client for client, _ in strategy.record.dropped] == [-1] * 4 + [0, 1, 2, 3]


@pytest.mark.parametrize("method", METHODS)
def test_without_valid_replies_the_state_does_not_change(method: str, make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(method, model="mlp", num_server_rounds=8)
    before = state_bytes(strategy)
    messages, _ = send(strategy)
    assert take(strategy, [Message(Error(1, "gone"), reply_to=m) for m in messages]) == (None, None)
    assert state_bytes(strategy) == before
    assert len(strategy.record.dropped) == 4


@pytest.mark.parametrize(("min_replies", "is_updated"), [(3, True), (4, False)])
def test_too_few_valid_replies_change_nothing(min_replies: int, is_updated: bool, make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", min_train_replies=min_replies)
    before = state_bytes(strategy)
    _, replies = send(strategy)
    set_first(math.nan)(replies[BAD].content)
    _, result = take(strategy, replies)
    assert (state_bytes(strategy) != before) is is_updated
    assert (result is not None) is is_updated
    assert bool(strategy.record.dropped)


def test_the_order_of_the_replies_does_not_matter(make_strategy: MakeStrategy) -> None:
    states = []
    for seed in range(3):
        strategy = make_strategy("fedavg")
        _, replies = send(strategy)
        random.Random(seed).shuffle(replies)
        take(strategy, replies)
        states.append(state_bytes(strategy))
    assert states[0] == states[1] == states[2]


# -- messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_every_node_gets_separate_records(phase: str, make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    config = ConfigRecord({"mine": 1, "lr": 99.0})
    messages, _ = send(strategy, phase=phase, config=config)
    assert dict(config) == {"mine": 1, "lr": 99.0}
    contents = [m.content for m in messages]
    for records in (contents, [c["arrays"] for c in contents], [c["config"] for c in contents]):
        assert len({id(record) for record in records}) == len(messages) == 4
    configs = [dict(c.config_records["config"]) for c in contents]
    assert [sent["client"] for sent in configs] == [0, 1, 2, 3]
    assert [m.metadata.dst_node_id for m in messages] == [1, 2, 3, 4]
    assert all(sent["mine"] == 1 and sent["server-round"] == 1 for sent in configs)
    contents[0].config_records["config"]["mine"] = 2
    del contents[0].array_records["arrays"]["model"]
    assert contents[1].config_records["config"]["mine"] == 1
    assert list(contents[1].array_records["arrays"]) == ["model"]
    assert not set(configs[0]) & set(messages[0].content.metric_records)


def test_messages_carry_the_served_model_and_the_learning_rate(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", lr=0.25)
    messages, _ = send(strategy)
    content = messages[2].content
    assert np.array_equal(content.array_records["arrays"]["model"].numpy(), strategy.serve(2)["model"])
    assert content.config_records["config"]["lr"] == 0.25  # the strategy's, not the caller's
    assert content.config_records["config"]["evaluate-local"] is True


def test_recorded_bytes_match_the_messages(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    messages, replies = send(strategy)
    take(strategy, replies)
    down = [sum(a.numpy().nbytes for a in m.content.array_records["arrays"].values()) for m in messages]
    up = [sum(a.numpy().nbytes for a in r.content.array_records["arrays"].values()) for r in replies]
    evaluations, answers = send(strategy, phase="evaluate")
    take(strategy, answers, phase="evaluate")
    evaluation_down = [sum(a.numpy().nbytes for a in m.content.array_records["arrays"].values()) for m in evaluations]
    assert min(down + up + evaluation_down) >= 4 * strategy.size
    record = strategy.record
    assert [record.row(c)["bytes_down"] for c in range(4)] == [
        a + b for a, b in zip(down, evaluation_down, strict=True)
    ]
    assert [record.row(c)["bytes_up"] for c in range(4)] == up
    assert (record.bytes_down, record.bytes_up) == (sum(down + evaluation_down), sum(up))


def test_models_are_saved_in_the_first_and_last_rounds(make_strategy: MakeStrategy, tmp_path: Any) -> None:
    strategy = make_strategy("fedavg", num_server_rounds=3)
    strategy.exchange.models_folder = tmp_path / "models"
    for server_round, expected in ((1, True), (2, False), (3, True)):
        for phase in ("train", "evaluate"):
            messages, _ = send(strategy, server_round, phase)
            configs = [m.content.config_records["config"] for m in messages]
            assert all(("save-models-to" in config) is expected for config in configs)
    stored = {f"{point}-{client}.safetensors" for point in ("client", "served") for client in range(4)}
    assert {path.name for path in (tmp_path / "models").iterdir()} == stored


# -- cohorts, evaluations, learning rate -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "size"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.51, 3), (0.25, 1), (0.01, 1), (0.7500000001, 3)]
)
def test_cohort_size(fraction: float, size: int, make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", fraction_train=fraction)
    for server_round in range(1, 6):
        cohort = strategy.rounds.cohort(server_round)
        assert len(set(cohort)) == len(cohort) == size
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(4))


def test_cohorts_depend_only_on_seed_and_round(make_strategy: MakeStrategy) -> None:
    def cohorts(method: str = "fedavg", **settings: Any) -> list[list[int]]:
        strategy = make_strategy(method, fraction_train=0.5, **settings)
        return [strategy.rounds.cohort(r) for r in range(1, 21)]

    drawn = cohorts()
    assert drawn == cohorts() == cohorts("fedfew", lr=0.5, model="mlp")
    assert drawn != cohorts(seed=43)
    assert len({tuple(cohort) for cohort in drawn}) > 1
    assert Counter(c for cohort in drawn for c in cohort).keys() == {0, 1, 2, 3}
    strategy = make_strategy("fedavg", fraction_train=0.5)
    assert [strategy.rounds.cohort(r) for r in range(20, 0, -1)][::-1] == drawn


def test_clients_are_drawn_equally_often(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", fraction_train=0.5)
    counts = Counter(c for r in range(1, 401) for c in strategy.rounds.cohort(r))
    assert all(150 < counts[c] < 250 for c in range(4))  # 200 on average, standard deviation 10


def test_the_cohort_trains_and_all_clients_are_evaluated(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", fraction_train=0.5)
    cohort = strategy.rounds.cohort(1)
    messages, replies = send(strategy)
    assert [m.content.config_records["config"]["client"] for m in messages] == cohort
    assert strategy.record.cohort == tuple(cohort)
    set_first(math.nan)(replies[0].content)  # a client whose reply is dropped counts as untrained
    take(strategy, replies)
    messages, _ = send(strategy, phase="evaluate")
    configs = {m.content.config_records["config"]["client"]: m.content.config_records["config"] for m in messages}
    assert list(configs) == [0, 1, 2, 3]
    assert {c for c, config in configs.items() if not config["evaluate-personal"]} == set(cohort[1:])


def test_clients_without_a_node_get_no_message(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    del strategy.clients[2]
    messages, _ = send(strategy)
    assert [m.content.config_records["config"]["client"] for m in messages] == [0, 1, 3]
    assert strategy.record.cohort == (0, 1, 3)


@pytest.mark.parametrize(
    ("every", "rounds", "expected"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (3, 6, [3, 6]), (9, 4, [4]), (1, 1, [1])]
)
def test_evaluate_every_selects_rounds(
    every: int, rounds: int, expected: list[int], make_strategy: MakeStrategy
) -> None:
    strategy = make_strategy("fedavg", evaluate_every=every, num_server_rounds=rounds)
    evaluated = []
    for server_round in range(1, rounds + 1):
        messages, replies = send(strategy, server_round)
        assert {m.content.config_records["config"]["evaluate-local"] for m in messages} == {server_round in expected}
        take(strategy, replies, server_round)
        scored = "local_accuracy" in strategy.record.row(0)
        evaluations, answers = send(strategy, server_round, "evaluate")
        take(strategy, answers, server_round, "evaluate")
        assert bool(evaluations) == scored == ("served_accuracy" in strategy.record.row(0))
        if evaluations:
            evaluated.append(server_round)
    assert evaluated == expected


def test_learning_rate_schedules_by_hand(make_strategy: MakeStrategy) -> None:
    constant = make_strategy("fedavg", lr=0.2, num_server_rounds=4)
    assert [schedule.learning_rate(constant.settings, r) for r in range(1, 5)] == [0.2] * 4
    cosine = make_strategy("fedavg", lr=0.2, lr_schedule="cosine", num_server_rounds=4)
    half = 0.1 * math.sqrt(0.5)
    assert [schedule.learning_rate(cosine.settings, r) for r in range(1, 5)] == pytest.approx(
        [0.2, 0.1 + half, 0.1, 0.1 - half]
    )
    single = make_strategy("fedavg", lr=0.2, lr_schedule="cosine", num_server_rounds=1)
    assert schedule.learning_rate(single.settings, 1) == 0.2
    rates = {"lr": 0.2, "lr_decay": 0.5, "num_server_rounds": 5}
    exponential = make_strategy("fedavg", lr_schedule="exponential", **rates)
    assert [schedule.learning_rate(exponential.settings, r) for r in range(1, 5)] == [0.2, 0.1, 0.05, 0.025]
    step = make_strategy("fedavg", lr_schedule="step", lr_step=2, **rates)
    assert [schedule.learning_rate(step.settings, r) for r in range(1, 6)] == [0.2, 0.2, 0.1, 0.1, 0.05]
    messages, _ = send(cosine, 3)
    assert messages[0].content.config_records["config"]["lr"] == pytest.approx(0.1)


def test_round_metrics_are_means_over_clients(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    _, replies = send(strategy)
    _, trained = take(strategy, replies)
    losses = [r.content.metric_records["metrics"]["train-loss"] for r in replies]
    assert isinstance(trained, MetricRecord)
    assert trained["train-loss"] == pytest.approx(np.mean(losses))
    _, answers = send(strategy, phase="evaluate")
    evaluated = take(strategy, answers, phase="evaluate")
    scores = [row["served_accuracy"] for row in strategy.record.clients.values() if "served_accuracy" in row]
    assert len(scores) == 3  # the fourth client has no test samples
    assert evaluated["served-accuracy"] == pytest.approx(np.mean(scores))


def test_training_scores_take_precedence_over_evaluation_scores(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg")
    _, replies = send(strategy)
    metrics(local_accuracy=0.125)(replies[0].content)
    take(strategy, replies)
    _, answers = send(strategy, phase="evaluate")
    metrics(local_accuracy=0.75)(answers[0].content)
    take(strategy, answers, phase="evaluate")
    assert strategy.record.row(0)["local_accuracy"] == 0.125


@pytest.mark.parametrize(
    ("method", "name", "damage"),
    [
        ("fedavg", "model", lambda a: a[:-1]),
        ("fedavg", "model", lambda a: a.astype(np.float64)),
        ("fedacs", "models", lambda a: np.zeros((3, a.shape[1] - 1), np.float32)),
        ("ifca", "models", lambda a: a[0]),
    ],
)
def test_a_state_of_another_shape_or_type_is_not_loaded(
    method: str, name: str, damage: Callable[[np.ndarray], np.ndarray], make_strategy: MakeStrategy
) -> None:
    strategy = make_strategy(method)
    state = state_of(strategy)
    served = {key: array.copy() for key, array in strategy.serve(0).items()}
    with pytest.raises(ValueError, match=f"{name}: float"):
        load_state(strategy, {**state, name: damage(state[name])})
    with pytest.raises(KeyError, match=name):
        load_state(strategy, {other: array for other, array in state.items() if other != name})
    assert all(np.array_equal(array, served[key]) for key, array in strategy.serve(0).items())


def test_a_state_without_a_finished_array_is_not_loaded(make_strategy: MakeStrategy) -> None:
    strategy, fresh = (make_strategy("ppfe", model="mlp", num_server_rounds=2, ppfe_stages=2) for _ in range(2))
    _, replies = send(strategy)
    take(strategy, replies)
    state, before = state_of(strategy), state_bytes(fresh)
    for name in ("finished-1", "finished-in"):
        with pytest.raises(KeyError, match=name):
            load_state(fresh, {other: array for other, array in state.items() if other != name})
        assert state_bytes(fresh) == before
    load_state(fresh, state)
    assert state_bytes(fresh) == state_bytes(strategy) != before


def test_the_summary_describes_clients_and_training(
    make_strategy: MakeStrategy, warnings: pytest.LogCaptureFixture
) -> None:
    make_strategy("fedavg", fraction_train=0.5, local_steps=7).summary()
    text = warnings.text
    assert "50 % of them train in a round" in text
    assert "7 steps" in text


# -- the weighted mean -----------------------------------------------------------------------------------


def test_weighted_mean_by_hand() -> None:
    rows = np.array([[1, 2], [3, 6], [100, 100]], np.float32)
    assert weighted_mean(rows, [1, 3, 0]).tolist() == [2.5, 5.0]
    assert weighted_mean(rows[:2], [1e300, 3e300]).tolist() == [2.5, 5.0]
    assert weighted_mean(rows[:1], [1e-300]).tolist() == [1.0, 2.0]
    assert weighted_mean(rows, [1, 1, 1]).dtype == np.float32


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [-1, 2], [math.nan, 1]])
def test_invalid_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        weighted_mean(np.ones((2, 2), np.float32), weights)


def test_replies_are_stacked_in_float32() -> None:
    arrays = [{"model": np.full(2, c, np.float64), "choice": np.array(c)} for c in range(3)]
    updates = [Update(named, 0.5, num_examples=c + 1) for c, named in enumerate(arrays)]
    assert stacked(updates).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacked(updates).dtype == np.float32
    assert stacked(updates, "choice").tolist() == [0, 1, 2]
    assert num_examples(updates).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("method", "settings", "invalid"),
    [
        ("ifca", {}, {"cluster": np.array(7)}),
        ("ifca", {}, {"cluster": np.array(-1)}),
        ("cwfedavg", {"cwfedavg_distribution": "empirical"}, {"distribution": np.full(3, -1 / 3)}),
        ("cwfedavg", {"cwfedavg_distribution": "empirical"}, {"distribution": np.zeros(3)}),
    ],
)
def test_invalid_method_arrays_are_rejected(
    method: str, settings: dict[str, Any], invalid: dict[str, np.ndarray], make_strategy: MakeStrategy
) -> None:
    strategy = make_strategy(method, **settings)
    method_array = {"cluster": np.array(1)} if method == "ifca" else {"distribution": np.full(3, 1 / 3)}
    valid = {"model": np.zeros(strategy.size, np.float32), **method_array}
    assert {name: array.shape for name, array in valid.items()} == strategy.exchange.expected_shapes(0)
    strategy.check(0, valid)
    with pytest.raises(BadReplyError):
        strategy.check(0, valid | invalid)


# -- limits on the content of a reply --------------------------------------------------------------------

LIMITED = (
    "fedavg",
    "fedrep",
    "cwfedavg",
    "fedacs",
    "fedamp",
    "feddrm",
    "ppfe",
    "fedfew",
    "ifca",
    "fedper",
    "lg-fedavg",
    "cfl",
)


def update_of_norm_5(strategy: Any) -> Change:
    """Return a function that replaces an update by zeros, a 3 and a 4, so that its norm is 5."""

    def change(content: RecordDict) -> None:
        record = content.array_records["arrays"]
        if strategy.settings.run.method == "fedfew":  # FedFew sends the updates of K models
            update = np.zeros(strategy.models.shape, np.float32)
            update[0, 1], update[2, 0] = 3, 4
            record["models"] = Array(update)
            return
        if strategy.settings.run.method == "ifca":
            record["cluster"] = Array(np.array(1))
            update = strategy.models[1].copy()
        else:  # cwFedAvg sends its class-wise parameters, the last ones, separately
            served = strategy.serve(BAD)
            update = np.concatenate([served[name] for name in strategy.method.sent])
        update[[0, -1]] += (3, -4)
        record["model"] = Array(update)

    return change


@pytest.mark.parametrize(
    "reason",
    [
        "no samples",
        "<class 'data.errors.DataError'>:<'no samples'>",
        "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)"
        "  File ...\nflwr.clientapp.client_app.ClientAppException: \n"
        "Exception ClientAppException occurred. Message: no samples'>",
    ],
)
def test_raised_extracts_the_clients_message(reason: str) -> None:
    assert raised(reason) == "no samples"


@pytest.mark.parametrize("method", LIMITED)
def test_an_update_above_the_limit_is_dropped_not_clipped(method: str, make_strategy: MakeStrategy) -> None:
    for limit, dropped in ((4.999, True), (5.001, False)):
        strategy = make_strategy(method, max_update_norm=limit, lr=1e-4)
        _, replies = send(strategy)
        update_of_norm_5(strategy)(replies[BAD].content)
        take(strategy, replies)
        assert [client for client, _ in strategy.record.dropped] == ([BAD] if dropped else [])
        assert ("train_loss" in strategy.record.clients[BAD]) is not dropped
        if dropped:
            assert "exceeds max-update-norm = 4.999" in strategy.record.dropped[0][1]
            reference = make_strategy(method, lr=1e-4)
            _, replies = send(reference)
            take(reference, [replies[c] for c in GOOD])
            assert state_bytes(strategy) == state_bytes(reference)


def test_an_update_with_an_overflowing_norm_is_dropped(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", max_update_norm=1e30)
    _, replies = send(strategy)
    change_model(lambda a: np.full(a.shape, 3e38, np.float32))(replies[BAD].content)
    take(strategy, replies)
    ((client, reason),) = strategy.record.dropped
    assert (client, "max-update-norm" in reason) == (BAD, True)


def test_without_a_limit_no_norm_is_computed(make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy("fedavg")
    monkeypatch.setattr(influence, "norm_of", None)
    _, replies = send(strategy)
    take(strategy, replies)
    assert not strategy.record.dropped


def test_max_update_norm_is_rejected_for_local_training(make_strategy: MakeStrategy) -> None:
    with pytest.raises(SettingsError, match=r"max-update-norm = 1e-09.*method = 'local'"):
        make_strategy("local", max_update_norm=1e-9)


def test_a_huge_reply_is_dropped_before_its_arrays_are_decoded(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit admits d float64 numbers and a header, and no larger reply."""
    strategy = make_strategy("fedavg")
    _, replies = send(strategy)
    d = strategy.size
    change_model(lambda a: a.astype(np.float64))(replies[0].content)
    change_model(lambda a: np.zeros(2 * d + 1000))(replies[BAD].content)
    arrays = replies[2].content.array_records["arrays"]
    for number in range(1, 50):
        arrays[str(number)] = Array(np.zeros(d, np.float32))
    shapes: list[tuple[int, ...]] = []

    for kind in (Array, ByReference):

        def numpy(self: Array, original: Callable[[Array], Any] = kind.numpy) -> Any:
            shapes.append(self.shape)
            return original(self)

        monkeypatch.setattr(kind, "numpy", numpy)
    take(strategy, replies)
    assert shapes == [(d,), (d,)]  # clients 0 and 3
    reasons = dict(strategy.record.dropped)
    assert sorted(reasons) == [1, 2]
    assert f"shape ({d},)" in reasons[1] and f"at most {8 * d + 4096}" in reasons[1]
    assert reasons[2] == "the reply has 50 arrays instead of 1"
