"""Folding of message content into few parts."""

import time

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from posy import folding
from posy.client_app.app import app
from posy.flower import PING, Array, failure, record_of
from posy.folding import fold, folded, is_folded, unfold, unfolded

ARRAYS = {
    "large": np.arange(40_000, dtype=np.float64).reshape(200, 200).T,
    "small": np.array([1.5, -2.0], np.float32),
    "scalar": np.array(7),
    "empty": np.zeros((0, 3), np.float32),
    "largest": np.random.default_rng(0).standard_normal(600_000, dtype=np.float32),
}


def content(**changed: np.ndarray) -> RecordDict:
    metrics = MetricRecord({"train-loss": 0.25, "num-examples": 3, "curve": [0.5, 1.0]})
    config = ConfigRecord({"client": 1, "round": 2, "settings": "{}", "yes": True, "raw": b"\x00\xff"})
    return RecordDict({"arrays": record_of({**ARRAYS, **changed}), "metrics": metrics, "config": config})


def over_the_wire(record: RecordDict) -> RecordDict:
    """Return a record after Flower has deflated and inflated it."""
    objects = {name: thing.deflate() for name, thing in get_all_nested_objects(record).items()}
    return inflate_object_from_contents(record.object_id, objects)


def test_unfold_restores_the_content() -> None:
    record = content()
    restored = unfold(over_the_wire(fold(record)))
    assert list(restored) == list(record)
    assert (restored["metrics"], restored["config"]) == (record["metrics"], record["config"])
    assert list(restored.array_records["arrays"]) == list(ARRAYS)
    for name, array in restored.array_records["arrays"].items():
        np.testing.assert_array_equal(array.numpy(), ARRAYS[name])
        assert array.numpy().dtype == ARRAYS[name].dtype
        assert array.data == record.array_records["arrays"][name].data


def test_folded_content_has_few_parts_below_2_megabytes() -> None:
    parts = get_all_nested_objects(fold(content()))
    # The record, all small entries, one piece of `large`, and two of `largest` (2.4 MB).
    assert len(parts) == 5
    assert max(len(part.deflate()) for part in parts.values()) < 1_850_000
    assert len(get_all_nested_objects(content())) == 2 * len(ARRAYS) + 4


def test_clients_share_the_pieces_of_a_common_array() -> None:
    shared = Array(ARRAYS["largest"])
    first, second = (
        fold(RecordDict({"arrays": record_of({"model": shared}), "of": ConfigRecord({"c": c})})) for c in "ab"
    )
    assert [first[name] is second[name] for name in first] == [False, True, True]


def test_fold_is_deterministic() -> None:
    assert fold(content()).object_id == fold(content()).object_id


def test_client_app_folds_replies_to_folded_messages() -> None:
    context = Context(1, 2, {}, RecordDict(), {})
    metadata = Metadata(1, "m", SUPERLINK_NODE_ID, 2, "", "1", time.time(), 100.0, "query")
    plain = make_message(metadata, RecordDict({"config": ConfigRecord({PING: True})}))
    assert not is_folded(app(plain, context))
    request = folded(plain)
    reply = app(request, context)
    assert is_folded(request)
    assert is_folded(reply)
    assert unfold(reply.content) == RecordDict()
    assert reply.metadata.reply_to_message_id == "m"


def test_malformed_folded_reply_becomes_an_error() -> None:
    metadata = Metadata(1, "r", 2, SUPERLINK_NODE_ID, "m", "1", time.time(), 100.0, "train")
    reply = make_message(metadata, RecordDict({folding.REST: ConfigRecord({folding.REST: [1, 2]})}))
    assert "malformed reply: TypeError" in failure(unfolded(reply).error)
    assert unfolded(reply).metadata.reply_to_message_id == "m"
    message = make_message(metadata, content())
    assert unfolded(message) is message
    assert unfolded(folded(message)).content["metrics"] == message.content["metrics"]


@pytest.mark.parametrize("wrong", [{folding.REST: b"\xff\xff"}, {folding.REST: "text"}, {}])
def test_unfold_rejects_other_content(wrong: dict[str, bytes | str]) -> None:
    with pytest.raises(Exception, match=r"."):
        unfold(RecordDict({folding.REST: ConfigRecord(wrong)}))


def test_missing_or_invalid_piece_raises() -> None:
    record = fold(content())
    del record["arrays/largest/1"]
    with pytest.raises(ValueError, match=r"reshape|EOF|read"):
        unfold(record).array_records["arrays"]["largest"].numpy()
    record = fold(RecordDict({"arrays": ArrayRecord({"model": FlowerArray(ARRAYS["large"])})}))
    record["arrays/model/0"] = ConfigRecord({"": [1, 2]})
    with pytest.raises((ValueError, EOFError)):
        unfold(record).array_records["arrays"]["model"].numpy()
