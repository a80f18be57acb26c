"""Labels and statistics of sites with secure aggregation: the server learns only sums over all sites."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import POLICY, NodeGrid

from posy.commands.deploy.certificates import make_certificates
from posy.data.agreement import Description, agreed, with_statistics
from posy.data.errors import DataError
from posy.data.pooled import CELLS, NAME_BYTES, WORD_BITS, count_of, numbers_of, pooled
from posy.data.settings import DataSettings
from posy.data.sites import describe_site, read_site
from posy.data.values import moments
from posy.server_app.app import run
from posy.settings import SettingsError

SECURE = {"secure-aggregation": True}
OPEN = DataSettings(dataset="sites", sample_kind="features", input_shape="2", classes="0,1")
EMPTY = np.empty(0)


def sum_columns(*sites: list[int]) -> list[int]:
    return [sum(column) for column in zip(*sites, strict=True)]


def test_mean_and_squares_by_hand() -> None:
    """With the values 1, 3 and -5, the mean is -1/3 and the squared deviations are 1.78 + 11.11 + 21.78."""
    first = numbers_of(None, 2, np.array([2.0]), np.array([2.0]))
    second = numbers_of(None, 1, np.array([-5.0]), np.array([0.0]))
    assert len(first) == count_of(1, classes=False) and all(0 <= n < 2**WORD_BITS for n in first + second)
    both = pooled(sum_columns(first, second), 1, classes=False)
    assert (both.sites, both.count, both.classes) == (2, 3, {})
    assert both.mean.tolist() == [-1 / 3]
    assert both.squares.tolist() == [pytest.approx(35 - 1 / 3, rel=1e-15)]


@pytest.mark.parametrize("centre", [0.0, 1.0, -1e6, 1e12, 3e38, 1e-30])
@pytest.mark.parametrize("spread", [1.0, 1e-9])
def test_masked_sums_give_the_statistics_of_all_rows(centre: float, spread: float) -> None:
    """The sums lose no digits, even if the deviation is far smaller than the mean."""
    rng = np.random.default_rng(5)
    scale = spread * (abs(centre) or 1)
    sites = [rng.normal(centre, scale, (n, 3)).clip(-3.4e38, 3.4e38) for n in (7, 40, 300)]
    parts = [(len(x), *moments(x)) for x in sites]
    sums = pooled(sum_columns(*(numbers_of(None, *part) for part in parts)), 3, classes=False)
    descriptions = [Description("features", (3,), True, (), *part) for part in parts]
    settings = DataSettings(dataset="sites", input_shape="3")
    plain, masked = with_statistics(settings, descriptions), with_statistics(settings, [sums])
    for key, tolerance in (("feature_mean", 1e-15), ("feature_std", 1e-12)):
        expected, actual = ([float(word) for word in getattr(s, key).split(",")] for s in (plain, masked))
        np.testing.assert_allclose(actual, expected, rtol=tolerance)


@pytest.mark.parametrize("value", [0.0, 0.1, -7e-20, 123456.789, 3.4e38])
def test_constant_feature_has_its_value_and_zero_deviation(value: float) -> None:
    sites = [(n, *moments(np.full((n, 1), value))) for n in (5, 11, 10**6)]
    sums = pooled(sum_columns(*(numbers_of(None, *part) for part in sites)), 1, classes=False)
    assert sums.mean.tolist() == [value] and sums.squares.tolist() == [0.0]


@pytest.mark.parametrize("count", [0, 1, 2, 30, 300, 550])
def test_pooled_sum_gives_labels_with_their_site_counts(count: int) -> None:
    draw = random.Random(count)
    names = [f"Größe {i}" * draw.randint(1, 5) for i in range(count)] + ["x" * NAME_BYTES]
    sites = [draw.sample(names, draw.randint(0, len(names))) for _ in range(20)]
    sums = pooled(sum_columns(*(numbers_of(site, 1, EMPTY, EMPTY) for site in sites)), 0, classes=True)
    assert sums.classes == {n: k for n in names if (k := sum(n in site for site in sites))}
    assert sums.sites == 20


def test_too_many_labels_and_long_labels_are_errors() -> None:
    with pytest.raises(SettingsError, match=r"too many labels .* set classes"):
        pooled(numbers_of([str(n) for n in range(2 * CELLS)], 1, EMPTY, EMPTY), 0, classes=True)
    with pytest.raises(DataError, match="a label or a category has 121 bytes") as caught:
        numbers_of(["x" * 121], 1, EMPTY, EMPTY)
    assert caught.value.shared(10).startswith("a label or a category is too long")
    with pytest.raises(DataError, match="too large for a masked sum"):
        numbers_of(None, 10**9, np.array([1e200]), np.array([0.0]))


def test_corrupted_sums_are_rejected() -> None:
    """A site can send any numbers."""
    rng = random.Random(3)
    honest = numbers_of(["a", "b"], 1, EMPTY, EMPTY)
    for _ in range(30):
        corruption = [rng.choice((0, 1, 2, rng.getrandbits(64))) if rng.random() < 0.02 else 0 for _ in honest]
        with pytest.raises(SettingsError, match="too many labels"):
            pooled(sum_columns(honest, corruption), 0, classes=True)


def test_sums_over_no_rows_are_an_error() -> None:
    with pytest.raises(SettingsError, match="over no rows"):
        pooled([1, 0, *[0] * 17], 1, classes=False)


def test_label_of_a_single_site_needs_confirmation() -> None:
    site = Description("features", (2,), True, (), 1, EMPTY, EMPTY)

    def pool(data: DataSettings, names: list[str]) -> Any:
        sums = sum_columns(*(numbers_of(c, 9, np.zeros(2), np.ones(2)) for c in (["0", "1"], ["0", "1"], ["0", "no"])))
        return pooled(sums, 2, classes=True)

    with pytest.raises(SettingsError, match=r"only one site has: 'no'\..*classes='0,1,no'"):
        agreed(DataSettings(dataset="sites"), [site] * 3, ["a", "b", "c"], pool)


# -- runs --------------------------------------------------------------------------------------------------


def hospital(root: Path, name: str, labels: list[Any], seed: int, rows: int = 60, **columns: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    values = {"age": rng.normal(55, 9, rows).round(), "chol": rng.normal(240 + 5 * seed, 50, rows).round(1), **columns}
    lines = [[*row, labels[i % len(labels)]] for i, row in enumerate(zip(*values.values(), strict=True))]
    text = "\n".join([",".join([*values, "num"]), *(",".join(map(str, line)) for line in lines)])
    (root / f"{name}.csv").write_text(text + "\n", encoding="utf-8")
    return {"data": str(root / f"{name}.csv"), "name": name}


@pytest.fixture
def hospitals(tmp_path: Path) -> list[dict[str, Any]]:
    names = ("cleveland", "hungary", "va", "zurich")
    return [hospital(tmp_path, name, ["well", "ill"], seed, 40 + 20 * seed) for seed, name in enumerate(names)]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "dataset": "sites", "num-clients": 4, "num-server-rounds": 1, "method": "fedavg", "model": "linear",
        "device": "cpu", "stack": "loop", "local-epochs": 1, "output-dir": str(tmp_path / "runs"), "join-timeout": 2.0,
    }  # fmt: skip


class Server(NodeGrid):
    """A server that stores all queries with their replies, and may change a query before sending it."""

    def __init__(self, *configs: Any, change: Any = lambda message, config: None) -> None:
        super().__init__(*configs)
        self.change, self.exchanges = change, list[tuple[Any, Message]]()

    def answer(self, message: Message) -> Message:
        config = message.content.config_records["config"]
        self.change(message, config)
        reply = super().answer(message)
        self.exchanges.append((config, reply))
        return reply

    def answers(self, **entries: Any) -> list[Any]:
        """Return the answers to the queries with these entries."""
        return [
            reply.content.config_records["config"] if reply.has_content() else reply.error.reason
            for config, reply in self.exchanges
            if all(config.get(key.replace("_", "-")) == value for key, value in entries.items())
        ]


def test_masked_run_has_the_statistics_of_a_plain_run(hospitals: list[dict[str, Any]], config: dict[str, Any]) -> None:
    plain = run(NodeGrid(*hospitals), config)
    server = Server(*hospitals)
    masked = run(server, config | SECURE)
    a, b = plain.settings.data, masked.settings.data
    assert (a.classes, a.feature_names, a.input_shape) == (b.classes, b.feature_names, b.input_shape)
    for key in ("feature_mean", "feature_std"):
        values = [[float(word) for word in getattr(data, key).split(",")] for data in (a, b)]
        np.testing.assert_allclose(*values, rtol=1e-12)
    assert masked.summary["status"] == "completed" and masked.summary["sites"] == [h["name"] for h in hospitals]
    descriptions = server.answers(describe=True)
    assert len(descriptions) == 4
    for answer in descriptions:
        assert answer["classes"] == [] and answer["mean"] == [] and answer["squares"] == [] and answer["count"] == 1
        assert not {"well", "ill"} & set(map(str, answer.values()))
    words = [np.frombuffer(answer["answer"][0], "<u4") for answer in server.answers(secure_stage="statistics")]
    assert len(words) == 4 and len({word.tobytes() for word in words}) == 4
    for word in words:  # uniform: without masks nearly all words are 0
        assert abs(word.astype(np.float64).mean() / 2**32 - 0.5) < 0.02 and (word == 0).mean() < 0.001


def test_each_site_logs_its_scores_although_the_server_sees_only_sums(
    hospitals: list[dict[str, Any]], config: dict[str, Any], warnings: pytest.LogCaptureFixture
) -> None:
    done = run(NodeGrid(*hospitals), config | SECURE)
    pattern = r"round 1, served model: accuracy (\S+) %, loss (\S+) on (\d+) test samples"
    messages = {id(record): record.getMessage() for record in warnings.records}.values()
    logged = np.array([match.groups() for message in messages if (match := re.fullmatch(pattern, message))], float)
    assert len(logged) == 4
    accuracy, loss = np.average(logged[:, :2], axis=0, weights=logged[:, 2])
    served = done.summary["served"]["last"]
    assert served["mean"] == pytest.approx(accuracy / 100, abs=1e-4)
    assert loss > 0 and served["samples"] == logged[:, 2].sum()


def test_site_with_other_columns_adds_no_statistics(
    hospitals: list[dict[str, Any]], config: dict[str, Any], tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    odd = hospital(tmp_path, "odd", ["well", "ill"], 9, weight=np.ones(60))
    server = Server(*hospitals, odd)
    done = run(server, config | SECURE | {"num-clients": 5, "min-clients": 4})
    assert len(server.answers(secure_stage="statistics")) == 4
    assert "odd: its columns differ from" in warnings.text
    assert sorted(done.strategy.clients) == [0, 1, 3, 4] or sorted(done.strategy.clients) == [0, 1, 2, 3]


def test_statistics_exclude_a_site_that_leaves(
    hospitals: list[dict[str, Any]], config: dict[str, Any], warnings: pytest.LogCaptureFixture
) -> None:
    """A site leaves after it has shared its secrets, and the other sites reconstruct its masks."""

    def make_site_leave(message: Message, entries: Any) -> None:
        if entries.get("secure-stage") == "statistics" and message.metadata.dst_node_id == 2:
            del entries["settings"]

    server = Server(*hospitals, change=make_site_leave)
    done = run(server, config | SECURE)
    assert "hungary does not contribute statistics" in warnings.text
    task = DataSettings(dataset="sites")
    descriptions = [describe_site(read_site(Path(h["data"]), task, POLICY), task, POLICY) for h in hospitals]
    expected = with_statistics(task, [described for i, described in enumerate(descriptions) if i != 1])
    for key in ("feature_mean", "feature_std"):
        values = [[float(word) for word in getattr(data, key).split(",")] for data in (done.settings.data, expected)]
        np.testing.assert_allclose(*values, rtol=1e-12)
    assert done.summary["status"] == "completed"


def test_too_few_sites_are_an_error(hospitals: list[dict[str, Any]], config: dict[str, Any]) -> None:
    def make_two_sites_leave(message: Message, entries: Any) -> None:
        if entries.get("secure-stage") == "statistics" and message.metadata.dst_node_id > 2:
            del entries["settings"]

    with pytest.raises(SettingsError, match=r"2 of 4 clients .* set classes, feature-"):
        run(Server(*hospitals, change=make_two_sites_leave), config | SECURE)


def test_masks_do_not_cancel_after_a_changed_request(hospitals: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """The server asks one site for another column order, to recognise its numbers in the sum."""

    def reorder_columns(message: Message, entries: Any) -> None:
        if entries.get("secure-stage") == "statistics" and message.metadata.dst_node_id == 3:
            entries["settings"] = str(entries["settings"]).replace("age,chol", "chol,age")

    with pytest.raises(SettingsError, match="the masks do not cancel"):
        run(Server(*hospitals, change=reorder_columns), config | SECURE)


def test_site_adds_its_statistics_once_per_run(hospitals: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Two sums with different sites would differ by the numbers of one site."""
    server = Server(*hospitals)
    run(server, config | SECURE)
    [keys] = [
        c
        for c, _ in server.exchanges
        if c.get("secure-stage") == "keys" and c["client"] == 0 and "stat" in c["secure-round"]
    ]
    again = server.answer(Message(RecordDict({"config": ConfigRecord(dict(keys))}), 1, "query"))
    assert "round 0-0-statistics is over" in again.error.reason
    for name in ("0-1-statistics", "1-0-statistics", "0-0-statistics-2"):
        other = ConfigRecord({**keys, "secure-round": name})
        reply = server.answer(Message(RecordDict({"config": other}), 1, "query"))
        assert "is not the name of a round" in reply.error.reason


def test_site_with_trusted_keys_requires_secure_aggregation(
    hospitals: list[dict[str, Any]], config: dict[str, Any], tmp_path: Path
) -> None:
    make_certificates(tmp_path / "keys", [], [h["name"] for h in hospitals], 1)
    signed = [
        h | {"signing-key": str(tmp_path / "keys" / f"{h['name']}.key"), "trusted-keys": str(tmp_path / "keys")}
        for h in hospitals
    ]
    with pytest.raises(SettingsError, match="secure-aggregation = true"):
        run(NodeGrid(*signed), config)
    done = run(Server(*signed), config | SECURE)
    assert done.summary["status"] == "completed"
