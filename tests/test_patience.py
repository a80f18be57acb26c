"""Early stopping on the validation splits."""

from collections.abc import Callable
from typing import Any

import pytest

import posy
from posy.server_app.app import run
from posy.server_app.recorder import Recorder
from posy.settings import SettingsError
from posy.spread import Evaluation, Spread, evaluations_since_best
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]
STOPS = {"validation_fraction": 0.4, "num_server_rounds": 12, "patience": 2, "lr": 0.5, "model": "linear"}


def evaluation(server_round: int, mean: float, clients: int = 10) -> Evaluation:
    values = dict.fromkeys(("std", "min", "max", "tenth", "weighted", "jain"))
    return Evaluation(server_round, Spread(mean=mean, clients=clients, **values))  # type: ignore[typeddict-item]


def test_evaluations_since_the_best_by_hand() -> None:
    scores = [evaluation(2, 0.5), evaluation(4, 0.8), evaluation(6, 0.8), evaluation(8, 0.7)]
    assert [evaluations_since_best(scores[:n]) for n in range(5)] == [0, 0, 0, 1, 2]
    assert evaluations_since_best(scores, lower_is_better=True) == 3
    assert evaluations_since_best([evaluation(1, 0.9, clients=2), *scores]) == 2  # a small cohort is not the best


@pytest.mark.parametrize("more", [{}, {"secure_aggregation": True}, {"evaluate_every": 2}, {"metric": "macro-f1"}])
def test_the_run_stops_when_the_validation_score_does_not_improve(
    make_config: MakeConfig, more: dict[str, Any]
) -> None:
    config = make_config("fedavg", **STOPS, **more)
    recorder = run(None, config)
    entry, rounds = recorder.summary["stopped-early"], recorder.summary["rounds"]
    assert entry["patience"] == 2 and rounds == entry["after"] + 1 < 12
    rows = posy.load(recorder.directory.path).rounds
    column = f"served_validation_{config.get('metric', 'accuracy').replace('-', '_')}_mean"
    scores = dict(zip(rows["round"], rows[column], strict=True))
    scores = {number: score for number, score in scores.items() if score == score}
    best = max((number for number in scores if number <= entry["after"]), key=lambda number: (scores[number], -number))
    after = [number for number in scores if best < number <= entry["after"]]
    assert len(after) == 2 and after[-1] == entry["after"]
    assert rounds in scores  # the last round is evaluated
    assert more.get("secure_aggregation") or recorder.summary["pooled"]["served"]["samples"] == 19
    endless = run(None, config | {"patience": 0, "run-name": "endless", "num-server-rounds": rounds})
    for point in ("served", "local"):
        assert endless.summary[point] == recorder.summary[point]


def test_patience_without_validation_scores_is_reported(make_config: MakeConfig, tiny: Any) -> None:
    x, y, train, test = tiny
    of_one_class = [[i for i in part if y[i] == y[part[0]]] for part in train]
    config = make_config("fedavg", data=(x, y, of_one_class, test), metric="auroc", **STOPS | {"num_server_rounds": 3})
    summary = run(None, config).summary
    assert [notice for notice in summary["notices"] if notice.startswith("patience = 2")]
    assert "stopped-early" not in summary and summary["rounds"] == 3


def test_the_test_split_does_not_decide(make_config: MakeConfig, tiny: Any) -> None:
    x, y, train, test = tiny
    other = [list(part[:1]) for part in test]
    ends = [
        run(None, make_config("fedavg", data=(x, y, train, t), **STOPS)).summary["stopped-early"] for t in (test, other)
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("after", [1, 0])
def test_a_resumed_run_stops_in_the_same_round(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    config = make_config("fedavg", **STOPS, checkpoint_every=1)
    whole = run(None, config).summary
    finish = Recorder.finish_round

    def stop(self: Recorder, server_round: int, *arguments: object) -> None:
        finish(self, server_round, *arguments)
        if server_round == whole["stopped-early"]["after"] - after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "finish_round", stop)
        with pytest.raises(KeyboardInterrupt):
            run(None, config | {"run-name": "stopped"})
    resume = {"resume": "stopped", "output-dir": config["output-dir"]}
    resumed = run(None, resume).summary
    for key in ("stopped-early", "rounds", "served", "local"):
        assert resumed[key] == whole[key]
    with pytest.raises(SettingsError, match="patience has ended it"):
        run(None, resume)


@pytest.mark.parametrize(
    "more",
    [
        {"lr-schedule": "cosine"},
        {"method": "ppfe"},
        {"dp": "local", "dp-clip": 1.0},
        {"validation-fraction": 0.0},
    ],
)
def test_patience_is_refused_where_it_cannot_act(more: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="patience = 3"):
        read_settings({"method": "fedavg", "validation-fraction": 0.2, "patience": 3, **more})
