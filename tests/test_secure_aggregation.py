"""Secure aggregation: the server learns the sum of the clients' updates, and nothing about a single update."""

import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Crypto.Protocol.SecretSharing import Shamir
from flwr.app import Array, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.serde import context_from_proto, context_to_proto
from scipy.stats import chisquare

import posy
from benchmarks.local_federation import Deployment
from posy.client_app import secure_aggregation as client_side
from posy.client_app.app import Call
from posy.client_app.privacy import check_privacy
from posy.client_app.secure_aggregation import Masking, ProtocolError, Secrets, answer
from posy.client_app.signatures import RoundSignatures, signatures_of
from posy.commands.deploy.certificates import make_certificates
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies import masking
from posy.strategies.arrays import ALLOWED
from posy.strategies.masking import (
    MaskingError,
    combined,
    decoded,
    encoded,
    error_bound,
    new_secret,
    opened,
    pair_mask,
    private_key,
    public_key,
    sealed,
    split,
    stream,
)
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import read_settings
from posy.strategies.secure_aggregation import (
    MASKED,
    PER_CLIENT,
    REFUSAL,
    View,
    colluding,
    connected,
    excluded_by,
    safe_threshold,
    threshold_of,
)
from posy.strategies.server_state import state_of

SUMMED = [method for method in METHODS if settings_class(method).sums is ALLOWED]
CLIENTS = 5
Key = tuple[str, int, int]
Federate = Callable[..., Any]


# -- arithmetic -------------------------------------------------------------------------------------------


def test_encode_and_decode_by_hand() -> None:
    first = encoded([np.array([1.0, -2.0])], 0.25, 16.0)
    second = encoded([np.array([[0.5]]), np.array([4.0])], 0.75, 16.0)
    assert first.tolist() == [2**24, 2**32 - 2**25, 2**28]
    assert second.tolist() == [3 * 2**23, 3 * 2**26, 3 * 2**28]
    np.testing.assert_array_equal(decoded(first + second, [0.25, 0.75], 16.0), [0.625, 2.5])
    np.testing.assert_array_equal(decoded(second, [0.75], 16.0), [0.5, 4.0])


def test_decoded_mean_is_within_the_error_bound() -> None:
    rng = np.random.default_rng(3)
    weights = rng.integers(1, 400, 7)
    changes = rng.uniform(-16, 16, (7, 5000))
    shares = [int(weight) / int(weights.sum()) for weight in weights]
    words = [encoded([change], share, 16.0) for change, share in zip(changes, shares, strict=True)]
    for clients in (range(7), (1, 4, 6)):
        summed_shares = [shares[i] for i in clients]
        mean = decoded(np.add.reduce([words[i] for i in clients], dtype=np.uint32), summed_shares, 16.0)
        exact = np.average(changes[list(clients)], axis=0, weights=weights[list(clients)])
        error = np.abs(mean - exact).max()
        assert 0.1 * error_bound(summed_shares, 16.0) < error <= error_bound(summed_shares, 16.0)
    assert error_bound([0.2] * 5, 16.0) == pytest.approx(3.73e-8, rel=0.01)  # float32 resolves numbers near 1 to 6e-8


@pytest.mark.parametrize("wrong", [16.1, -16.1, np.nan, np.inf])
def test_values_out_of_range_are_rejected_not_clipped(wrong: float) -> None:
    encoded([np.array([16.0, -16.0])], 1.0, 16.0)
    with pytest.raises(ArithmeticError, match="NaN or Inf" if not np.isfinite(wrong) else "secure-range = 16"):
        encoded([np.array([0.0, wrong])], 1.0, 16.0)


def test_a_sum_with_remaining_masks_is_rejected() -> None:
    words = encoded([np.zeros(4)], 1.0, 16.0)
    words += stream(bytes(32), 5)
    with pytest.raises(MaskingError, match="do not cancel"):
        decoded(words, [1.0], 16.0)


def test_a_mean_out_of_range_is_rejected() -> None:
    """The mean of changes within ±R is within ±R, so a larger mean contains a larger change."""
    shares = [0.25, 0.75]
    first, second = encoded([np.array([16.0, 0.0])], 0.25, 16.0), encoded([np.array([16.0, 3.0])], 0.75, 16.0)
    np.testing.assert_array_equal(decoded(first + second, shares, 16.0), [16.0, 2.25])
    for move in (3, -(2**31) - 100):  # beyond the rounding of two clients, and around the modulus
        wrong = first + second + np.array([move % 2**32, 0, 0], np.uint32)
        with pytest.raises(MaskingError, match="by more than secure-range = 16"):
            decoded(wrong, shares, 16.0)
    with pytest.raises(MaskingError, match="secure-range"):  # 12 from a client that has dropped out
        decoded(encoded([np.array([12.0])], 0.25, 16.0) * np.uint32(3) - np.array([0, 2**29], np.uint32), [0.25], 16.0)


def test_masks_match_the_aes_key_stream() -> None:
    """The mask is the published AES-256 encryption of a zero block under a zero key."""
    assert stream(bytes(32), 4).astype("<u4").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_pair_masks_cancel() -> None:
    keys = {client: private_key(new_secret()) for client in (0, 3, 7)}
    public = {client: public_key(key) for client, key in keys.items()}

    def masks(context: bytes, overrides: Mapping[int, bytes] | None = None) -> np.ndarray:
        return np.add.reduce(
            [
                pair_mask(key, public[other], client, other, (overrides or {}).get(client, context), 50)
                for client, key in keys.items()
                for other in keys
                if other != client
            ],
            dtype=np.uint32,
        )

    assert not masks(b"round 1").any()
    assert masks(b"round 1", {3: b"another model"}).all()
    first, again = (pair_mask(keys[0], public[3], 0, 3, name, 50) for name in (b"round 1", b"round 2"))
    assert first.all() and not np.array_equal(first, again)


def test_a_secret_needs_a_threshold_of_shares() -> None:
    secret = new_secret()
    shares = split(secret, 3, 5)
    for holders in ((0, 1, 2), (4, 2, 0), (0, 1, 2, 3, 4)):
        assert combined({holder: shares[holder] for holder in holders}, 3) == secret
    with pytest.raises(MaskingError, match="2 shares of a secret are available, but 3"):
        combined({0: shares[0], 1: shares[1]}, 3)
    assert Shamir.combine([(1, shares[0]), (2, shares[1])], ssss=False) != secret


def test_sealed_shares_open_only_for_one_client_and_round() -> None:
    sender, recipient, third = (private_key(new_secret()) for _ in range(3))
    content = sealed(b"share", sender, public_key(recipient), 0, 1, b"1")
    assert opened(content, recipient, public_key(sender), 0, 1, b"1") == b"share"
    for private, public, source, target, context in (
        (third, public_key(sender), 0, 1, b"1"),
        (recipient, public_key(third), 0, 1, b"1"),
        (recipient, public_key(sender), 1, 0, b"1"),
        (recipient, public_key(sender), 0, 1, b"2"),
    ):
        with pytest.raises(MaskingError, match="cannot be decrypted"):
            opened(content, private, public, source, target, context)
    with pytest.raises(MaskingError, match="cannot be decrypted"):
        opened(content[:-1], recipient, public_key(sender), 0, 1, b"1")
    with pytest.raises(MaskingError, match="public key"):
        sealed(b"share", sender, bytes(32), 0, 1, b"1")


def view_of(size: int, neighbours: int = 0, fraction: float | str = "auto", *, signed: bool = False) -> View:
    return View.new(range(size), neighbours, fraction, signed=signed)


def test_neighbours_and_threshold() -> None:
    assert View.new([4, 1, 2], 0, 0.6, signed=False).rosters() == {client: [1, 2, 4] for client in (4, 1, 2)}
    assert view_of(5, 4).rosters() == view_of(5).rosters()
    view = view_of(9, 3)  # rounded up
    ring = view.rosters()
    assert view.neighbourhood == 5 and all(len(roster) == 5 and client in roster for client, roster in ring.items())
    assert all(client in ring[other] for client, roster in ring.items() for other in roster)
    assert len({view_of(30, 4).cohort for _ in range(5)}) == 5
    assert View.read(view.entries()) == view and view.digest() != view._replace(reach=1).digest()
    line = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2, 3], 3: [2, 3]}
    assert connected({0, 1, 2, 3}, line) and connected({1, 2}, line) and not connected({0, 1, 3}, line)
    assert [threshold_of(size, 0.6) for size in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert [threshold_of(size, 0.5000001) for size in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert threshold_of(5, 1.0) == 5


def test_the_page_on_privacy_states_the_thresholds_of_small_federations() -> None:
    page = (Path(__file__).parents[1] / "docs/deploy/privacy.md").read_text(encoding="utf-8")
    lines = page.partition("### Drop-outs")[2].partition("###")[0].splitlines()
    stated = [tuple(map(int, re.findall(r"\d+", line))) for line in lines if re.match(r"\| \d", line)]
    expected = []
    for size in (3, 4, 5):
        signed, unsigned = (
            View.new(range(size), 0, "auto", signed=is_signed).cohort_threshold for is_signed in (True, False)
        )
        least = max(client_side.MIN_CLIENTS, size // 2 + 1)  # client_side.smallest_sum
        row = [(threshold, size - threshold, max(threshold, least)) for threshold in (signed, unsigned)]
        expected.append((size, *(number for pair in zip(*row, strict=True) for number in dict.fromkeys(pair))))
    assert stated == expected


def test_two_survivor_lists_cannot_both_reach_the_safe_threshold() -> None:
    """c of n clients sign both lists, and the n - c honest clients sign one list each. By hand for small n."""
    assert [colluding(n) for n in (2, 3, 4, 6, 7, 50)] == [0, 0, 1, 1, 2, 16]
    assert [safe_threshold(n, colluding(n)) for n in (2, 3, 4, 5, 6, 12, 50)] == [2, 2, 3, 4, 4, 8, 34]
    for n in range(2, 40):
        for c in range(n):
            t = safe_threshold(n, c)
            honest = n - c
            splits = [split for split in range(honest + 1) if c + split >= t and c + honest - split >= t]
            assert not splits or t == 2  # 2 is the smallest threshold
            if t > 2:
                assert [split for split in range(honest + 1) if c + split >= t - 1 and c + honest - split >= t - 1]


@pytest.mark.parametrize(
    ("size", "neighbours", "tolerated"), [(3, 0, 0), (5, 0, 2), (12, 4, 1), (50, 20, 5), (9, 2, 0)]
)
def test_number_of_tolerated_colluders(size: int, neighbours: int, tolerated: int) -> None:
    """With the defaults of signed keys, five clients need four signatures, because 2 * 4 > 5 + 2."""
    assert view_of(size, neighbours, signed=True).tolerated() == tolerated


@pytest.mark.parametrize("reach", [2, 3])
def test_honest_survivors_stay_connected_despite_tolerated_colluders(reach: int) -> None:
    """All choices of clients that drop out and collude, in a ring of 2 reach + 4 clients."""
    view = view_of(2 * reach + 4, 2 * reach, signed=True)
    rosters, clients = view.rosters(), set(view.cohort)
    assert view.reach == reach
    for drop in range(len(clients) - view.cohort_threshold + 1):
        for dropped in combinations(sorted(clients), drop):
            survivors = clients - set(dropped)
            if min(len(survivors & set(rosters[client])) for client in survivors) < view.threshold:
                continue
            for colluders in combinations(sorted(survivors), view.tolerated()):
                assert connected(survivors - set(colluders), rosters)


def test_flower_masks_are_unsafe() -> None:
    """Flower's masks are unsafe: only 32 bits decide a mask, and a mask never has the largest value."""
    seed, twin = bytes(range(32)), bytes(range(4, 8)) + bytes(range(4)) + bytes(range(8, 32))
    first, second = (pseudo_rand_gen(key, 2**32, [(100,)])[0] for key in (seed, twin))
    np.testing.assert_array_equal(first, second)
    assert pseudo_rand_gen(seed, 2, [(1000,)])[0].max() == 0


# -- complete rounds in process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five() -> tuple[np.ndarray, np.ndarray, list[list[int]], list[list[int]]]:
    """Five clients of unequal size."""
    rng = np.random.default_rng(11)
    sizes = (12, 20, 5, 9, 30)
    y = rng.integers(0, 3, sum(sizes) + 3 * len(sizes))
    x = (rng.normal(0, 2, (3, 6))[y] + rng.normal(0, 1, (len(y), 6))).astype(np.float32)
    bounds = np.cumsum([0, *(size + 3 for size in sizes)]).tolist()
    pairs = list(pairwise(bounds))
    return x, y, [list(range(a, b - 3)) for a, b in pairs], [list(range(b - 3, b)) for _, b in pairs]


class ProcessGrid(InProcessGrid):
    """Grid that reloads the context of a node for each message, as a new process would."""

    def _receive(self, message: Message) -> Message | Call:
        context = self.contexts[message.metadata.dst_node_id]
        state = context_from_proto(context_to_proto(context)).state
        context.state.clear()
        context.state.update(state)
        return super()._receive(message)


class StageGrid(InProcessGrid):
    """Grid that loses messages or replies, may send every message twice, and records the masked updates.

    Messages are identified by (stage, round, client).
    """

    def __init__(
        self,
        clients: int,
        lost_messages: Collection[Key] = (),
        lost_replies: Collection[Key] = (),
        duplicate: bool = False,
        change: Callable[[Key, Message], None] = lambda key, message: None,
    ) -> None:
        super().__init__(clients)
        self.lost_messages, self.lost_replies = lost_messages, lost_replies
        self.duplicate, self.change = duplicate, change
        self.masked: dict[tuple[Any, ...], np.ndarray] = {}

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        keyed = [(key_of(message), message) for message in messages]
        sent = [(key, message) for key, message in keyed if key not in self.lost_messages]
        for key, message in sent:
            self.change(key, message)
        if self.duplicate:
            list(super().send_and_receive([message for _, message in sent], timeout=timeout))
        replies = list(super().send_and_receive([message for _, message in sent], timeout=timeout))
        delivered = []
        for (key, _), reply in zip(sent, replies, strict=True):
            if key[0] in ("train", "evaluate") and not reply.has_error():
                arrays = reply.content.array_records["arrays"]
                if MASKED in arrays:  # not in a plain run
                    self.masked[key if key[0] == "evaluate" else key[1:]] = arrays[MASKED].numpy().copy()
            if key not in self.lost_replies:
                delivered.append(reply)
        return delivered


def key_of(message: Message) -> Key:
    config: Mapping[str, Any] = message.content.config_records["config"]
    if "secure-stage" in config:
        _, number, *evaluation = config["secure-round"].split("-")
        return " ".join((*evaluation, config["secure-stage"])), int(number), config["client"]
    return message.metadata.message_type, config.get("server-round", 0), config.get("client", -1)


def run(federate: Federate, config: dict[str, Any], **grid: Any) -> Any:
    """Run with secure aggregation."""
    return federate(config | {"secure-aggregation": True}, grid=lambda clients: StageGrid(clients, **grid))


def assert_close(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=tolerance, err_msg=name)


def reasons(finished: Any, server_round: int) -> dict[int, str]:
    return dict(finished.records[server_round - 1].dropped)


@pytest.mark.parametrize("method", SUMMED)
def test_models_match_the_plain_run(make_config: Any, federate: Federate, five: Any, method: str) -> None:
    """PPFE's second stage weights clients equally. FedRep, FedDRM and PPFE keep layers, and Ditto keeps a model."""
    config = make_config(method, data=five, model="mlp", num_server_rounds=4, ppfe_stages=2, ppfe_stage_rounds="2,2")
    plain, secure = federate(config), run(federate, config)
    assert [record.dropped for record in secure.records] == [[]] * 4
    assert_close(state_of(secure.strategy), state_of(plain.strategy), 2e-6)
    for client in range(CLIENTS):
        assert_close(secure.kept(client), plain.kept(client), 1e-5)
    words = secure.grid.masked[4, 0]
    assert words.dtype == np.uint32
    # SCAFFOLD sends a control variate too, pFedFDA means and covariance.
    shapes = secure.strategy.exchange.expected_shapes(0).values()
    assert words.shape == (sum(map(math.prod, shapes)) + 1 + 4 * (3 + 4 + 1),)
    assert_scores_are_sums(plain, secure)


def assert_scores_are_sums(plain: Any, secure: Any) -> None:
    """Check that the sums match the plain run's rows, and that the secure run's rows have no scores."""
    for plain_record, secure_record in zip(plain.records, secure.records, strict=True):
        rows = plain_record.clients.values()
        for point in ("served", "local"):
            scored = [row for row in rows if f"{point}_accuracy" in row and row["n_test"]]
            tally = secure_record.sums[point]
            assert tally.clients == len(scored) and tally.samples == sum(row["n_test"] for row in scored)
            if scored:
                correct = sum(row["n_test"] * row[f"{point}_accuracy"] for row in scored)
                assert tally.samples * tally.metrics["accuracy"] == pytest.approx(correct)
            loss = sum(row["n_test"] * row[f"{point}_loss"] for row in scored)
            assert tally.loss / 2**20 == pytest.approx(loss, rel=1e-4, abs=1e-4)
        trained = sum(row["n_train"] * row["train_loss"] for row in rows)
        assert secure_record.sums["train"].loss / 2**20 == pytest.approx(trained, rel=1e-4)
        assert secure_record.samples == plain_record.samples
        for row in secure_record.clients.values():
            assert row.keys() <= {"bytes_up", "bytes_down", "n_train", "site"}


def test_one_round_is_within_the_error_bound(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("fedavg", data=five, num_server_rounds=1)
    plain, secure = (done.strategy.model for done in (federate(config), run(federate, config)))
    shares = [len(part) / sum(map(len, five[2])) for part in five[2]]
    assert (
        np.abs(secure - plain).max() <= error_bound(shares, 16.0) + 4 * np.finfo(np.float32).eps * np.abs(plain).max()
    )
    coarse = run(federate, config | {"secure-range": 2.0**20}).strategy.model
    assert error_bound(shares, 16.0) < np.abs(coarse - plain).max() <= error_bound(shares, 2.0**20)


def test_repeated_runs_give_the_same_models_with_different_masks(
    make_config: Any, federate: Federate, five: Any
) -> None:
    config = make_config("fedrep", data=five, model="mlp", fraction_train=0.8)
    first, again = run(federate, config), run(federate, config)
    assert_close(state_of(first.strategy), state_of(again.strategy), 0)
    assert first.grid.masked.keys() == again.grid.masked.keys()
    assert all((words != again.grid.masked[key]).mean() > 0.9 for key, words in first.grid.masked.items())
    assert {key[0] for key in first.grid.masked if len(key) == 3} == {"evaluate"}


def test_the_context_carries_secrets_between_processes(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("fedavg", data=five) | {"secure-aggregation": True}
    reloaded, in_process = federate(config, grid=ProcessGrid), run(federate, config)
    assert [record.dropped for record in reloaded.records] == [[]] * 3
    assert_close(state_of(reloaded.strategy), state_of(in_process.strategy), 0)


def test_duplicate_messages_do_not_change_the_result(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("ditto", data=five)
    assert_close(state_of(run(federate, config, duplicate=True).strategy), state_of(run(federate, config).strategy), 0)


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize(
    ("lost_messages", "lost_replies", "summed"),
    [
        (("keys",), (), {0, 2, 3, 4}),
        ((), ("keys",), {0, 2, 3, 4}),
        (("shares",), (), {0, 2, 3, 4}),
        ((), ("shares",), {0, 2, 3, 4}),
        (("train",), (), {0, 2, 3, 4}),
        ((), ("train",), {0, 2, 3, 4}),
        (("survivors",), (), {0, 1, 2, 3, 4}),
        ((), ("survivors",), {0, 1, 2, 3, 4}),
        (("unmask",), (), {0, 1, 2, 3, 4}),
        ((), ("unmask",), {0, 1, 2, 3, 4}),
    ],
)
def test_the_sum_is_correct_when_a_client_drops_out_at_any_stage(
    make_config: Any,
    federate: Federate,
    five: Any,
    lost_messages: tuple[str, ...],
    lost_replies: tuple[str, ...],
    summed: set[int],
    neighbours: int,
) -> None:
    """Client 1 loses its message or its reply in one stage of round 1."""
    config = make_config("fedavg", data=five, num_server_rounds=2)
    masked = config | {"secure-aggregation": True, "secure-neighbours": neighbours}
    lost = {"lost_messages": lost_messages, "lost_replies": lost_replies}
    secure = run(federate, masked, **{kind: [(stage, 1, 1) for stage in stages] for kind, stages in lost.items()})
    assert reasons(secure, 1) == {1: "no reply"}
    assert reasons(secure, 2) == {}
    plain = federate(config, grid=lambda clients: StageGrid(clients, [] if 1 in summed else [("train", 1, 1)]))
    assert_close(state_of(secure.strategy), state_of(plain.strategy), 1e-6)


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.parametrize("stage", ["keys", "shares", "train", "survivors", "unmask"])
def test_a_round_below_the_threshold_keeps_the_server_state(
    make_config: Any, federate: Federate, five: Any, warnings: Any, stage: str, neighbours: int
) -> None:
    """Three of five clients are too few for a threshold of 0.8, but are enough if only three have keys."""
    config = make_config("fedavg", data=five, num_server_rounds=1) | {"secure-neighbours": neighbours}
    lost_messages = [(stage, 1, client) for client in ((1, 2, 3, 4) if stage == "keys" else (1, 3))]
    secure = run(federate, config | {"secure-threshold": 0.8}, lost_messages=lost_messages)
    np.testing.assert_array_equal(secure.strategy.model, secure.strategy.initial())
    assert set(reasons(secure, 1)) == {client for _, _, client in lost_messages}
    [message] = {record.getMessage() for record in warnings.records if "the round fails" in record.getMessage()}
    assert (
        "secure-threshold = 0.8 needs" in message or "1 of 5 clients have sent their keys, but 2 are needed" in message
    )


@pytest.mark.parametrize("fault", [{"secure-range": 1e-9}, {"lr": 1e30}])
def test_a_diverged_client_sends_a_zero_update_instead_of_an_error(
    fault: Any, make_config: Any, federate: Federate, five: Any, warnings: pytest.LogCaptureFixture
) -> None:
    """An error of one client would reveal whether its update is larger than a bound that the server has chosen."""
    strict = run(federate, make_config("fedavg", data=five, num_server_rounds=1) | fault)
    assert reasons(strict, 1) == {}
    np.testing.assert_allclose(strict.strategy.model, strict.strategy.initial(), atol=1e-7)
    assert "5 of 5 clients did not send a change" in warnings.text


def test_the_sum_includes_each_clients_noise(make_config: Any, federate: Federate, five: Any) -> None:
    config = make_config("fedavg", data=five, num_server_rounds=1, dp="local", dp_clip=1e-4)
    strategy = run(federate, config).strategy
    deviation = 2e-4 * 3.730631634816 * np.sqrt(sum((len(p) / 76) ** 2 for p in five[2]))
    assert 0.5 * deviation < (strategy.model - strategy.initial()).std() < 1.6 * deviation


# -- one masked update ---------------------------------------------------------------------------------------


@pytest.fixture
def fixed_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw secrets from a seed, so that a test of their distribution is reproducible."""
    monkeypatch.setattr(masking.secrets, "token_bytes", np.random.default_rng(5).bytes)


def byte_p_value(words: np.ndarray) -> float:
    """Return the p-value of a chi-squared test that the bytes of ``words`` are uniform."""
    return float(chisquare(np.bincount(np.ascontiguousarray(words).view(np.uint8), minlength=256)).pvalue)


@pytest.mark.parametrize("disabled_masks", ["", "own", "pair", "both"])
def test_either_mask_makes_an_update_uniform(
    make_config: Any,
    federate: Federate,
    five: Any,
    monkeypatch: pytest.MonkeyPatch,
    fixed_secrets: None,
    disabled_masks: str,
) -> None:
    """Pair masks hide an update whose own mask is revealed. The own mask hides a late update with a revealed key."""

    def zero_mask(*args: Any) -> np.ndarray:
        return np.zeros(args[-1], np.uint32)

    if disabled_masks in ("own", "both"):
        monkeypatch.setattr(client_side, "own_mask", zero_mask)
    if disabled_masks in ("pair", "both"):
        monkeypatch.setattr(client_side, "pair_mask", zero_mask)
    config = make_config("fedavg", data=five, model="mlp", num_server_rounds=8, evaluate_every=8, local_steps=1)
    masked = run(federate, config).grid.masked
    rounds = [masked[number, 0] for number in range(1, 9)]
    assert len(rounds[0]) > 5000
    if disabled_masks == "both":
        assert byte_p_value(np.concatenate(rounds)) < 1e-100
    else:
        assert byte_p_value(np.concatenate(rounds)) > 0.001
        assert byte_p_value(np.concatenate([first - second for first, second in pairwise(rounds)])) > 0.001


# -- requests that a client refuses --------------------------------------------------------------------------


class ClientGroup:
    """Clients that answer one stage after another to a server that may request anything."""

    def __init__(self, clients: int = 4, threshold: int = 3, configs: Sequence[dict[str, Any]] = ()) -> None:
        InProcessGrid(1)  # gives this process the identity that messages need
        self.contexts = [
            Context(
                run_id=0, node_id=c + 1, node_config=configs[c] if configs else {}, state=RecordDict(), run_config={}
            )
            for c in range(clients)
        ]
        self.roster, self.threshold = list(range(clients)), threshold
        self.public: list[list[bytes]] = []
        self.sealed: list[list[bytes]] = []

    def message(self, client: int, **fields: Any) -> Message:
        config = {"client": client, "secure-round": "0-1", "server-round": 1, "settings": "{}", "lr": 0.1} | fields
        return Message(RecordDict({"config": ConfigRecord(config)}), client + 1, MessageType.QUERY)

    def request(self, client: int, stage: str, min_clients: int = 2, **fields: Any) -> list[bytes]:
        config = {key.replace("_", "-"): value for key, value in fields.items()}
        message = self.message(client, **{"secure-stage": stage}, **config)
        return answer(message, self.contexts[client], min_clients)

    def keys(self, **fields: Any) -> "ClientGroup":
        self.public = [self.request(client, "keys", **fields) for client in self.roster]
        return self

    def shares(self, client: int, **fields: Any) -> list[bytes]:
        keys = [text for texts in self.public for text in texts]
        defaults = {"roster": self.roster, "public_keys": keys, "threshold": self.threshold, "cohort": self.roster}
        defaults |= {"reach": 0, "cohort_threshold": self.threshold}
        return self.request(client, "shares", **(defaults | fields))

    def exchange_shares(self) -> "ClientGroup":
        self.sealed = [self.shares(client) for client in self.keys().roster]
        return self

    def mask(self, client: int, value: float = 0.5, reference: float = 0.0, **fields: Any) -> np.ndarray:
        sources = [other for other in self.roster if other != client]
        shares = [self.sealed[other][client - (client > other)] for other in sources]
        entries = {"weights": 8, "sources": sources, "shares": shares} | fields
        message = self.message(client, **entries)
        masked = Masking(dict(message.content.config_records["config"]), message, self.contexts[client])
        arrays = [np.full(6, value, np.float32)], [np.full(6, reference, np.float32)]
        return masked.mask_reply(*arrays, 2, 16.0, arrays[1])

    def mask_all(self) -> "ClientGroup":
        for client in self.exchange_shares().roster:
            self.mask(client)
        return self

    def sign_survivors(self, client: int, survivors: list[int], **fields: Any) -> list[bytes]:
        return self.request(client, "survivors", survivors=survivors, **fields)

    def unmask(self, client: int, signatures: Mapping[int, list[bytes]], **fields: Any) -> list[bytes]:
        texts = [text for signature in signatures.values() for text in signature]
        return self.request(client, "unmask", signers=list(signatures), signatures=texts, **fields)

    def secrets_of(self, client: int) -> Any:
        return Secrets(client, self.contexts[client], 0, "0-1").latest()


def test_clients_reveal_only_one_secret_of_each_peer() -> None:
    group = ClientGroup().mask_all()
    with pytest.raises(ProtocolError, match="has not signed a list of survivors"):
        group.unmask(0, {})
    for survivors, why in (
        ([1, 2, 3], "lacks this client"),
        ([0, 2, 1], "is not sorted"),
        ([0, 1, 1], "is not sorted"),
        ([0, 1, 2, 9], "names clients outside the cohort"),
        ([], "lacks this client"),
        ([0, 1], "2 clients have sent their updates, but 3"),
    ):
        with pytest.raises(ProtocolError, match=why):
            group.sign_survivors(0, survivors)
    signatures = {client: group.sign_survivors(client, [0, 1, 2]) for client in (0, 1, 2)}
    assert group.sign_survivors(0, [0, 1, 2]) == signatures[0]
    for other in ([0, 1, 3], [0, 1, 2, 3]):
        with pytest.raises(ProtocolError, match="has already signed a different list of survivors"):
            group.sign_survivors(0, other)
    few = "2 of the 4 clients of the cohort have signed .* 3 are needed"
    with pytest.raises(ProtocolError, match=few):
        group.unmask(0, {0: signatures[0], 1: signatures[1]})
    with pytest.raises(ProtocolError, match=few):  # one signer twice
        group.unmask(0, {0: signatures[0], 1: signatures[1], 2: signatures[1]})
    unmasked = group.unmask(0, signatures)
    assert group.unmask(0, signatures) == unmasked
    with pytest.raises(ProtocolError, match="has already signed a different list of survivors"):
        group.sign_survivors(0, [0, 1, 3])
    shares = {0: unmasked, 1: group.unmask(1, signatures), 2: group.unmask(2, signatures)}
    for client in (0, 1, 2):  # clients that have answered have deleted their secrets
        secrets = group.secrets_of(client)
        assert not any(
            (secrets.own_secret, secrets.mask_secret, secrets.seal_secret, secrets.sign_secret, secrets.own_share)
        )
        assert not secrets.sealed
    absent = group.secrets_of(3)
    assert combined({holder: unmasked[3] for holder, unmasked in shares.items()}, 3) == absent.mask_secret
    assert absent.own_secret not in [
        combined({holder: unmasked[peer] for holder, unmasked in shares.items()}, 3) for peer in range(4)
    ]


def test_clients_reveal_nothing_before_their_update_or_in_another_round() -> None:
    group = ClientGroup().exchange_shares()
    with pytest.raises(ProtocolError, match="has not sent its update"):
        group.sign_survivors(0, [0, 1, 2, 3])
    group.mask(0)
    with pytest.raises(ProtocolError, match=r"round 0-2 did not begin here"):
        group.sign_survivors(0, [0, 1, 2, 3], secure_round="0-2")
    first = group.public[0]
    assert group.request(0, "keys")[:2] == first[:2]
    assert group.request(0, "keys", secure_round="0-10") != first
    for stale in ("0-1", "0-9"):
        with pytest.raises(ProtocolError, match=f"round {stale} is over"):
            group.request(0, "keys", secure_round=stale)
    with pytest.raises(ProtocolError, match="round 0-1 did not begin here"):
        group.sign_survivors(0, [0, 1, 2, 3])
    assert group.request(0, "keys", secure_round="1-2")[:2] != first[:2]
    with pytest.raises(ProtocolError, match="is not the name of a round"):
        group.request(0, "keys", secure_round="1-2-again")


def test_a_client_masks_only_one_update_per_round() -> None:
    group = ClientGroup().exchange_shares()
    masked = group.mask(0)
    np.testing.assert_array_equal(group.mask(0), masked)
    with pytest.raises(ProtocolError, match="has already sent a different reply"):
        group.mask(0, value=0.25)
    with pytest.raises(ProtocolError, match="has already sent a different reply"):
        group.mask(0, reference=0.1)
    with pytest.raises(ProtocolError, match="has already sent a different reply"):
        group.mask(0, weights=9)
    for client in (1, 2, 3):
        group.mask(client)
    group.unmask(0, {client: group.sign_survivors(client, [0, 1, 2, 3]) for client in group.roster})
    with pytest.raises(ProtocolError, match="round 0-1 is over"):
        group.mask(0)


def test_a_client_refuses_to_send_an_unmasked_update(make_config: Any, federate: Federate, five: Any) -> None:
    def change(key: Key, message: Message) -> None:
        if key == ("train", 1, 2):
            del message.content.config_records["config"]["secure-round"]

    done = run(federate, make_config("fedavg", data=five, num_server_rounds=1), change=change)
    assert "asks for an update without masks" in reasons(done, 1)[2]


def test_clients_refuse_unsafe_keys_and_thresholds() -> None:
    group = ClientGroup().keys()
    keys = [text for texts in group.public for text in texts]
    for threshold in (1, 2, 5):
        for key in ("threshold", "cohort_threshold"):
            with pytest.raises(ProtocolError, match=f"{threshold} of 4 clients is not a safe threshold"):
                group.shares(0, **{key: threshold})
    for fields in ({"cohort": [1, 2, 3]}, {"cohort": [0, 1, 2, 3, 3]}):
        with pytest.raises(ProtocolError, match="the cohort lacks this client"):
            group.shares(0, **fields)
    for fields in ({"cohort": [0, 1, 2]}, {"reach": 2}, {"reach": -1}, {"cohort": [0, 1, 2, 3, 4], "reach": 1}):
        with pytest.raises(ProtocolError, match="the neighbours do not match the cohort"):
            group.shares(0, **fields)
    with pytest.raises(ProtocolError, match="not this client's keys"):
        group.shares(0, public_keys=[keys[4], *keys[1:]])
    with pytest.raises(ProtocolError, match="not this client's keys"):
        group.shares(0, roster=[1, 2, 3], public_keys=keys[4:], threshold=2)
    assert group.shares(0, public_keys=[*keys[:8], *keys[4:8], *keys[12:]]) == [REFUSAL, b"2 the signature is wrong"]
    text = Secrets(0, group.contexts[0], 0, "0-1").keys_text(2, keys[4:6])
    copied = [*keys[4:6], *RoundSignatures(new_secret(32)).sign(text)]
    with pytest.raises(ProtocolError, match="two public keys are the same"):
        group.shares(0, public_keys=[*keys[:8], *copied, *keys[12:]])
    shares = group.shares(0)
    assert group.shares(0) == shares
    stranger = ClientGroup().keys().public[3]
    with pytest.raises(ProtocolError, match="different keys or a different cohort"):
        group.shares(0, public_keys=[*keys[:-4], *stranger])
    with pytest.raises(ProtocolError, match="different keys or a different cohort"):
        group.shares(0, cohort_threshold=4)


@pytest.fixture
def sites(tmp_path: Path) -> list[dict[str, Any]]:
    """Return node configs of five sites. All trust the keys of the first four, and no site trusts the fifth key."""
    names = [f"site-{i}" for i in range(5)]
    make_certificates(tmp_path, [], names, 1)
    (tmp_path / "trusted").mkdir()
    for name in names[:4]:
        (tmp_path / f"{name}.pub").rename(tmp_path / f"trusted/{name}.pub")
    return [{"signing-key": str(tmp_path / f"{name}.key"), "trusted-keys": str(tmp_path / "trusted")} for name in names]


def test_a_server_cannot_impersonate_a_trusted_site(sites: list[dict[str, Any]]) -> None:
    group = ClientGroup(configs=sites).exchange_shares()
    assert [len(sealed) for sealed in group.sealed] == [3] * 4
    honest_keys = group.keys(secure_round="0-2").public
    forged_keys = [public_key(private_key(new_secret())) for _ in range(2)]
    other = ClientGroup(1, configs=sites[:1]).keys(secure_round="0-3").public[0]  # the same site, in another round
    for texts, why in (
        ([*forged_keys, b"", b""], "not signed by a site with a trusted key"),
        ([*forged_keys, *honest_keys[1][2:]], "the signature is wrong"),
        ([*honest_keys[2][:2], *honest_keys[1][2:]], "the signature is wrong"),
        ([*forged_keys, *other[2:]], "the signature is wrong"),
    ):
        group.public = [honest_keys[0], texts, *honest_keys[2:]]
        mark, refusal = group.shares(0, secure_round="0-2")
        assert mark == REFUSAL and refusal.decode().startswith(f"1 {why}")
    # Client 2's keys replace client 1's keys.
    group.public = [honest_keys[0], honest_keys[2], honest_keys[2], honest_keys[3]]
    assert group.shares(0, secure_round="0-2") == [REFUSAL, b"1 the signature is wrong"]
    group.public = honest_keys
    assert len(group.shares(0, secure_round="0-2")) == 3

    duplicate_site = ClientGroup(configs=[sites[0], sites[1], sites[1], sites[2]]).keys()
    why = b"one site has signed the keys of two clients"
    assert duplicate_site.shares(0) == [REFUSAL, b"1 " + why, b"2 " + why]
    assert duplicate_site.shares(1) == [REFUSAL, b"2 " + why]


def grid_factory(
    configs: Sequence[dict[str, Any]], refusals: Mapping[Key, bytes] | None = None
) -> Callable[[int], StageGrid]:
    """Return a factory of grids with node configs, in which ``refusals`` replace some answers."""

    class ConfiguredGrid(StageGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            requests = list(messages)
            replies = super().send_and_receive(requests, timeout=timeout)
            for message, reply in zip(requests, replies, strict=True):
                if text := (refusals or {}).get(key_of(message)):
                    reply.content.config_records["config"]["answer"] = [REFUSAL, text]
            return replies

    def make(clients: int) -> StageGrid:
        grid = ConfiguredGrid(clients)
        for number, config in enumerate(configs, start=1):
            grid.contexts[number].node_config.update(config)
        return grid

    return make


@pytest.mark.parametrize("config", ["unsigned", "untrusted"])
def test_only_the_site_without_a_trusted_signature_is_dropped(
    make_config: Any,
    federate: Federate,
    five: Any,
    sites: list[dict[str, Any]],
    tmp_path: Path,
    config: str,
) -> None:
    """The sum covers the four sites that trust each other."""
    if config == "untrusted":  # it trusts all keys, but the others do not trust its key
        shutil.copytree(tmp_path / "trusted", tmp_path / "all")
        shutil.copy(tmp_path / "site-4.pub", tmp_path / "all")
        sites[4] |= {"trusted-keys": str(tmp_path / "all")}
    configs = [*sites[:4], sites[4] if config == "untrusted" else {}]
    settings = make_config("fedavg", data=five, num_server_rounds=2)
    done = federate(settings | {"secure-aggregation": True}, grid=grid_factory(configs))
    for number in (1, 2):
        [(client, reason)] = reasons(done, number).items()
        assert client == 4 and "not signed by a site with a trusted key" in reason
        assert "needs signing-key and trusted-keys" in reason
    lost_messages = [("train", number, 4) for number in (1, 2)]
    plain = federate(settings, grid=lambda clients: StageGrid(clients, lost_messages))
    assert_close(state_of(done.strategy), state_of(plain.strategy), 1e-6)


def test_two_sites_with_one_key_are_dropped(
    make_config: Any, federate: Federate, five: Any, sites: list[dict[str, Any]], warnings: Any
) -> None:
    configs = [*sites[:4], sites[3]]
    config = make_config("fedavg", data=five, num_server_rounds=1) | {"secure-aggregation": True}
    done = federate(config, grid=grid_factory(configs))
    dropped = reasons(done, 1)
    assert set(dropped) == {3, 4} and all(
        "one site has signed the keys of two clients" in why for why in dropped.values()
    )
    assert "0 of 5 clients have shared their secrets" in warnings.text
    assert "secure-threshold = auto needs 4" in warnings.text
    np.testing.assert_array_equal(done.strategy.model, done.strategy.initial())


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"secure-threshold": 0.6},
            ("3 of 5 clients is not a safe threshold", "at least 4", "set secure-threshold = auto"),
        ),
        ({"secure-neighbours": 2}, ("with 2 neighbours", "could isolate", "set secure-neighbours = 0, or 4")),
    ],
)
def test_sites_with_signing_keys_refuse_unsafe_thresholds(
    make_config: Any,
    federate: Federate,
    five: Any,
    sites: list[dict[str, Any]],
    changes: dict[str, Any],
    parts: tuple[str, ...],
) -> None:
    """Clients without signing keys accept both: they trust the server to follow the protocol."""
    shutil.copy(Path(sites[4]["signing-key"]).with_suffix(".pub"), sites[4]["trusted-keys"])
    config = make_config("fedavg", data=five, num_server_rounds=1) | {"secure-aggregation": True}
    assert reasons(federate(config, grid=grid_factory(sites)), 1) == {}
    done = federate(config | changes, grid=grid_factory(sites))
    assert set(reasons(done, 1)) == set(range(CLIENTS))
    assert all(part in reason for reason in reasons(done, 1).values() for part in parts)
    assert reasons(federate(config | changes), 1) == {}


def test_a_site_cannot_act_as_two_clients(sites: list[dict[str, Any]]) -> None:
    group = ClientGroup(configs=sites).keys()
    with pytest.raises(ProtocolError, match="as client 0, not as client 1"):
        answer(group.message(1, **{"secure-stage": "keys"}), group.contexts[0])


def test_a_client_that_refuses_valid_keys_is_dropped(make_config: Any, federate: Federate, five: Any) -> None:
    refusal = {("shares", 1, 2): b"0 not signed"}
    settings = make_config("fedavg", data=five, num_server_rounds=1)
    done = federate(settings | {"secure-aggregation": True}, grid=grid_factory([], refusal))
    [(client, reason)] = reasons(done, 1).items()
    assert client == 2 and "refuses the keys of client 0" in reason and reason.endswith(": not signed")
    malformed = {("shares", 1, 2): b"2 itself"}
    done = federate(settings | {"secure-aggregation": True}, grid=grid_factory([], malformed))
    [(client, reason)] = reasons(done, 1).items()
    assert client == 2 and "does not name a neighbour" in reason


def test_a_majority_of_neighbours_excludes_a_client() -> None:
    neighbours = {0: [1, 2], 1: [0, 2, 3], 2: [0, 1, 3], 3: [1, 2]}
    assert set(excluded_by({0: {1: "a"}, 2: {1: "a"}}, neighbours)) == {1}
    assert excluded_by({0: {1: "a"}}, neighbours) == {}
    assert excluded_by({1: {3: "a"}}, neighbours) == {}  # exactly half
    assert set(excluded_by({1: {3: "a"}, 2: {3: "b", 0: "c"}}, neighbours)) == {3}


def test_removed_and_replaced_keys_are_no_longer_trusted(tmp_path: Path) -> None:
    make_certificates(tmp_path, [], ["a", "b"], 1)
    config = {"signing-key": str(tmp_path / "a.key"), "trusted-keys": str(tmp_path)}
    first = signatures_of(config)
    assert first is not None and signatures_of(config) is first, "the files are read once"
    file = tmp_path / "b.pub"
    stat = file.stat()
    make_certificates(tmp_path / "other", [], ["b"], 1)
    file.write_bytes((tmp_path / "other/b.pub").read_bytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replaced = signatures_of(config)
    assert replaced is not None and replaced._trusted.keys() != first._trusted.keys()
    file.unlink()
    remaining = signatures_of(config)
    assert remaining is not None and remaining.trusted == 1


def test_invalid_key_settings_are_rejected(sites: list[dict[str, Any]]) -> None:
    invalid_configs: list[tuple[dict[str, Any], str]] = [
        (sites[4], "lacks the public half of signing-key"),
        (sites[0] | {"signing-key": ""}, "set both or neither"),
        (sites[0] | {"signing-key": sites[0]["trusted-keys"] + "/site-0.pub"}, "cannot be used"),
        (sites[0] | {"trusted-keys": "nowhere"}, "must be a directory with public keys"),
    ]
    for config, why in invalid_configs:
        with pytest.raises(SettingsError, match=why):
            ClientGroup(1, configs=[config]).keys()


def test_a_site_with_trusted_keys_sends_nothing_unmasked(make_config: Any, federate: Federate, five: Any) -> None:
    def grid(clients: int) -> InProcessGrid:
        in_process = InProcessGrid(clients)
        in_process.contexts[2].node_config["trusted-keys"] = "trusted"
        return in_process

    done = federate(make_config("fedavg", data=five, num_server_rounds=1), grid=grid)
    assert {client for client, _ in done.records[0].dropped} == {1}
    (_, training), (_, evaluation) = done.records[0].dropped
    assert "asks for an update without masks" in training and "asks for scores without masks" in evaluation


def test_shares_from_non_neighbours_are_rejected() -> None:
    group = ClientGroup().exchange_shares()
    valid_shares = [group.sealed[other][0] for other in (1, 2, 3)]
    for sources, shares in (([1], valid_shares[:1]), ([1, 2, 9], valid_shares), ([0, 1, 2], valid_shares)):
        with pytest.raises(ProtocolError, match="only from neighbours"):
            group.mask(0, sources=sources, shares=shares)
    with pytest.raises(MaskingError, match="from client 1 to client 0 cannot be decrypted"):
        group.mask(0, shares=[valid_shares[1], valid_shares[0], valid_shares[2]])
    with pytest.raises(ProtocolError, match="the weight 2 is not between 1 and the total weight, 1"):
        group.mask(0, weights=1)


@pytest.mark.parametrize("phase", ["train", "evaluate"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddrm", "ppfe"])
def test_masks_do_not_cancel_if_one_clients_message_differs(
    make_config: Any, federate: Federate, five: Any, warnings: Any, method: str, phase: str
) -> None:
    """A server could otherwise send client 2 a different message and recognise its update in the sum.

    One array or one entry differs. In stage 2 of PPFE the message has two arrays.
    """
    stages = {"ppfe_stages": 2, "ppfe_stage_rounds": "1,1", "evaluate_every": 2} if method == "ppfe" else {}
    rounds = 2 if method == "ppfe" else 1
    config = make_config(method, data=five, model="mlp", num_server_rounds=rounds, local_steps=1, **stages)
    entry_names: set[str] = set()

    def record_names(key: Key, message: Message) -> None:
        if key == (phase, rounds, 2):
            entry_names.update(message.content.config_records["config"])
            names.extend(message.content.array_records["arrays"])

    def change_of(part: str) -> Callable[[Key, Message], None]:
        def change(key: Key, message: Message) -> None:
            if key != (phase, rounds, 2):
                return
            entries = message.content.config_records["config"]
            arrays = message.content.array_records["arrays"]
            if name := part.partition("array ")[2]:
                arrays[name] = Array(arrays[name].numpy() + np.float32(1e-3))
            elif part == "settings":
                entries[part] = f"{entries[part]} "
            elif part == "an-unknown-entry":
                entries[part] = 1
            else:
                entries[part] = entries[part] + 1 if isinstance(entries[part], int | float) else f"{entries[part]}1"

        return change

    names: list[str] = []
    honest = run(federate, config, change=record_names)
    assert honest.records[-1].dropped == [] and honest.records[-1].sums["served"].samples
    assert len(names) == (2 if method == "ppfe" else len(honest.strategy.serve(0)))
    entries = ["settings", "lr", "weights", "state-to", "an-unknown-entry"]
    entries += ["stage-ends", "rounds-done", "uniform-weights"] if method == "ppfe" else []
    for part in (*(f"array {name}" for name in names), *entries):
        warnings.clear()
        last = run(federate, config, change=change_of(part)).records[-1]
        assert "the masks do not cancel" in warnings.text, part
        assert ("train" if phase == "train" else "served") not in last.sums, part
    unknown = {"run", "save-models-to", "state-directory", "server-round", "secure-round", "evaluate-local"}
    unknown |= {"stage", "an-unknown-entry"}
    unknown |= {"all-metrics"}  # a client that receives another value sends words of another shape, and is dropped
    assert entry_names - PER_CLIENT <= {*entries, *unknown}  # add a new entry to this test


# -- answers that the server refuses -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["keys", "shares", "train", "survivors", "unmask"])
@pytest.mark.parametrize("wrong", ["text", "short", "zero", "many"])
def test_a_client_with_a_malformed_answer_is_dropped(
    make_config: Any, federate: Federate, five: Any, monkeypatch: pytest.MonkeyPatch, stage: str, wrong: str
) -> None:
    original = StageGrid.send_and_receive

    def send(self: StageGrid, messages: Any, *, timeout: float | None = None) -> list[Message]:
        requests = list(messages)
        replies = original(self, requests, timeout=timeout)
        for message, reply in zip(requests, replies, strict=True):
            if key_of(message) == (stage, 1, 1):
                if stage == "train":
                    words = reply.content.array_records["arrays"][MASKED].numpy()
                    malformed = {"text": words.astype(np.int64), "short": words[1:], "zero": words.astype(np.float32)}
                    several = np.append(words, words)
                    reply.content.array_records["arrays"][MASKED] = Array(malformed.get(wrong, several))
                else:
                    config = reply.content.config_records["config"]
                    texts: Any = config["answer"]
                    malformed_texts = {"text": "text", "short": [t[1:] for t in texts], "many": [*texts, texts[0]]}
                    # Clients cannot agree on a secret with a key of zeros. Other zeros look like valid bytes.
                    config["answer"] = malformed_texts.get(wrong, [bytes(len(text)) for text in texts])
        return replies

    monkeypatch.setattr(StageGrid, "send_and_receive", send)
    done = run(federate, make_config("fedavg", data=five, num_server_rounds=2))
    changed = not np.array_equal(done.strategy.model, done.strategy.initial())
    assert changed and np.isfinite(done.strategy.model).all() and np.abs(done.strategy.model).max() < 10
    if (stage, wrong) == ("shares", "zero"):
        # The other clients refuse them.
        assert all("cannot be decrypted" in reason for reason in reasons(done, 1).values())
    elif (stage, wrong) not in (("unmask", "zero"), ("survivors", "zero"), ("survivors", "short")):
        assert set(reasons(done, 1)) == {1}
    assert reasons(done, 2) == {}


def test_wrong_shares_fail_the_round_without_changing_the_model(
    make_config: Any, federate: Federate, five: Any, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    honest = client_side._unmask
    monkeypatch.setattr(client_side, "_unmask", lambda *args: [bytes(16) for _ in honest(*args)])
    for lost_messages, message in (
        ((), "the masks do not cancel"),
        ([("train", 1, 1)], "shares of client 1's private key are wrong"),
    ):
        done = run(federate, make_config("fedavg", data=five, num_server_rounds=1), lost_messages=lost_messages)
        np.testing.assert_array_equal(done.strategy.model, done.strategy.initial())
        assert message in warnings.text


def test_methods_that_support_secure_aggregation() -> None:
    for method in METHODS:
        settings = read_settings({"method": method, "secure-aggregation": True})
        if method in SUMMED:
            check_privacy(settings)
        else:
            with pytest.raises(SettingsError, match=f"secure-aggregation = true with method = '{method}'"):
                check_privacy(settings)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max-update-norm": 1.0}, "the server cannot see individual updates"),
        ({"num-clients": 1}, "at least two clients"),
        ({"fraction-train": 0.1}, "at least two clients"),
        ({"dp": "local", "dp-clip": 1.0}, r"secure-range = 16 with dp-clip = 1: .* at least 232.2"),
        ({"secure-threshold": 0.5}, "secure-threshold"),
    ],
)
def test_settings_incompatible_with_secure_aggregation_are_rejected(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        check_privacy(read_settings({"method": "fedavg", "secure-aggregation": True} | changes))


# -- real nodes -----------------------------------------------------------------------------------------------


@pytest.mark.federation
@pytest.mark.xdist_group("secure")
def test_real_nodes_match_one_process_and_survive_a_killed_node(tmp_path: Path, five: Any) -> None:
    """One of three nodes is killed during the second run."""
    x, y = five[:2]
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y)
    common = {
        "method": "fedrep", "dataset": str(tmp_path / "data.npz"), "num-clients": 3, "lr": 0.05, "local-epochs": 1,
        "model": "mlp", "device": "cpu", "stack": "loop", "secure-aggregation": "true",
    }  # fmt: skip
    names = [f"node-{i}" for i in range(3)]
    deployment = Deployment(tmp_path, names)
    try:
        trusted = tmp_path / "trusted"
        trusted.mkdir()
        for name in names:
            shutil.copy(tmp_path / f"certificates/{name}.pub", trusted)
        for i, name in enumerate(names):
            signed = f"signing-key=certificates/{name}.key", f"trusted-keys={trusted}"
            deployment.node(name, f"partition-id={i}", "num-partitions=3", f"state-dir=state-{i}", *signed)
        for name in names:
            deployment.until(partial(deployment.ready, name), name, 200.0)
        words = [f"{key}={value}" for key, value in common.items()]
        summary = deployment.run("all", *words, "num-server-rounds=2")
        assert (summary["status"], summary["dropped"]) == ("completed", {})
        settings: dict[str, Any] = {key.replace("-", "_"): value for key, value in common.items()}
        settings["secure_aggregation"] = True
        reference = posy.run(**settings, num_server_rounds=2, output_dir=str(tmp_path / "here"))
        expected = load_arrays(reference.models / "server.safetensors")
        actual = load_arrays(deployment.results("all") / "models/server.safetensors")
        assert actual.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array, err_msg=name)

        deployment.submit("cut", *words, "num-server-rounds=3", "round-timeout=30", "min-clients=2")
        deployment.until(lambda: deployment.rounds("cut"), "run-cut", 200.0)
        deployment.kill("node-2")
        assert deployment.processes["run-cut"].wait(400.0) == 0, deployment.log("run-cut")
        rows = deployment.rounds("cut")
        assert [row["round"] for row in rows] == [1, 2, 3]
        assert {drop["client"] for row in rows for drop in row["dropped"]} == {2}
        assert "the round fails" not in deployment.log("run-cut")
    finally:
        deployment.stop()
