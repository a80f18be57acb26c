"""Networks: sizes by hand, order of layers, seeds, stacking, low rank, and two branches."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from posy.data.task import Task
from posy.models.architecture import Architecture
from posy.models.build import build_model, resolve
from posy.models.catalogue import MODELS, SHARING
from posy.models.chain import ChainModel, with_cosine_head
from posy.models.conditional import Conditional
from posy.models.layers import (
    Dropout,
    FullyConnected,
    LowRankLinear,
    capped_rank,
    low_rank_factors,
    reset_parameters,
)
from posy.models.resnet import ResidualBlock
from posy.models.text import LSTM
from posy.models.two_branch import TwoBranch, shared_blocks
from posy.randomness import seeded
from posy.settings import SettingsError

TEN = tuple("0123456789")
CIFAR = Task("image", (3, 32, 32), TEN)
MNIST = Task("image", (1, 28, 28), TEN)
DIGITS = Task("image", (1, 8, 8), TEN)
FEATURES = Task("features", (20,), ("a", "b", "c"))
NEWS = Task("text", (12,), ("world", "sports", "business", "science"), vocabulary=50)
SERIES = Task("series", (9, 4), ("a", "b", "c"))
TWO = Task("features", (7,), ("no", "yes"))

TASKS = {
    "gru": SERIES,
    "cnn1d": SERIES,
    "linear": FEATURES,
    "logistic": TWO,
    "mlp": FEATURES,
    "cnn": CIFAR,
    "cnn-3fc": CIFAR,
    "cnn-3fc-wide": CIFAR,
    "resnet18-gn": CIFAR,
    "resnet18-bn": CIFAR,
    "lenet-gn": CIFAR,
    "fasttext": NEWS,
    "textcnn": NEWS,
    "lstm": NEWS,
}


def batch(task: Task, size: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if task.kind == "text":
        return torch.randint(0, task.vocabulary, (size, *task.input_shape), generator=generator)
    return torch.randn(size, *task.input_shape, generator=generator)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def count_layers(model: ChainModel) -> list[int]:
    return [count(model.layer(name)) for name in model.layer_names]


def test_every_model_has_a_test_task() -> None:
    assert set(TASKS) == set(MODELS)


@pytest.mark.parametrize("name", TASKS)
def test_chain_model_structure(name: str) -> None:
    task = TASKS[name]
    model = build_model(name, task, seed=1)
    x = batch(task)
    embedding = model.body(x)
    assert embedding.shape == (2, model.embedding_dim)
    assert torch.equal(model(x), model.head(embedding))
    assert model(x).shape == (2, task.num_classes)
    assert model.layer_names[-1] == "head" == model.fully_connected[-1]
    assert all(count(model.layer(layer)) > 0 for layer in model.layer_names)
    assert sum(count_layers(model)) == count(model)
    assert all(isinstance(model.layer(layer), FullyConnected) for layer in model.fully_connected[:-1])


@pytest.mark.parametrize("name", TASKS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = build_model(name, TASKS[name], seed=1)
    model(batch(TASKS[name])).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("name", "task", "counts"),
    [
        # 3·25·32+32, 32·25·64+64, 64·25·512+512, 512·10+10
        ("cnn", CIFAR, {"conv1": 2_432, "conv2": 51_264, "fc1": 819_712, "head": 5_130}),
        # 25·32+32, the same, 64·16·512+512, the same: 582,026 together
        ("cnn", MNIST, {"conv1": 832, "conv2": 51_264, "fc1": 524_800, "head": 5_130}),
        # 3·25·64+64, 64·25·64+64, 1600·120+120, 120·64+64, 64·10+10: 307,842 together
        ("cnn-3fc", CIFAR, {"conv1": 4_864, "conv2": 102_464, "fc1": 192_120, "fc2": 7_744, "head": 650}),
        # 3·25·64+64, 64·25·128+128, 3200·256+256, 256·128+128, 128·10+10
        ("cnn-3fc-wide", CIFAR, {"conv1": 4_864, "conv2": 204_928, "fc1": 819_456, "fc2": 32_896, "head": 1_290}),
        # 2,432 and 2·32 of the norm, 51,264 and 2·64, 1600·512+512 and 2·512, 512·256+256 and 2·256,
        # 256·128+128 and 2·128, 128·10+10
        (
            "lenet-gn",
            CIFAR,
            {"conv1": 2_496, "conv2": 51_392, "fc1": 820_736, "fc2": 131_840, "fc3": 33_152, "head": 1_290},
        ),
        # 27·64+128; 4·(576·64+128); halves: 576·128+1152·128·3+64·128+5·256 and so on; 512·256+256+512; 2,570
        (
            "resnet18-gn",
            CIFAR,
            {
                "stem": 1_856,
                "layer1": 147_968,
                "layer2": 525_568,
                "layer3": 2_099_712,
                "layer4": 8_393_728,
                "neck": 131_840,
                "head": 2_570,
            },
        ),
        ("mlp", FEATURES, {"fc1": 20 * 128 + 128, "fc2": 128 * 64 + 64, "head": 64 * 3 + 3}),
        ("mlp", DIGITS, {"fc1": 64 * 128 + 128, "fc2": 128 * 64 + 64, "head": 650}),
        ("linear", CIFAR, {"head": 3072 * 10 + 10}),
        ("fasttext", NEWS, {"embedding": 50 * 64, "fc1": 64 * 64 + 64, "head": 64 * 4 + 4}),
        # three convolutions of 100 channels: 64·100·(3+4+5) + 300
        ("textcnn", NEWS, {"embedding": 50 * 64, "convs": 77_100, "head": 300 * 4 + 4}),
        # four gates of 128 units: 512·(300 + 128 + 1)
        (
            "lstm",
            NEWS,
            {"embedding": 50 * 300, "lstm": 219_648, "fc1": 128 * 64 + 64, "fc2": 64 * 32 + 32, "head": 32 * 4 + 4},
        ),
    ],
)
def test_parameter_counts_by_hand(name: str, task: Task, counts: dict[str, int]) -> None:
    model = build_model(name, task, seed=0)
    assert dict(zip(model.layer_names, count_layers(model), strict=True)) == counts
    assert model.layer_names == tuple(counts)  # input to output


@pytest.mark.parametrize(("task", "total"), [(CIFAR, 878_538), (MNIST, 582_026)])
def test_cnn_has_the_size_in_the_paper(task: Task, total: int) -> None:
    assert count(build_model("cnn", task, seed=0)) == total


def test_convolution_pools_before_relu_and_equals_relu_before_pooling() -> None:
    block = build_model("cnn", CIFAR, seed=0).blocks["conv1"]
    x = batch(CIFAR)
    expected = nn.functional.max_pool2d(torch.relu(block.conv(x)), 2)
    assert torch.equal(block(x), expected)


def test_resnet_stem_depends_on_the_image_size() -> None:
    at_most_64 = build_model("resnet18-gn", Task("image", (1, 64, 64), TEN), seed=0)
    above = build_model("resnet18-gn", Task("image", (3, 65, 65), TEN), seed=0)
    assert at_most_64.blocks["stem"](torch.randn(1, 1, 64, 64)).shape == (1, 64, 64, 64)
    assert above.blocks["stem"](torch.randn(1, 3, 65, 65)).shape == (1, 64, 17, 17)
    assert count(above.blocks["stem"]) == 3 * 49 * 64 + 128


# Seeds


@pytest.mark.parametrize("name", TASKS)
def test_weights_depend_only_on_the_seed(name: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = build_model(name, TASKS[name], seed=3)
    assert torch.equal(torch.rand(3), expected)  # the global generator is unchanged
    second = build_model(name, TASKS[name], seed=3)
    other = build_model(name, TASKS[name], seed=4)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("name", TASKS)
def test_reset_draws_new_weights_from_the_same_distribution(name: str) -> None:
    model = build_model(name, TASKS[name], seed=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(5)
    reset_parameters(model)
    for key, value in model.state_dict().items():
        drawn = key == "head.bias" or before[key].unique().numel() > 1  # the other single numbers are constant
        assert torch.equal(value, before[key]) != drawn, key
        if value.numel() > 1000 and drawn:
            assert value.std().item() == pytest.approx(before[key].std().item(), rel=0.1), key


# Stacking


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("training", [True, False])
def test_vmap_over_stacked_models_equals_a_loop(name: str, training: bool) -> None:
    task = TASKS[name] if TASKS[name] is not CIFAR else Task("image", (3, 16, 16), TEN)
    models = [build_model(name, task, seed=seed).train(training) for seed in range(2)]
    parameters, buffers = stack_module_state(models)
    x = batch(task, size=3)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = functional_call(models[0], (parameters, buffers), (x,))
        return logits.square().mean(), logits

    gradients, logits = vmap(torch.func.grad(loss, has_aux=True))(parameters, buffers)
    for k, model in enumerate(models):
        single = model(x)
        single.square().mean().backward()
        torch.testing.assert_close(logits[k], single, rtol=1e-4, atol=1e-5)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[key][k], parameter.grad, rtol=1e-3, atol=1e-4)
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[key][k], buffer, rtol=1e-4, atol=1e-5)


def test_layout_holds_running_statistics_but_no_batch_counter() -> None:
    model = build_model("resnet18-bn", DIGITS, seed=0)
    layout = Architecture("resnet18-bn", DIGITS).layout
    counters = {name for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    assert {entry.name for entry in layout.entries} == model.state_dict().keys() - counters
    stem = model.blocks["stem"]
    x = batch(DIGITS, 8)
    model(x)
    # from mean 0 and variance 1, with momentum 0.1
    convolved = stem.conv(x)
    torch.testing.assert_close(stem.norm.running_mean, 0.1 * convolved.mean((0, 2, 3)))
    torch.testing.assert_close(stem.norm.running_var, 0.9 + 0.1 * convolved.var((0, 2, 3)))
    other = build_model("resnet18-bn", DIGITS, seed=1)
    other.load_state_dict({e.name: model.state_dict()[e.name] for e in layout.entries})  # as it is stored
    assert torch.equal(other.eval()(x), model.eval()(x))
    before = stem.norm.running_mean.clone()
    model(x)
    assert torch.equal(stem.norm.running_mean, before)  # evaluation does not update them


def test_reset_clears_the_running_statistics() -> None:
    model = build_model("resnet18-bn", DIGITS, seed=0)
    norm = model.blocks["stem"].norm
    model(batch(DIGITS, 8))
    assert norm.running_mean.any()
    with seeded(0):
        reset_parameters(model)
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_residual_blocks_start_as_their_shortcut(name: str) -> None:
    model = build_model(name, CIFAR, seed=2)
    residual = [part for part in model.modules() if isinstance(part, ResidualBlock)]
    assert len(residual) == 8
    assert all(not block.norm2.weight.any() for block in residual)
    x = torch.randn(2, 64, 8, 8).relu()
    assert torch.equal(model.blocks["layer1"](x), x)
    halved = model.blocks["layer2"]
    shortcut = halved[0].shortcut
    assert shortcut is not None
    assert torch.equal(halved(x), shortcut(x).relu())
    assert model.blocks["stem"].conv.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.05)


# Text


@pytest.mark.parametrize("name", ["fasttext", "textcnn"])
def test_padding_has_no_effect(name: str) -> None:
    model = build_model(name, NEWS, seed=0)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 3, 0, 0, 0, 0, 0, 0]])
    rows = model.layer("embedding").state_dict()
    (table,) = rows.values()
    assert not table[0].any()
    if name == "fasttext":
        mean = table[[5, 6, 7, 8, 9, 3]].mean(0, keepdim=True)
        torch.testing.assert_close(model.layer("embedding")(tokens), mean)
        torch.testing.assert_close(model(tokens), model(tokens[:, :6]))
        assert not model.layer("embedding")(torch.zeros(1, 12, dtype=torch.int64)).any()
    model(tokens).sum().backward()
    (embedding,) = (p for p in model.layer("embedding").parameters())
    assert embedding.grad is not None
    assert embedding.grad[5].any()
    assert not embedding.grad[0].any()


def test_fasttext_ignores_the_padding_vector() -> None:
    model = build_model("fasttext", NEWS, seed=0)
    tokens = torch.tensor([[5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    before = model(tokens)
    with torch.no_grad():
        model.layer("embedding").tokens.weight[0] = 3.0
    assert torch.equal(model(tokens), before)


def test_an_lstm_of_one_unit_by_hand() -> None:
    cell = LSTM(1, 1)
    with torch.no_grad():
        cell.input.copy_(torch.tensor([[1.0], [0.0], [2.0], [0.0]]))  # gates i, f, g, o
        cell.recurrent.copy_(torch.tensor([[0.0], [1.0], [0.0], [-1.0]]))
        cell.bias.copy_(torch.tensor([0.0, 1.0, 0.0, 0.5]))
    # x = 1: i = s(1) = .731059, g = tanh(2) = .964028, c = .704761; o = s(.5) = .622459, h = o tanh(c) = .378070
    # x = -1: i = s(-1) = .268941, f = s(1 + h) = .798681, g = -.964028, c = .562879 - .259267 = .303612
    #         o = s(.5 - h) = .530445, h = o tanh(c) = .156277
    first, second = cell(torch.tensor([[[1.0], [0.0], [0.0]], [[1.0], [0.0], [-1.0]]]))
    assert first.item() == pytest.approx(0.378070, abs=1e-6)
    assert second.item() == pytest.approx(0.156277, abs=1e-6)  # the token without a vector is skipped


def test_lstm_matches_pytorch() -> None:
    model = build_model("lstm", NEWS, seed=0)
    cell, vectors = model.layer("lstm"), model.layer("embedding")
    torchs = nn.LSTM(300, 128, batch_first=True)
    tensors = (cell.input, cell.recurrent, cell.bias, torch.zeros(512))
    torchs.load_state_dict(dict(zip(torchs.state_dict(), tensors, strict=True)))
    tokens = torch.tensor([[5, 6, 7, 0, 0], [3, 3, 9, 2, 8]])
    with torch.no_grad():
        vectors.tokens.weight[0] = 3.0  # as after averaging or noise
        for row, length in zip(tokens, (3, 5), strict=True):
            _, (expected, _) = torchs(vectors(row[None, :length]))
            torch.testing.assert_close(cell(vectors(row[None])), expected[0])
        assert not cell(vectors(torch.zeros(1, 5, dtype=torch.int64))).any()


# Low rank


def test_capped_rank_by_hand() -> None:
    assert capped_rank(1600, 120, 100) == 100  # 172,000 of 192,000
    assert capped_rank(1600, 120, 500) == 111  # 111·1720 = 190,920; 112·1720 = 192,640
    assert capped_rank(120, 64, 50) == 41  # 41·184 = 7,544 of 7,680
    assert capped_rank(64, 10, 24) == 8  # 8·74 = 592 of 640; 9·74 = 666
    assert capped_rank(4, 4, 9) == 1  # 2·8 = 16 saves nothing of 16
    assert capped_rank(2, 2, 1) is None  # 1·4 of 4
    assert capped_rank(100, 1, 1) is None


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 3), (64, 10), (5, 5), (2, 3)])
def test_capped_rank_is_the_largest_rank_that_saves_parameters(inputs: int, outputs: int) -> None:
    saving = [rank for rank in range(1, 100) if rank * (inputs + outputs) < inputs * outputs]
    assert capped_rank(inputs, outputs, 100) == (saving[-1] if saving else None)


def test_full_rank_factors_reproduce_the_dense_layer() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(9, 6)
    low = LowRankLinear(9, 6, rank=6)
    down, up = low_rank_factors(dense.weight, 6)
    low.load_state_dict({"down.weight": down, "up.weight": up, "up.bias": dense.bias})
    x = torch.randn(4, 9)
    torch.testing.assert_close(low(x), dense(x))
    torch.testing.assert_close(low.weight, dense.weight)
    assert low.down.bias is None


def test_the_signs_of_factors_do_not_depend_on_the_library() -> None:
    """A library may return any pair of singular vectors, or both with the other sign."""
    weight = torch.tensor([[0.0, -3.0], [2.0, 0.0]])  # 3 (−e1)(e2)ᵀ + 2 (e2)(e1)ᵀ
    down, up = low_rank_factors(weight, 2)
    assert torch.allclose(down, torch.tensor([[0.0, 3**0.5], [2**0.5, 0.0]]), atol=1e-6)
    assert torch.allclose(up, torch.tensor([[-(3**0.5), 0.0], [0.0, 2**0.5]]), atol=1e-6)


def test_factors_keep_the_largest_singular_values() -> None:
    weight = torch.diag(torch.tensor([4.0, 1.0, 9.0]))
    down, up = low_rank_factors(weight, 2)
    torch.testing.assert_close(up @ down, torch.diag(torch.tensor([4.0, 0.0, 9.0])))
    torch.testing.assert_close(down.norm(dim=1), torch.tensor([3.0, 2.0]))  # roots of 9 and 4, on either side
    torch.testing.assert_close(up.norm(dim=0), torch.tensor([3.0, 2.0]))


@pytest.mark.parametrize(
    ("ranks", "total", "reduction"),
    [
        ((100, 50, 24), 287_658, 0.0656),  # saves 20,000 + 136 + 48
        ((80, 40, 16), 253_074, 0.1779),  # saves 54,400 + 320 + 48
    ],
)
def test_ppfe_low_rank_model_sizes(ranks: tuple[int, int, int], total: int, reduction: float) -> None:
    ranks_by_layer = dict(zip(("fc1", "fc2", "head"), ranks, strict=True))
    dense = build_model("cnn-3fc", CIFAR, seed=0)
    low = build_model("cnn-3fc", CIFAR, seed=0, ranks=ranks_by_layer)
    assert dense.fully_connected == ("fc1", "fc2", "head") == low.fully_connected
    assert count(low) == total
    assert 1 - count(low) / count(dense) == pytest.approx(reduction, abs=5e-5)
    assert low(batch(CIFAR)).shape == (2, 10)
    assert low.embedding_dim == 64


def test_dropout_by_hand() -> None:
    """With p = 0.6, smaller numbers set a feature to 0, and others multiply it by 2½. Evaluation changes nothing."""
    layer = Dropout(3, 0.6)
    x = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    layer.numbers = torch.tensor([[0.0, 0.59, 0.61], [0.6, 0.99, 0.3]])
    torch.testing.assert_close(layer(x), torch.tensor([[0.0, 0.0, 10.0], [2.5, 5.0, 0.0]]))
    assert torch.equal(layer.eval()(x), x)
    assert "numbers" not in layer.state_dict()


def test_invalid_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"conv1.*fc1, fc2, head"):
        build_model("cnn-3fc", CIFAR, seed=0, ranks={"conv1": 3})
    with pytest.raises(ValueError, match="rank = 0"):
        build_model("cnn-3fc", CIFAR, seed=0, ranks={"fc1": 0})


# Two branches


def test_sharing_levels() -> None:
    lenet = build_model("lenet-gn", CIFAR, seed=0)
    assert [shared_blocks(lenet, level) for level in SHARING] == [0, 1, 2, 4]
    resnet = build_model("resnet18-gn", DIGITS, seed=0)
    assert [shared_blocks(resnet, level) for level in SHARING] == [0, 1, 3, 5]
    assert [shared_blocks(build_model("linear", CIFAR, seed=0), level) for level in SHARING] == [0, 0, 0, 0]


def test_client_branch_size_by_sharing_level() -> None:
    """LeNet's blocks hold 2,496, 51,392, 820,736, 131,840 and 33,152 parameters, and a head for 5 clients 128·5+5."""
    expected = {"none": 1_039_616, "shallow": 1_037_120, "mid": 985_728, "deep": 33_152}
    for level, size in expected.items():
        model = build_model("lenet-gn", CIFAR, seed=0)
        two = TwoBranch(model, 5, level)
        assert count(two.client_blocks) == size
        assert count(two) == count(model) + size + 645


@pytest.mark.parametrize("name", TASKS)
def test_two_branches_share_only_the_lower_blocks(name: str) -> None:
    task = TASKS[name]
    model = build_model(name, task, seed=0)
    two = TwoBranch(model, 7)
    x = batch(task)
    calls = []
    for block in list(model.blocks.values())[: two.shared_blocks]:
        block.register_forward_hook(lambda *_: calls.append(1))
    classes, clients = two(x)
    assert len(calls) == two.shared_blocks  # once each
    assert tuple(two.client_blocks) == model.layer_names[:-1][-1:]
    assert classes.shape == (2, task.num_classes)
    assert clients.shape == (2, 7)
    assert torch.equal(classes, model(x))
    gradients = torch.autograd.grad(clients.sum(), list(model.parameters()), allow_unused=True)
    deep = {id(p) for b in list(model.blocks.values())[: two.shared_blocks] for p in b.parameters()}
    assert all((g is not None) == (id(p) in deep) for g, p in zip(gradients, model.parameters(), strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_conditional_policy_works_with_every_network(name: str) -> None:
    task = TASKS[name]
    model = build_model(name, task, seed=0).eval()
    first, second, other = (Conditional(model, seed=seed).eval() for seed in (0, 0, 1))
    x = batch(task)
    features, logits = first(x, True)
    assert logits.shape == (2, task.num_classes) and torch.equal(features, model.body(x))
    assert torch.equal(logits, second(x)) and not torch.equal(logits, other(x))
    layers = Architecture(name, task).extended(Conditional).layout.layers
    assert set(layers) == {*model.layer_names, "policy", "global-head"}


def test_client_branch_weights_depend_on_its_seed() -> None:
    model = build_model("lenet-gn", CIFAR, seed=0)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second, other = (TwoBranch(model, 10, "none", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    branch_parameters = dict(first.client_blocks.named_parameters())
    for key, parameter in second.client_blocks.named_parameters():
        assert torch.equal(branch_parameters[key], parameter)
    weights = {key: p for key, p in model.blocks.named_parameters() if p.dim() > 1}
    assert all(not torch.equal(branch_parameters[key], p) for key, p in weights.items())
    assert all(
        abs(torch.corrcoef(torch.stack([branch_parameters[k].ravel(), p.ravel()]))[0, 1]) < 0.25
        for k, p in weights.items()
    )
    assert not torch.equal(first.client_head.weight, model.head.weight)
    assert not torch.equal(first.client_head.weight, other.client_head.weight)


def test_kaiming_initialisation_of_linear_layers() -> None:
    """Weights have standard deviation √(2 / inputs) and biases are 0. Convolutions and norms do not change."""
    plain = Architecture("lenet-gn", CIFAR).extended(TwoBranch, num_clients=5)
    first, again = (replace(plain, linear_init="kaiming").build(3) for _ in range(2))
    tensors, before = first.state_dict(), plain.build(3).state_dict()
    for name, module in first.named_modules():
        if isinstance(module, nn.Linear):
            deviation = math.sqrt(2 / module.in_features)
            assert module.weight.std().item() == pytest.approx(deviation, rel=0.1), name
            assert module.weight.abs().max() > 2.2 * deviation  # a uniform distribution would end at √3
            assert not module.bias.any()
        elif next(module.children(), None) is None:
            assert all(torch.equal(t, before[f"{name}.{key}"]) for key, t in module.state_dict().items())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in again.state_dict().items())
    classes, clients = tensors["model.blocks.fc3.linear.weight"], tensors["client_blocks.fc3.linear.weight"]
    assert torch.corrcoef(torch.stack([classes.ravel(), clients.ravel()]))[0, 1].abs() < 0.05


def test_kaiming_initialisation_skips_cosine_heads() -> None:
    plain = Architecture("mlp", FEATURES).extended(with_cosine_head, classes=FEATURES.num_classes, scale=10.0)
    kaiming = replace(plain, linear_init="kaiming")
    assert torch.equal(plain.build(1).head.weight, kaiming.build(1).head.weight)
    assert not torch.equal(plain.build(1).blocks["fc1"].linear.weight, kaiming.build(1).blocks["fc1"].linear.weight)


# Models for each kind of data


def test_auto_selects_a_model_by_task() -> None:
    assert resolve("auto", CIFAR) == resolve("auto", Task("image", (1, 20, 20), TEN)) == "cnn"
    assert resolve("auto", DIGITS) == resolve("auto", Task("image", (1, 32, 19), TEN)) == "mlp"
    assert resolve("auto", FEATURES) == "mlp"
    assert resolve("auto", NEWS) == "fasttext"
    assert resolve("textcnn", NEWS) == "textcnn"
    assert build_model("auto", DIGITS, seed=0).layer_names == ("fc1", "fc2", "head")


@pytest.mark.parametrize(
    ("name", "task", "allowed"),
    [
        ("cnn", NEWS, "one of auto, fasttext, textcnn, lstm"),
        ("cnn", DIGITS, "one of auto, linear, mlp, resnet18-gn, resnet18-bn"),
        ("resnet18-gn", FEATURES, "one of auto, linear, mlp"),
        ("mlp", NEWS, "one of auto, fasttext, textcnn, lstm"),
        ("fasttext", CIFAR, "auto, linear, mlp, cnn, cnn-3fc, cnn-3fc-wide"),
        ("textcnn", Task("text", (4,), TEN, vocabulary=9), "one of auto, fasttext, lstm"),
        ("vgg", FEATURES, "one of auto, linear, mlp"),
    ],
)
def test_unsuitable_model_error_lists_allowed_models(name: str, task: Task, allowed: str) -> None:
    with pytest.raises(SettingsError, match=f"^model = '{name}'.*{allowed}"):
        build_model(name, task, seed=0)


def test_smallest_images_of_the_convolutional_networks() -> None:
    smallest = Task("image", (1, 16, 16), TEN)
    assert build_model("cnn", smallest, seed=0)(batch(smallest)).shape == (2, 10)
    with pytest.raises(SettingsError, match="1×15×16"):
        build_model("cnn", Task("image", (1, 15, 16), TEN), seed=0)
