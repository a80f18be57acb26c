"""Baselines with control variates, normalisation, features and prototypes, by hand, and degenerate cases."""

import numpy as np
import pytest
import torch

from posy.client_app.fedcp import discrepancy
from posy.client_app.fedpac import statistics
from posy.strategies.fedpac import combination
from posy.strategies.replies import BadReplyError

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}


@pytest.fixture
def images():
    """Return two clients with 16×16 images of two classes."""
    rng = np.random.default_rng(3)
    y = np.arange(16) % 2
    x = np.clip(rng.normal(100 + 50 * y[:, None, None], 40, (16, 16, 16)), 0, 255).astype(np.uint8)
    return x, y, [range(6), range(8, 13)], [range(6, 8), range(13, 16)]


# -- SCAFFOLD ------------------------------------------------------------------------------------------


def test_scaffold_counts_the_steps_of_mini_batches(make_client):
    """Client 0 has 21 samples. In batches of 8, two epochs are six steps, and two local steps are two."""
    for settings, steps in (({"local_epochs": 2}, 6), ({"local_steps": 2}, 2)):
        client = make_client("scaffold", batch_size=8, **settings)
        start = client.initial().numpy().copy()
        (sent, change), _, _ = client.fit([start, np.zeros_like(start)], CONFIG)
        np.testing.assert_allclose(change, (start - sent) / (steps * LR), rtol=1e-4, atol=1e-5)


def test_scaffold_control_variate_is_the_mean_over_clients(make_config, federate):
    finished = federate(make_config("scaffold", num_server_rounds=6, fraction_train=0.5))
    controls = [finished.kept(client).get("control") for client in range(4)]
    mean = sum(n * c for n, c in zip((21, 12, 8, 1), controls, strict=True) if c is not None) / 42
    np.testing.assert_allclose(finished.strategy.control, mean, atol=1e-5)
    assert np.abs(mean).max() > 1e-3


def test_scaffold_first_round_equals_fedavg(make_config, federate):
    first = {"num_server_rounds": 1, "momentum": 0.5}
    scaffold, plain = federate(make_config("scaffold", **first)), federate(make_config("fedavg", **first))
    np.testing.assert_array_equal(scaffold.strategy.model, plain.strategy.model)


def test_scaffold_with_one_client_is_fedavg(make_config, federate):
    """With one client, c_i equals c."""
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2, [range(12)], [range(12, 20)])
    scaffold, plain = (federate(make_config(m, data=data, num_server_rounds=5)) for m in ("scaffold", "fedavg"))
    np.testing.assert_allclose(scaffold.strategy.model, plain.strategy.model, atol=1e-6)
    np.testing.assert_allclose(scaffold.strategy.control, scaffold.kept(0)["control"], atol=1e-6)


def test_running_statistics_have_no_control_variate(make_client, images):
    client = make_client("scaffold", data=images, model="resnet18-bn", batch_size=6)
    start = client.initial().numpy().copy()
    (sent, change), _, _ = client.fit([start, np.zeros_like(start)], CONFIG)
    statistics = client.layout.select(lambda entry: not entry.trainable)
    assert np.abs(statistics.take(sent) - statistics.take(start)).max() > 0.01
    assert not statistics.take(change).any() and change.any()


# -- FedBN ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["lenet-gn", "resnet18-bn"])
def test_fedbn_shares_all_layers_except_normalisation(model, make_client, make_strategy, images):
    client, strategy = (make("fedbn", data=images, model=model, batch_size=6) for make in (make_client, make_strategy))
    kinds = (torch.nn.BatchNorm2d, torch.nn.GroupNorm, torch.nn.LayerNorm)
    module = client.architecture.build()
    norms = [name for name, part in module.named_modules() if isinstance(part, kinds)]
    personal = [e for e in client.layout.entries if e.name.rpartition(".")[0] in norms]
    assert ("running_mean" in {e.name.rpartition(".")[2] for e in personal}) == (model == "resnet18-bn")
    count = sum(e.stop - e.start for e in personal)
    assert count > 0 and strategy.model.size == client.layout.size - count

    received = strategy.serve(0)["model"].copy()
    (sent,), _, _ = client.fit([received], CONFIG)
    assert sent.shape == received.shape and (sent != received).any()
    assert client.state["personal"].size == count
    # A client that receives another model keeps the tensors of its normalisation layers.
    predictor = client.served_model({"model": torch.zeros(received.size)}, CONFIG)
    views = client.layout.views(predictor.members[0].parameters)
    initial = client.layout.views(client.initial())
    change = 0.0
    for entry in client.layout.entries:
        if entry in personal:
            change = max(change, float((views[entry.name] - initial[entry.name]).abs().max()))
        else:
            assert not views[entry.name].any()
    assert change > 1e-3


def test_fedbn_without_normalisation_is_fedavg(make_config, federate):
    normal, plain = federate(make_config("fedbn")), federate(make_config("fedavg"))
    np.testing.assert_array_equal(normal.strategy.model, plain.strategy.model)
    assert normal.column("served_accuracy") == plain.column("served_accuracy")


# -- MOON ----------------------------------------------------------------------------------------------


def module_of(client, flat):
    """Return the client's network as a module in double precision."""
    model = client.architecture.build().double()
    model.load_state_dict({name: t.double() for name, t in client.layout.views(torch.as_tensor(flat)).items()})
    return model


def cosine(a, b):
    return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))


def test_moon_without_contrast_is_fedavg(make_config, federate):
    moon, plain = federate(make_config("moon", moon_mu=0.0)), federate(make_config("fedavg"))
    np.testing.assert_array_equal(moon.strategy.model, plain.strategy.model)


def test_moon_first_round_equals_fedavg(make_config, federate):
    first = {"num_server_rounds": 1}
    moon, plain = federate(make_config("moon", **first)), federate(make_config("fedavg", **first))
    np.testing.assert_allclose(moon.strategy.model, plain.strategy.model, atol=1e-6)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_moon_trains_with_zero_features(stack, make_client):
    """A body of zeros gives features of zero, whose cosine has a gradient of zero."""
    client = make_client("moon", batch_size=4, stack=stack)
    start = client.initial().numpy().copy()
    body = client.layout.without(["head"])
    body.put(start, np.zeros(body.size, np.float32))
    (sent,), _, _ = client.fit([start], CONFIG)
    np.testing.assert_array_equal(body.take(sent), body.take(start))
    assert np.isfinite(sent).all()


# -- FedProto ------------------------------------------------------------------------------------------


def test_fedproto_averages_prototypes_by_samples(make_strategy, update):
    strategy = make_strategy("fedproto", model="linear")
    strategy.prototypes = np.arange(18, dtype=np.float32).reshape(3, 6)
    strategy.known = np.array([0, 0, 1], np.float32)
    before = strategy.prototypes.copy()
    unit = np.ones((3, 6), np.float32)
    first, second = {"prototypes": unit, "counts": [3, 2, 0]}, {"prototypes": 5 * unit, "counts": [1, 0, 0]}
    quantities = strategy.aggregate(1, [update(0, first, 5), update(1, second, 1)])
    np.testing.assert_allclose(strategy.prototypes, [np.full(6, 2.0), np.ones(6), before[2]])
    np.testing.assert_array_equal(strategy.known, [1, 1, 1])
    assert quantities == {"known_classes": 3}


@pytest.mark.parametrize("counts", [[-1, 22, 0], [0, 0, 0], [0.5, 20.5, 0], [2, 0, 1]])
@pytest.mark.parametrize("method", ["fedproto", "fedpac"])
def test_invalid_class_counts_are_refused(method, counts, make_strategy):
    strategy = make_strategy(method)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in strategy.exchange.expected_shapes(0).items()}
    arrays["counts"] = np.array([20, 0, 1], np.float32)
    strategy.check(0, arrays)
    arrays["counts"] = np.array(counts, np.float32)
    with pytest.raises(BadReplyError, match="samples by class"):
        strategy.check(0, arrays)


def test_fedproto_predicts_by_the_nearest_known_prototype(make_client):
    client = make_client("fedproto")
    features = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    prototypes = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    for mask in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0]):
        is_known = torch.tensor(mask)
        flat = client.served_model({"prototypes": prototypes, "known": is_known}, CONFIG).members[0].parameters
        head = client.layout.views(flat)
        answers = (features @ head["head.weight"].T + head["head.bias"]).argmax(dim=1)
        distances = torch.cdist(features, prototypes).masked_fill(is_known == 0, torch.inf)
        torch.testing.assert_close(answers, distances.argmin(dim=1))
        assert set(answers.tolist()) == {label for label in range(3) if mask[label]}
    # Without prototypes, it predicts with the initial head.
    flat = client.served_model({"prototypes": prototypes, "known": torch.zeros(3)}, CONFIG).members[0].parameters
    torch.testing.assert_close(flat, client.initial())


def test_fedproto_with_strength_0_trains_as_local(make_config, federate):
    proto, local = federate(make_config("fedproto", fedproto_strength=0.0)), federate(make_config("local"))
    for client in range(4):  # FedProto uses autograd, which rounds differently from Local's closed-form gradients
        np.testing.assert_allclose(proto.kept(client)["model"], local.kept(client)["model"], atol=1e-6)


def test_fedproto_sends_no_model(make_config, federate):
    finished = federate(make_config("fedproto", num_server_rounds=1))
    assert [row["bytes_up"] for row in finished.records[0].clients.values()] == [4 * (3 * 64 + 3)] * 4


def test_fedproto_local_model_keeps_its_last_prototypes(make_client):
    """The local model keeps the prototypes of the client's last training, also when the served prototypes change."""
    client = make_client("fedproto")
    first = [np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32), np.ones(3, np.float32)]
    _, _, trained = client.fit(first, {**CONFIG, "evaluate-local": True})
    _, _, evaluated = client.evaluate([-first[0], first[1]], {**CONFIG, "evaluate-personal": True})
    assert evaluated["local-loss"] == trained["local-loss"] != evaluated["served-loss"]
    fresh = make_client("fedproto", client=1)
    assert "local-loss" not in fresh.evaluate(first, {**CONFIG, "evaluate-personal": True})[2]


# -- FedPAC --------------------------------------------------------------------------------------------


def test_fedpac_combination_by_hand():
    """Client 0's matrix is diag(V_0, V_1 + ||h_0 − h_1||²) = diag(1, 3 + 4), so weights are inverse."""
    products = np.array([[[0, 1], [2, 5]], [[0, 1], [0, 5]]])
    weights = combination(products, [1.0, 3.0])
    np.testing.assert_allclose(weights, [[7 / 8, 1 / 8], [3 / 8, 5 / 8]], atol=1e-12)


def test_fedpac_combination_minimises_the_papers_estimate():
    rng = np.random.default_rng(0)
    h, variances = rng.normal(size=(3, 2, 4)), rng.uniform(0.5, 6, 3)
    grid = np.array([(i, j, 200 - i - j) for i in range(201) for j in range(201 - i)]) / 200
    weights = combination(h + 1000.0, variances)  # a common offset has no effect
    for i in range(3):
        matrix = np.diag(variances)
        for j in range(3):
            for k in range(3):
                matrix[j, k] += np.trace((h[i] - h[j]).T @ (h[i] - h[k]))
        best = grid[np.einsum("ni,ij,nj->n", grid, matrix, grid).argmin()]
        assert weights[i] @ matrix @ weights[i] <= best @ matrix @ best + 1e-9
        np.testing.assert_allclose(weights[i], best, atol=0.02)


def test_equal_clients_weigh_heads_equally():
    np.testing.assert_allclose(combination(np.ones((5, 2, 3)), np.full(5, 0.1)), np.full((5, 5), 0.2), atol=1e-9)
    np.testing.assert_allclose(combination(np.ones((5, 2, 3)), np.zeros(5)), np.full((5, 5), 0.2), atol=1e-9)


def test_fedpac_statistics_by_hand():
    """V is the variance of the mean of (one-hot label) × feature, and h is this mean."""
    rng = np.random.default_rng(0)
    features, y = rng.normal(size=(7, 4)), np.array([0, 2, 2, 0, 2, 2, 2])
    outer = np.stack([np.outer(np.eye(3)[label], f) for f, label in zip(features, y, strict=True)])
    variance, products = statistics(torch.from_numpy(features).float(), torch.from_numpy(y), 3)
    np.testing.assert_allclose(products, outer.mean(axis=0), atol=1e-6)
    assert float(variance) == pytest.approx(np.square(outer - outer.mean(axis=0)).sum() / 7 / 7, rel=1e-5)
    single_sample, _ = statistics(torch.from_numpy(features[:1]).float(), torch.from_numpy(y[:1]), 3)
    assert float(single_sample) == pytest.approx(0, abs=1e-6)


def test_fedpac_with_one_client_and_no_alignment_is_fedrep(make_config, federate):
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2, [range(12)], [range(12, 20)])
    settings = {"data": data, "fedpac_strength": 0.0, "fedpac_head_lr": 0.0, "fedrep_head_epochs": 1}
    pac, rep = (federate(make_config(method, **settings)) for method in ("fedpac", "fedrep"))
    np.testing.assert_allclose(pac.strategy.model, rep.strategy.model, atol=1e-6)
    np.testing.assert_allclose(pac.strategy.heads[0], rep.kept(0)["personal"], atol=1e-6)


def test_a_negative_variance_is_refused(make_strategy):
    strategy = make_strategy("fedpac")
    arrays = {name: np.full(shape, 7, np.float32) for name, shape in strategy.exchange.expected_shapes(0).items()}
    strategy.check(0, arrays)
    arrays["variance"] = np.array(-1e-3, np.float32)
    with pytest.raises(BadReplyError, match="variance"):
        strategy.check(0, arrays)


# -- FedAS ---------------------------------------------------------------------------------------------


def test_a_negative_fisher_trace_is_refused(make_strategy):
    strategy = make_strategy("fedas")
    strategy.check(0, {"model": strategy.model, "fisher": np.array(0.0)})
    with pytest.raises(BadReplyError, match="Fisher"):
        strategy.check(0, {"model": strategy.model, "fisher": np.array(-1.0)})


def test_fedas_without_alignment_trains_body_and_head_together(make_client):
    """Rounds of one client without alignment equal local training that continues from the previous round."""
    aligned, plain, local = (make_client(m, **settings) for m, settings in (
        ("fedas", {}), ("fedas", {"fedas_align_epochs": 0}), ("local", {}),
    ))  # fmt: skip
    body = local.layout.without(["head"])
    sent = {client: [body.take(client.initial()).numpy()] for client in (aligned, plain)}
    for number in (1, 2):
        config = {**CONFIG, "server-round": number}
        local.fit([], config)
        sent = {client: client.fit(arrays[:1], config)[0] for client, arrays in sent.items()}
        np.testing.assert_allclose(sent[plain][0], body.take(local.state["model"]), atol=1e-6)
        assert np.abs(sent[aligned][0] - sent[plain][0]).max() > 1e-5


# -- FedCP ---------------------------------------------------------------------------------------------


def by_kernels(x, y):
    """Return the squared discrepancy of two samples by the definition of its four kernels."""

    def mean(a, b):
        squared = (a[:, None] - b[None, :]).square().sum(dim=2)
        return sum(torch.exp(-squared / (2 * width)).mean() for width in (10, 15, 20, 50))

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


def test_fedcp_discrepancy_matches_its_definition():
    x, y = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(discrepancy(x, 1 + y), by_kernels(x, 1 + y), rtol=1e-4, atol=1e-6)
    assert float(discrepancy(x, x).abs()) < 1e-6
    # A batch's padding has no weight.
    weight = torch.tensor([7 / 4] * 4 + [0.0] * 3)
    torch.testing.assert_close(discrepancy(x, 1 + y, weight), by_kernels(x[:4], 1 + y[:4]), rtol=1e-4, atol=1e-6)


def test_fedcp_starts_with_equal_heads_and_freezes_the_global_head(make_client):
    client = make_client("fedcp")
    tensors = client.layout.views(client.initial())
    for kind in ("weight", "bias"):
        torch.testing.assert_close(tensors[f"model.head.{kind}"], tensors[f"global_head.{kind}"])
    # A policy of zeros halves the features, so two equal heads act as a single head.
    flat = client.initial().clone()
    client.layout.part(["policy"]).put(flat, torch.zeros(client.layout.part(["policy"]).size))
    model = module_of(client, flat)
    x = client.data.x_train.double()
    halves = model.model.body(x) / 2
    torch.testing.assert_close(model(x), model.model.head(halves) + model.model.head(halves))
    client.lr = LR
    local = client.jobs.drive(client.local_round({"model": client.shared.take(client.initial())}, CONFIG))[1]
    trained = client.layout.views(local.members[0].parameters)
    assert torch.equal(trained["global_head.weight"], tensors["global_head.weight"])
    assert not torch.equal(trained["model.head.weight"], tensors["model.head.weight"])
