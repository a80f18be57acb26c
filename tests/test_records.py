"""Records that Posy fills have exactly the entries that Flower would store."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from posy.flower import content_of, record_of, with_entries

ENTRIES = {"flag": True, "count": 3, "rate": 0.5, "text": "a", "bytes": b"b", "list": ["a", "b"], "none": []}


def test_a_filled_record_equals_flowers():
    common = ConfigRecord({"text": "old", "more": 1})
    record = with_entries(common, ENTRIES)
    assert record == ConfigRecord({"text": "old", "more": 1, **ENTRIES})
    assert common == ConfigRecord({"text": "old", "more": 1})  # unchanged
    assert record.deflate() == ConfigRecord({"text": "old", "more": 1, **ENTRIES}).deflate()


@pytest.mark.parametrize(
    ("record", "value"),
    [(ConfigRecord(), None), (ConfigRecord(), {"a": 1}), (ConfigRecord(), [1, "a"]), (MetricRecord(), "a")],
)
def test_values_that_flower_refuses_are_refused(record, value):
    with pytest.raises(TypeError):
        with_entries(record, {"good": 1, "bad": value})


def test_a_content_holds_its_records_by_reference():
    arrays, config = record_of({"0": np.arange(3.0)}), ConfigRecord({"client": 1})
    content = content_of(arrays=arrays, config=config)
    assert content == RecordDict({"arrays": arrays, "config": config})
    assert content["arrays"] is arrays
