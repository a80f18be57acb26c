"""PPFE: stages, reduction, reweighting and ensemble worked by hand, and the stages of clients that lose replies."""

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from posy.client_app.ppfe import reweight, sparsity_mask
from posy.client_app.predictors import Member, Predictor
from posy.client_app.workspace import Workspace
from posy.data.task import Task
from posy.models.architecture import Architecture
from posy.server_app.in_process import InProcessGrid
from posy.server_app.system import stored_probabilities
from posy.settings import SettingsError
from posy.strategies.pictures.ppfe import draw
from posy.strategies.ppfe import open_stage, plan_stages, stage_rounds
from posy.strategies.registry import read_settings

# For the paper's network of five layers: conv1, conv2, fc1, fc2, head.
PICTURES = (
    np.random.default_rng(0).normal(size=(12, 16, 16)).astype(np.float32),
    np.arange(12) % 3,
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[8, 9], [10, 11]],
)


def probabilities(stage, flat, x):
    """Return the class probabilities of a fresh module with the parameters ``flat``."""
    model = stage.architecture.build()
    model.load_state_dict(stage.architecture.layout.views(torch.as_tensor(flat)))
    with torch.no_grad():
        return model.eval()(x).softmax(dim=1).numpy().astype(np.float64)


def close(client, stage, shared):
    """Let a client receive the shared layers of a finished stage and close the stage."""
    client.stored[f"finished-{stage.number}"] = shared
    client.jobs.drive(client.close_stage(stage, shared))


# -- stages --------------------------------------------------------------------------------------------


def test_stages_of_the_papers_network(make_strategy):
    """The last t - 1 layers are personal, with ranks (100, 50, 24), then (80, 40, 16), each capped.

    The largest ranks that save parameters are (192 - 1) // 67 = 2 for the head (64 -> 3), and 41 for fc2 (120 -> 64)
    and fc1 (64 -> 120). Only fc2 has the listed rank, 40.
    """
    stages = make_strategy("ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=16).stages
    assert [s.rounds for s in stages] == [3, 5, 4, 4]
    assert [s.personal for s in stages] == [(), ("head",), ("fc2", "head"), ("fc1", "fc2", "head")]
    assert [s.newly for s in stages] == [(), ("head",), ("fc2",), ("fc1",)]
    assert [dict(s.architecture.ranks) for s in stages] == [
        {},
        {"head": 2},
        {"head": 2, "fc2": 40},
        {"head": 2, "fc2": 40, "fc1": 41},
    ]


def test_each_stage_takes_the_next_list_of_ranks(make_strategy):
    stages = make_strategy(
        "ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=4, ppfe_ranks="9,8,1;7,6,5;4,3,2"
    ).stages
    assert dict(stages[-1].architecture.ranks) == {"head": 1, "fc2": 6, "fc1": 4}


def test_a_short_list_of_ranks_applies_to_the_last_layers(make_strategy):
    stages = make_strategy("ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=4, ppfe_ranks="5,2").stages
    assert dict(stages[-1].architecture.ranks) == {"head": 2, "fc2": 5}  # fc1 stays dense


def test_shared_fractions_on_cifar100(make_config):
    """Section 6.3.3: 98.8, 83.8 and 19.5 % of FedRep's 1,075,044 parameters, with rank 200 of the first layer.

    Stage 2 keeps the dense head, 12,900, on the client. Stage 3 shares the convolutions, 209,792, and the factors of
    the first fully connected layer, 200 · (3200 + 256) + 256 = 691,456. Stage 4 shares the convolutions.
    """
    hundred = Architecture("cnn-3fc-wide", Task("image", (3, 32, 32), tuple(map(str, range(100)))))
    config = make_config("ppfe", num_server_rounds=160, ppfe_reduction="svd-fedavg", ppfe_ranks="200,100,48;160,80,32")
    stages = plan_stages(read_settings(config), hundred)
    assert [stage.shared_part.size for stage in stages] == [1_075_044, 1_062_144, 901_248, 209_792]
    parts = [round(100 * stage.shared_part.size / 1_075_044, 1) for stage in stages]
    assert parts == [100.0, 98.8, 83.8, 19.5]
    assert [dict(stage.architecture.ranks) for stage in stages] == [
        {},
        {},
        {"fc1": 200, "fc2": 85, "head": 48},  # 86 · (256 + 128) is more than 256 · 128
        {"fc1": 160, "fc2": 80, "head": 32},
    ]


def test_svd_fedavg_reduces_dense_layers_from_stage_3_on(make_strategy):
    """All fully connected layers are reduced from stage 3 on, by the first list and then the second (A.3, A.4)."""
    stages = make_strategy(
        "ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=5, ppfe_stages=5, ppfe_reduction="svd-fedavg"
    ).stages
    assert [s.personal for s in stages[2:]] == [
        ("fc2", "head"),
        ("fc1", "fc2", "head"),
        ("conv2", "fc1", "fc2", "head"),
    ]
    assert [s.restarted for s in stages] == [(), (), *[("fc1", "fc2", "head")] * 3]
    # 64 · 120 / 184, 120 · 64 / 184 and 64 · 3 / 67: ranks up to 41, 41 and 2 save parameters.
    second = {"fc1": 41, "fc2": 40, "head": 2}
    assert [dict(s.architecture.ranks) for s in stages] == [{}, {}, {"fc1": 41, "fc2": 41, "head": 2}, second, second]


def test_network_with_few_layers_has_fewer_stages(make_strategy):
    stages = make_strategy("ppfe").stages
    assert [s.personal for s in stages] == [(), ("head",), ("fc2", "head")]  # one layer is always shared
    assert sum(s.rounds for s in stages) == 3


@pytest.mark.parametrize("reduction", ["sparse", "none"])
def test_without_factorisation_all_stages_have_the_same_network(make_strategy, reduction):
    strategy = make_strategy("ppfe", ppfe_reduction=reduction)
    assert {s.architecture for s in strategy.stages} == {strategy.architecture}


@pytest.mark.parametrize(("head", "personal"), [(1, ("head",)), (2, ("fc2", "head")), (3, ("fc1", "fc2", "head"))])
def test_fixed_heads_are_personal_from_stage_2_on(make_strategy, head, personal):
    """Ablations M1, M2, M3 and WP: the same layers are personal from stage 2 on."""
    stages = make_strategy("ppfe", ppfe_fixed_head=head, num_server_rounds=8).stages
    assert [s.personal for s in stages] == [(), personal, personal, personal]
    assert [s.newly for s in stages] == [(), personal, (), ()]


def test_fixed_head_deeper_than_the_network_is_an_error(make_strategy):
    with pytest.raises(SettingsError, match="ppfe-fixed-head = 4"):
        make_strategy("ppfe", ppfe_fixed_head=4)


def test_rounds_of_the_stages():
    assert stage_rounds("", 4, 160) == [30, 50, 40, 40]
    assert stage_rounds("", 4, 16) == [3, 5, 4, 4]
    assert stage_rounds("10,20,10,10", 4, 50) == [10, 20, 10, 10]
    assert stage_rounds("", 1, 7) == [7]
    for stages, total in itertools.product(range(1, 7), range(1, 40)):
        if total >= stages:
            rounds = stage_rounds("", stages, total)
            assert len(rounds) == stages and sum(rounds) == total and min(rounds) >= 1


@pytest.mark.parametrize(
    ("text", "stages", "total"), [("10,20", 3, 30), ("10,20", 2, 31), ("", 4, 3), ("a,b", 2, 2), ("0,2", 2, 2)]
)
def test_invalid_stage_rounds_are_errors(text, stages, total):
    with pytest.raises(SettingsError, match=r"(ppfe-stage|num-server)-rounds (=|contains)"):
        stage_rounds(text, stages, total)


# -- reduction -----------------------------------------------------------------------------------------


def test_factorising_a_layer_of_that_rank_preserves_its_outputs(make_strategy):
    """The weights of head (64 -> 3) have rank 2, and of fc2 (128 -> 64) rank 40, so the factors are exact."""
    strategy = make_strategy("ppfe")
    first, second, third = strategy.stages
    rng = np.random.default_rng(0)
    flat = torch.from_numpy(strategy.initial())
    views = first.architecture.layout.views(flat)
    for name, (rows, rank, columns) in {"head": (3, 2, 64), "blocks.fc2.linear": (64, 40, 128)}.items():
        product = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)) / math.sqrt(rank * columns)
        views[f"{name}.weight"].copy_(torch.from_numpy(product))
    x = torch.from_numpy(rng.normal(size=(20, 6)).astype(np.float32))
    second_flat = open_stage(first, second, flat)
    third_flat = open_stage(second, third, second_flat)
    expected = probabilities(first, flat, x)
    np.testing.assert_allclose(probabilities(second, second_flat, x), expected, atol=1e-5)
    np.testing.assert_allclose(probabilities(third, third_flat, x), expected, atol=1e-5)
    assert len(flat) > len(second_flat) > len(third_flat)


def test_factorisation_is_optimal_and_changes_no_other_layer(make_strategy):
    """The error of the head is its third singular value (Eckart-Young)."""
    strategy = make_strategy("ppfe")
    first, second, _ = strategy.stages
    flat = torch.from_numpy(strategy.initial())
    old = first.architecture.layout.views(flat)
    new = second.architecture.layout.views(open_stage(first, second, flat))
    product = (new["head.up.weight"] @ new["head.down.weight"]).numpy()
    dropped = np.linalg.svd(old["head.weight"].numpy())[1][2]
    assert np.linalg.norm(product - old["head.weight"].numpy()) == pytest.approx(dropped, rel=1e-4)
    np.testing.assert_array_equal(new["head.up.bias"], old["head.bias"])
    for name in ("blocks.fc1.linear.weight", "blocks.fc1.linear.bias", "blocks.fc2.linear.weight"):
        np.testing.assert_array_equal(new[name], old[name])


def low_rank(weight, rank):
    u, s, vh = np.linalg.svd(np.asarray(weight, np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


OF_FEDAVG = {"ppfe_reduction": "svd-fedavg", "ppfe_ranks": "20,10,2;10,5,1"}
"""For :data:`PICTURES`, whose fully connected layers are 64 -> 120 -> 64 -> 3."""


def test_later_stages_start_from_stage_1s_shared_layers(make_strategy, update):
    """Convolutions continue from the previous stage. A shared fully connected layer is stage 1's, reduced (A.4)."""
    strategy = make_strategy(
        "ppfe", data=PICTURES, model="cnn-3fc", ppfe_stage_rounds="1,1,1,1", num_server_rounds=4, **OF_FEDAVG
    )
    first, second, third, fourth = strategy.stages
    rng = np.random.default_rng(0)
    sent = [rng.normal(size=stage.shared_part.size).astype(np.float32) for stage in strategy.stages]
    strategy.aggregate(1, [update(0, {"model": sent[0]}, 4)])
    np.testing.assert_array_equal(strategy.model, second.shared_part.take(sent[0]))  # dense, as FedAvg left it
    strategy.aggregate(2, [update(0, {"model": sent[1]}, 4)])
    plain, before = (
        first.architecture.layout.views(sent[0]),
        second.architecture.layout.views(
            second.shared_part.put(np.zeros(second.architecture.layout.size, np.float32), sent[1])
        ),
    )
    served = third.architecture.layout.views(
        third.shared_part.put(np.zeros(third.architecture.layout.size, np.float32), strategy.model)
    )
    for name in ("blocks.conv1.conv.weight", "blocks.conv2.conv.weight", "blocks.conv2.conv.bias"):
        np.testing.assert_array_equal(served[name], before[name])
    product = served["blocks.fc1.linear.up.weight"] @ served["blocks.fc1.linear.down.weight"]
    np.testing.assert_allclose(product, low_rank(plain["blocks.fc1.linear.weight"], 20), atol=1e-4)
    np.testing.assert_array_equal(served["blocks.fc1.linear.up.bias"], plain["blocks.fc1.linear.bias"])
    strategy.aggregate(3, [update(0, {"model": sent[2]}, 4)])
    np.testing.assert_array_equal(
        strategy.model,
        fourth.shared_part.take(
            fourth.shared_part.put(
                np.zeros(fourth.architecture.layout.size, np.float32), sent[2][: fourth.shared_part.size]
            )
        ),
    )


def test_later_stages_start_from_stage_1s_personal_layers(make_client):
    """Stages 3 and 4 of the client use neither its head of stage 2 nor the shared layers of stage 2."""
    client = make_client("ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=4, **OF_FEDAVG)
    rng = np.random.default_rng(0)
    sent = [torch.from_numpy(rng.normal(size=s.shared_part.size).astype(np.float32)) for s in client.stages]
    plain = client.stages[0].architecture.layout.views(sent[0])
    close(client, client.stages[0], sent[0])
    np.testing.assert_array_equal(client.state["personal-2"], client.stages[1].personal_part.take(sent[0]))
    for stage, ranks in (
        (3, {"blocks.fc2.linear": 10, "head": 2}),
        (4, {"blocks.fc1.linear": 10, "blocks.fc2.linear": 5, "head": 1}),
    ):
        before, after = client.stages[stage - 2 : stage]
        client.stored[f"personal-{before.number}"] = torch.ones(before.personal_part.size)
        close(client, before, sent[stage - 2])
        flat = client.stage_model(after, sent[stage - 1])
        views = after.architecture.layout.views(flat)
        for name, rank in ranks.items():
            product = (views[f"{name}.up.weight"] @ views[f"{name}.down.weight"]).numpy()
            np.testing.assert_allclose(product, low_rank(plain[f"{name}.weight"], rank), atol=1e-4)
            np.testing.assert_array_equal(views[f"{name}.up.bias"], plain[f"{name}.bias"])
        assert torch.equal(after.shared_part.take(flat), sent[stage - 1])


def test_factors_of_sufficient_rank_preserve_stage_1s_layers(make_strategy):
    """Factors of sufficient rank keep the function: FedAvg's layers on the convolutions of stage 2."""
    strategy = make_strategy("ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=4, **OF_FEDAVG)
    first, second, third, _ = strategy.stages
    fedavg = torch.from_numpy(strategy.initial())
    views = first.architecture.layout.views(fedavg)
    for name, rank in {"blocks.fc1.linear": 20, "blocks.fc2.linear": 10, "head": 2}.items():
        views[f"{name}.weight"].copy_(torch.from_numpy(low_rank(views[f"{name}.weight"], rank)))
    trained = fedavg + 0.1
    expected = first.architecture.layout.part(["conv1", "conv2"]).put(
        fedavg.clone(), first.architecture.layout.part(["conv1", "conv2"]).take(trained)
    )
    begun = open_stage(second, third, trained, fedavg)
    x = torch.from_numpy(PICTURES[0])[:, None] / 5
    np.testing.assert_allclose(probabilities(third, begun, x), probabilities(first, expected, x), atol=1e-5)
    assert len(begun) < len(fedavg)


def test_convolutions_are_not_factorised(make_strategy):
    stages = make_strategy("ppfe", data=PICTURES, model="cnn-3fc", num_server_rounds=4).stages
    shapes = [{e.name: e.shape for e in s.architecture.layout.entries if "conv" in e.layer} for s in stages]
    assert len(shapes[0]) == 4 and all(s == shapes[0] for s in shapes)


def test_sparsity_mask_by_layer(make_strategy):
    """The mask drops 30 % of the first personal layer's weights and 10 % of each later one's, but no bias."""
    strategy = make_strategy("ppfe", ppfe_reduction="sparse")
    seed = strategy.settings.run.seed
    layout = strategy.architecture.layout
    second, third = (layout.views(sparsity_mask(strategy.stages, number, seed)) for number in (2, 3))
    masked = {name: int((view == 0).sum()) for name, view in third.items()}
    assert masked == {
        "blocks.fc1.linear.weight": 0,
        "blocks.fc1.linear.bias": 0,
        "blocks.fc2.linear.weight": round(0.1 * 8192),
        "blocks.fc2.linear.bias": 0,
        "head.weight": round(0.3 * 192),
        "head.bias": 0,
    }
    np.testing.assert_array_equal(second["head.weight"], third["head.weight"])
    assert bool((second["blocks.fc2.linear.weight"] == 1).all())
    other = layout.views(sparsity_mask(strategy.stages, 2, seed + 1))
    assert not torch.equal(second["head.weight"], other["head.weight"])


def test_sparsity_mask_of_a_deep_fixed_head(make_strategy):
    """All layers of the head become personal in the first personal stage, so the mask drops 30 % of each."""
    strategy = make_strategy("ppfe", ppfe_reduction="sparse", ppfe_fixed_head=2, num_server_rounds=4)
    views = strategy.architecture.layout.views(sparsity_mask(strategy.stages, 3, 0))
    assert int((views["head.weight"] == 0).sum()) == 58 and int((views["blocks.fc2.linear.weight"] == 0).sum()) == 2458


def test_masked_weights_are_the_same_on_all_clients_and_stay_zero(make_config, federate):
    config = make_config("ppfe", ppfe_reduction="sparse", momentum=0.9, weight_decay=0.1)
    finished = federate(config)
    stages, seed = finished.strategy.stages, finished.strategy.settings.run.seed
    for stage in stages[1:]:
        mask = stage.personal_part.take(sparsity_mask(stages, stage.number, seed)).numpy()
        for client in range(4):
            personal = finished.kept(client)[f"personal-{stage.number}"]
            assert (personal[mask == 0] == 0).all()
            assert (personal[mask == 1] != 0).all()


# -- reweighting ---------------------------------------------------------------------------------------


def test_reweight_by_hand():
    """ε = 1/4 gives β = ½ log 3, so the wrong sample's weight grows by √3."""
    beta, new = reweight(torch.tensor([1.0, 0, 0, 0]), torch.ones(4), 10, "adaboost")
    root = math.sqrt(3)
    assert beta == pytest.approx(math.log(3) / 2, rel=1e-6)
    np.testing.assert_allclose(new, np.array([root, 1, 1, 1]) * 4 / (root + 3), rtol=1e-6)


def test_reweight_starts_from_the_current_weights():
    """ε = (2 + 0.5) / 4 = 5/8: β = ½ log(3/5) < 0 by the literal rule, ½ log(9 · 3/5) under SAMME."""
    losses, weights = torch.tensor([1.0, 0, 1, 0]), torch.tensor([2.0, 1, 0.5, 0.5])
    for rule, expected in (("adaboost", 0.5 * math.log(3 / 5)), ("samme", 0.5 * math.log(27 / 5))):
        beta, new = reweight(losses, weights, 10, rule)
        assert beta == pytest.approx(expected, rel=1e-6)
        factor = math.exp(expected)
        raw = np.array([2 * factor, 1, 0.5 * factor, 0.5])
        np.testing.assert_allclose(new, raw * 4 / raw.sum(), rtol=1e-5)


def test_fractional_losses_count_partially():
    """ε = (0.5 + 0.1) / 2 = 0.3, and ω ∝ exp(β / 2), exp(β / 10)."""
    beta, new = reweight(torch.tensor([0.5, 0.1]), torch.ones(2), 2, "samme")
    assert beta == pytest.approx(0.5 * math.log(7 / 3), rel=1e-5)
    raw = np.exp(beta * np.array([0.5, 0.1]))
    np.testing.assert_allclose(new, raw * 2 / raw.sum(), rtol=1e-5)


def test_samme_floors_beta_at_zero_and_keeps_the_weights():
    """ε = 3/4 with three classes: ½ log(1/3) + ½ log 2 < 0."""
    weights = torch.tensor([0.4, 1.6, 1.0, 1.0])
    beta, new = reweight(torch.tensor([1.0, 1, 0.6, 0.4]), weights, 3, "samme")
    assert beta == 0.0
    np.testing.assert_allclose(new, weights, rtol=1e-6)


@pytest.mark.parametrize("rule", ["adaboost", "adaboost-positive"])
def test_a_stage_below_chance_has_a_negative_or_zero_coefficient(rule):
    """ε = 3/4: β = ½ log(1/3), or 0, which keeps the weights."""
    weights = torch.tensor([0.4, 1.6, 1.0, 1.0])
    beta, new = reweight(torch.tensor([1.0, 1, 0.6, 0.4]), weights, 3, rule)
    expected = 0.5 * math.log(1 / 3) if rule == "adaboost" else 0.0
    raw = weights.numpy() * np.exp(expected * np.array([1.0, 1, 0.6, 0.4]))
    assert beta == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(new, raw * 4 / raw.sum(), rtol=1e-6)
    assert reweight(torch.tensor([1.0, 0, 0]), torch.ones(3), 3, rule)[0] == pytest.approx(0.5 * math.log(2), rel=1e-6)


def test_samme_with_two_classes_equals_adaboost_above_chance():
    losses = torch.tensor([1.0, 0, 0])
    assert reweight(losses, torch.ones(3), 2, "samme")[0] == reweight(losses, torch.ones(3), 2, "adaboost")[0]


@pytest.mark.parametrize(("loss", "beta"), [(0.0, 0.5 * math.log(999_999)), (1.0, -0.5 * math.log(999_999))])
def test_error_is_clipped(loss, beta):
    """Without errors ε is 1e-6, and with errors alone 1 - 1e-6. Equal weights stay equal."""
    computed, new = reweight(torch.full((5,), loss), torch.ones(5), 2, "adaboost")
    assert computed == pytest.approx(beta, rel=1e-6)
    np.testing.assert_allclose(new, np.ones(5), rtol=1e-5)


@pytest.mark.parametrize("rule", ["samme", "adaboost", "adaboost-positive"])
def test_weights_sum_to_the_number_of_samples(rule):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 400):
        losses, weights = torch.rand(n, generator=generator).round(), 0.01 + torch.rand(n, generator=generator)
        assert float(reweight(losses, weights, 10, rule)[1].sum()) == pytest.approx(n, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("cross-entropy", [1 / 3, 2 / 3, 1.0]),  # log 2, 2 log 2 and 3 log 2, divided by the largest
        ("probability", [0.5, 0.75, 0.875]),
        ("zero-one", [0.0, 1.0, 1.0]),
    ],
)
def test_losses_of_three_samples_by_hand(make_client, loss, expected):
    """Their labels have the probabilities 1/2, 1/4 and 1/8."""
    data = (np.eye(4, 2, dtype=np.float32), np.arange(4), [[0, 1, 2]], [[3]])
    client = make_client("ppfe", data=data, model="linear", ppfe_stages=1, ppfe_loss=loss)
    flat = torch.zeros(client.layout.size)
    flat[-4:] = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    losses = client.jobs.drive(client.sample_losses(Predictor([Member(flat, client.architecture)])))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# -- ensemble ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("betas", "expected"),
    [
        ((1.0, 3.0), (0.3, 0.45, 0.25)),
        ((0.0, 2.0), (0.2, 0.5, 0.3)),
        ((0.0, 0.0), (0.4, 0.4, 0.2)),  # all zero: the plain mean
    ],
)
def test_ensemble_by_hand(make_client, betas, expected):
    client = make_client("ppfe", model="linear", ppfe_stages=1)
    members = []
    for p, beta in zip(((0.6, 0.3, 0.1), (0.2, 0.5, 0.3)), betas, strict=True):
        flat = torch.zeros(client.layout.size)
        flat[-3:] = torch.log(torch.tensor(p))
        members.append(Member(flat, client.architecture, beta))
    log_probabilities = client.jobs.drive(client.predict(Predictor(members), "test"))
    np.testing.assert_allclose(log_probabilities.exp(), np.tile(expected, (len(log_probabilities), 1)), rtol=1e-5)


@pytest.mark.parametrize(("betas", "chosen"), [((-1.0, -0.5), 2), ((1.0, -2.0), 0), ((0.1, -3.0), 0), ((-3.0, 0.1), 2)])
def test_negative_coefficients_subtract(make_client, betas, chosen):
    """The literal rule: Σ β_t p_t is (-0.7, -0.55, -0.25) for β = (-1, -½), (0.2, -0.7, -0.5) for (1, -2)."""
    client = make_client("ppfe", model="linear", ppfe_stages=1)
    members = []
    for p, beta in zip(((0.6, 0.3, 0.1), (0.2, 0.5, 0.3)), betas, strict=True):
        flat = torch.zeros(client.layout.size)
        flat[-3:] = torch.log(torch.tensor(p))
        members.append(Member(flat, client.architecture, beta))
    mixture = client.jobs.drive(client.predict(Predictor(members), "test")).exp()
    assert mixture.argmax(dim=1).unique().tolist() == [chosen]
    assert bool((mixture > 0).all())


@pytest.mark.parametrize("outputs", ["probabilities", "log-probabilities"])
def test_stored_ensemble_matches_the_clients_predictions(make_config, federate, tmp_path, outputs):
    """The literal rule makes some coefficients negative. The files contain the same ensemble."""
    config = make_config("ppfe", ppfe_beta="adaboost", lr=0.001, evaluate_every=100, ppfe_outputs=outputs)
    finished = federate(config, models_folder=tmp_path / "models")
    workspace = Workspace(finished.strategy.settings)
    signs = set()
    for client in range(3):
        arrays = load_file(tmp_path / "models" / f"client-{client}.safetensors")
        signs |= {float(np.sign(arrays[f"stage{t}.coefficient"][0])) for t in (1, 2, 3)}
        data = workspace.client_data(client)
        predicted = stored_probabilities(workspace, finished.strategy.architecture, arrays, data.x_test, data.y_test)
        accuracy = float((predicted.argmax(dim=1) == data.y_test).float().mean())
        assert accuracy == pytest.approx(finished.column("local_accuracy")[-1][client])
    assert -1.0 in signs


def test_an_unfinished_stage_has_its_current_coefficient(make_client):
    """Stage 1 is wrong on the last of four samples: β = ½ log 3, and ω ∝ (1, 1, 1, √3).

    Stage 2 is wrong on the first, and outvotes stage 1 with ε = 1/(3 + √3): β = ½ log(2 + √3).
    """
    labels = np.array([0, 1, 0, 1])
    data = (np.eye(4, dtype=np.float32), labels, [[0, 1, 2, 3]], [[]])
    client = make_client("ppfe", data=data, model="linear", ppfe_stages=2, ppfe_fixed_head=1, ppfe_reduction="none")
    models = []
    for wrong in (3, 0):
        answers = np.where(np.arange(4) == wrong, 1 - labels, labels)
        models.append(torch.tensor([*(10.0 * (answers == 0)), *(10.0 * (answers == 1)), 0, 0]).float())
    first, second = client.stages
    close(client, first, models[0])
    members = client.jobs.drive(client.ensemble(second, models[1])).members
    expected = [math.log(3) / 2, math.log(2 + math.sqrt(3)) / 2]
    assert [member.coefficient for member in members] == pytest.approx(expected, rel=1e-5)
    assert len(client.betas) == 1


def test_without_ensemble_only_the_current_stage_predicts(make_client, make_strategy):
    for ensemble, count in ((True, 2), (False, 1)):
        strategy = make_strategy("ppfe", ppfe_ensemble=ensemble)
        client = make_client("ppfe", ppfe_ensemble=ensemble)
        first = strategy.stages[0]
        close(client, first, client.initial())
        second = client.stages[1]
        current = client.stage_model(second, second.shared_part.take(open_stage(first, second, client.initial())))
        predictor = client.jobs.drive(client.ensemble(second, current))
        assert len(predictor.members) == count
        assert torch.equal(predictor.members[-1].parameters, current)


# -- local training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_slow", "rate"), [(2, 0.05), (3, 0.2)])
def test_local_step_of_a_later_stage(make_client, first_slow, rate):
    """One whole-batch step: weighted gradient (ω_i / n), shared layers at a quarter of the learning rate.

    Stage 2 keeps the full rate if the factor applies from stage 3 on.
    """
    client = make_client("ppfe", batch_size=100, ppfe_body_lr_factor=0.25, ppfe_body_lr_stage=first_slow)
    n = len(client.data.y_train)
    first, second = client.stages[:2]
    close(client, first, client.initial())
    weights = torch.linspace(0.5, 1.5, n)
    client.stored["weights"] = weights
    shared = second.shared_part.take(open_stage(first, second, client.initial()))
    start = client.stage_model(second, shared)
    config = {"server-round": 2, "lr": 0.2, "stage": 2, "rounds-done": 0, "stage-ends": False}
    (sent,), _, metrics = client.fit([shared.numpy()], config)
    model = second.architecture.build()
    model.load_state_dict(second.architecture.layout.views(start))
    losses = torch.nn.functional.cross_entropy(model(client.data.x_train), client.data.y_train, reduction="none")
    loss = (weights / n * losses).sum()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    np.testing.assert_allclose(sent, second.shared_part.take(start - rate * gradient), atol=1e-6)
    np.testing.assert_allclose(client.state["personal-2"], second.personal_part.take(start - 0.2 * gradient), atol=1e-6)
    assert metrics["train-loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert np.abs(sent - shared.numpy()).max() > 1e-5


@pytest.mark.parametrize(("weighting", "resample"), [("loss", False), ("resample", True)])
def test_sample_weights_scale_the_losses_or_the_sampling(make_client, weighting, resample):
    client = make_client("ppfe", ppfe_weighting=weighting)
    first, second = client.stages[:2]
    close(client, first, client.initial())
    weights = torch.linspace(0.5, 1.5, len(client.data.y_train))
    client.stored["weights"] = weights
    shared = second.shared_part.take(open_stage(first, second, client.initial()))
    training = next(client.local_round({"model": shared}, {"stage": 2, "rounds-done": 0, "stage-ends": False}))
    assert training.resample is resample
    assert torch.equal(training.sample_weight, weights)


def test_a_stage_can_end_with_training_of_the_personal_layers_only(make_client, make_strategy):
    """The head takes three whole-batch steps on fixed features. In other rounds the shared layers train too."""
    client = make_client("ppfe", batch_size=100, ppfe_final_epochs=3, ppfe_reduction="none", local_epochs=1)
    first, second = client.stages[:2]
    close(client, first, client.initial())
    client.state.pop("weights")  # the weights of stage 1
    shared = second.shared_part.take(open_stage(first, second, client.initial()))
    start = client.stage_model(second, shared)
    config = {"server-round": 2, "lr": 0.2, "stage": 2, "rounds-done": 0, "stage-ends": True}
    (sent,), _, _ = client.fit([shared.numpy()], config)
    np.testing.assert_array_equal(sent, shared)
    model = second.architecture.build()
    model.load_state_dict(second.architecture.layout.views(start))
    steps = torch.optim.SGD(model.head.parameters(), lr=0.2)
    for _ in range(3):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(client.data.x_train), client.data.y_train).backward()
        steps.step()
    head = torch.cat([p.detach().flatten() for p in model.head.parameters()])
    np.testing.assert_allclose(client.state["personal-2"], head, atol=1e-6)
    (sent,), _, _ = client.fit([shared.numpy()], config | {"stage-ends": False})
    assert np.abs(sent - shared.numpy()).max() > 1e-6
    strategy = make_strategy("ppfe", ppfe_stage_rounds="1,2,1", num_server_rounds=4)
    strategy.finished = [strategy.model]  # in stage 2, which ends with round 3
    assert [strategy.train_config(number, 0)["stage-ends"] for number in (2, 3)] == [False, True]


def test_first_stage_equals_fedavg(make_config, federate):
    """Both use the same batches and the same weighted mean."""
    progressive = federate(make_config("ppfe", ppfe_stages=1))
    average = federate(make_config("fedavg"))
    np.testing.assert_array_equal(progressive.strategy.model, average.strategy.model)


# -- the server ----------------------------------------------------------------------------------------


def test_the_mean_is_weighted_in_stage_1_and_uniform_later(make_strategy, update):
    strategy = make_strategy("ppfe", ppfe_stage_rounds="1,1,1")
    rows = np.random.default_rng(0).normal(size=(2, strategy.size)).astype(np.float32)

    def weighted(client):
        received = update(client, {"model": rows[client]}, strategy.clients[client].num_train)
        received.weight = strategy.exchange.weight(client)
        return received

    strategy.aggregate(1, [weighted(0), weighted(1)])
    np.testing.assert_allclose(strategy.finished[0], (21 * rows[0] + 12 * rows[1]) / 33, atol=1e-6)
    assert strategy.stage.number == 2
    head = strategy.architecture.layout.part(["head"]).size
    assert strategy.model.size == strategy.size - head
    np.testing.assert_array_equal(strategy.model, strategy.finished[0][:-head])  # ψ^(t) starts from ψ^(t-1)
    rows = rows[:, :-head]
    strategy.aggregate(2, [weighted(0), weighted(1)])
    np.testing.assert_allclose(strategy.finished[1], 0.5 * rows[0] + 0.5 * rows[1], atol=1e-6)


def test_all_clients_train_in_a_full_last_round(make_strategy):
    strategy = make_strategy("ppfe", num_server_rounds=4, ppfe_stages=2, fraction_train=0.3, full_last_round=True)
    strategy.ends = [5, 6]
    assert [len(strategy.rounds.cohort(number)) for number in (1, 2, 3, 4)] == [2, 2, 2, 4]


def test_all_clients_train_at_stage_ends(make_config, federate):
    config = make_config("ppfe", num_server_rounds=8, ppfe_stage_rounds="3,2,3", fraction_train=0.3)
    cohorts = [r.cohort for r in federate(config).records]
    assert [len(c) for c in cohorts] == [2, 2, 4, 2, 4, 2, 2, 4]


def test_personal_layers_are_never_sent(make_config, federate):
    finished = federate(make_config("ppfe", ppfe_stage_rounds="1,1,1"))
    size, parts = finished.strategy.size, finished.strategy.architecture.layout.part
    expected = [size, size - parts(["head"]).size, size - parts(["fc2", "head"]).size]
    assert [r.quantities["shared_parameters"] for r in finished.records] == expected
    up = [r.bytes_up for r in finished.records]
    assert up[0] - up[1] == 4 * 4 * (expected[0] - expected[1])  # four clients, four bytes a parameter


@pytest.mark.parametrize("reduction", ["svd", "svd-fedavg"])
def test_a_client_lost_for_a_stage_keeps_its_initial_head(make_config, federate, failing, reduction):
    """The client receives two finished stages at once in the end, and then has all T members."""
    fail = [("train", r, 1) for r in (3, 4, 5)]
    settings = {"ppfe_reduction": reduction, "ppfe_stage_rounds": "2,2,2"}
    config = make_config("ppfe", num_server_rounds=6, evaluate_every=100, **settings)
    finished = federate(config, grid=failing(*fail))
    assert [[c for c, _ in r.dropped] for r in finished.records] == [[], [], [1], [1], [1], []]
    state = finished.kept(1)
    first, second, _ = finished.strategy.stages
    begun = open_stage(first, second, torch.from_numpy(finished.strategy.finished[0]))
    np.testing.assert_array_equal(state["personal-2"], second.personal_part.take(begun))
    trained = finished.kept(0)
    assert np.abs(trained["personal-2"] - state["personal-2"]).max() > 1e-4  # client 0 has trained
    assert len(state["betas"]) == 3
    assert {f"finished-{t}" for t in (1, 2, 3)} <= set(state)
    assert finished.records[-1].clients[1]["served_accuracy"] >= 0


@pytest.mark.parametrize("round_lost", [3, 4, 5, 6])
@pytest.mark.parametrize("reduction", ["svd", "svd-fedavg"])
def test_a_client_that_loses_its_state_receives_all_stages_again(make_config, federate, failing, round_lost, reduction):
    config = make_config("ppfe", num_server_rounds=6, ppfe_stage_rounds="2,2,2", ppfe_reduction=reduction)
    finished = federate(config, grid=failing(forget=[("train", round_lost, 1)]))
    assert len(finished.kept(1)["betas"]) == 3
    assert [[c for c, _ in r.dropped] for r in finished.records] == [[1] * (r == round_lost) for r in range(1, 7)]
    assert 1 in finished.column("served_accuracy")[-1]


def test_a_newcomer_gets_stage_1s_reduced_personal_layers(make_config, make_strategy, federate, failing):
    """The newcomer's training fails, so it keeps the layers that follow from the served models."""
    settings = {"ppfe_reduction": "svd-fedavg", "holdout_clients": 0.25, "seed": 3}
    (new,) = make_strategy("ppfe", **settings).newcomers
    finished = federate(make_config("ppfe", **settings), grid=failing(("train", 3, new)))
    _, second, third = finished.strategy.stages
    fedavg, last = (torch.from_numpy(model) for model in finished.strategy.finished[:2])
    flat = second.shared_part.put(torch.zeros(second.architecture.layout.size), last)
    begun = third.personal_part.take(open_stage(second, third, flat, fedavg))
    state = finished.kept(new)
    assert len(state["betas"]) == 3
    np.testing.assert_allclose(state["personal-3"], begun, atol=1e-6)
    for client in finished.strategy.members:
        if client != 3:  # client 3's only sample may be fitted already
            assert np.abs(finished.kept(client)["personal-3"] - begun.numpy()).max() > 1e-4


def test_resent_stages_count_once(make_config, federate, failing):
    """A reply is lost but the client's state is not, so the server resends stages that the client has closed."""
    config = make_config("ppfe", num_server_rounds=6, ppfe_stage_rounds="2,2,2")
    finished = federate(config, grid=failing(("train", 3, 1), ("evaluate", 5, 1)))
    assert [[c for c, _ in r.dropped] for r in finished.records] == [[], [], [1], [], [1], []]
    assert len(finished.kept(1)["betas"]) == 3
    assert list(finished.strategy.exchange.served(1)) == ["model"]


def test_a_stage_ends_with_the_next_successful_round(make_config, federate, failing):
    fail = [("train", 2, c) for c in range(4)]
    config = make_config("ppfe", num_server_rounds=6, ppfe_stage_rounds="2,2,2", fraction_train=0.5)
    finished = federate(config, grid=failing(*fail))
    assert [r.quantities.get("stage") for r in finished.records] == [1, None, 1, 2, 3, 3]
    assert len(finished.records[2].cohort) == 4
    assert len(finished.kept(0)["betas"]) == 3


def test_server_sends_each_finished_stage_once(make_config, federate):
    sent = []

    class Watching(InProcessGrid):
        def _receive(self, message):
            names = list(message.content.array_records.get("arrays", {}))
            if message.metadata.dst_node_id == 1 and len(names) > 1:
                sent.append((message.metadata.message_type, message.content["config"]["server-round"], names))
            return super()._receive(message)

    finished = federate(make_config("ppfe", num_server_rounds=6, ppfe_stage_rounds="2,2,2"), grid=Watching)
    assert sent == [("evaluate", number, ["model", f"finished-{number // 2}"]) for number in (2, 4, 6)]
    assert list(finished.strategy.exchange.served(0)) == ["model"]


def test_plotted_coefficients_match_the_stored_models(make_config, federate, tmp_path, monkeypatch):
    """Client 1 has stored no model. The coefficient of a client's locally trained model differs."""
    models = tmp_path / "models"
    config = make_config("ppfe", num_server_rounds=2, ppfe_stages=2, ppfe_beta="adaboost", ppfe_loss="probability")
    finished = federate(config, models_folder=models)
    trained = load_file(models / "client-0.safetensors")["stage2.coefficient"]
    assert trained[0] != finished.kept(0)["betas"][1]
    (models / "served-1.safetensors").unlink()
    drawn = []
    monkeypatch.setattr("posy.figures.heatmaps", lambda panels, path, title: drawn.extend(panels))
    draw(finished.strategy, tmp_path)
    expected = np.stack([finished.kept(client)["betas"] for client in range(4)])
    expected[1] = math.nan
    np.testing.assert_array_equal(drawn[0].matrix, expected)


def test_a_stage_without_finished_rounds_serves_the_finished_stages(make_client):
    client = make_client("ppfe")
    first = client.stages[0]
    body = client.stages[1].shared_part.take(open_stage(first, client.stages[1], client.initial()))
    client.stored["finished-1"] = client.initial()
    config = {"server-round": 2, "stage": 2, "rounds-done": 0}
    before = client.jobs.drive(client.served_model({"model": body}, config))
    assert len(before.members) == 1 and torch.equal(before.members[0].parameters, client.initial())
    after = client.jobs.drive(client.served_model({"model": body}, config | {"rounds-done": 1}))
    assert len(after.members) == 2
