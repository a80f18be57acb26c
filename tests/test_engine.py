"""The engine of one machine gives the same results stacked, in processes, on threads and sequentially."""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posy.client_app.app import Call
from posy.client_app.base import PersonalClient
from posy.client_app.engine import Engine, evenly
from posy.client_app.local_run import LocalRun
from posy.client_app.state import MemoryStore
from posy.client_app.training.optimiser import Optimiser
from posy.client_app.training.trainer import Trainer
from posy.client_app.training.work import Train
from posy.client_app.workspace import Workspace
from posy.forked import Workers
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings
from posy.strategies.run_settings import TrainSettings
from posy.strategies.server_state import state_of

SAME = 1e-5  # relative, in norm
every_method = pytest.mark.parametrize("method", sorted(METHODS))


def states(finished):
    """Return the final arrays of the server and of each client."""
    arrays = {f"server {k}": v for k, v in state_of(finished.strategy).items()}
    for client in range(finished.strategy.num_clients):
        arrays |= {f"client {client} {k}": v for k, v in finished.kept(client).items()}
    return arrays


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        finite = np.isfinite(array)
        np.testing.assert_array_equal(np.isfinite(actual[name]), finite, err_msg=name)
        distance = np.linalg.norm((actual[name] - array)[finite])
        assert distance <= SAME * np.linalg.norm(array[finite]), name


@every_method
@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_stacked_training_matches_sequential_training(make_config, federate, method, model):
    two_layer_methods = ("fedrep", "fedper", "fedbabu", "fednh", "pfedfda", "confree", "fedpac", "fedas")
    if method in two_layer_methods and model == "linear":
        pytest.skip("a single layer leaves nothing to share or to train")
    # PPFE's factors turn where singular values are close, so its comparison is without them.
    settings = {"momentum": 0.5, "weight_decay": 0.01, "local_epochs": 2, "fraction_train": 0.75}
    settings |= {"model": model, "ppfe_reduction": "none"}
    sequential = federate(make_config(method, stack="loop", **settings))
    stacked = federate(make_config(method, stack="vmap", **settings))
    assert_same(states(stacked), states(sequential))
    for actual, expected in zip(stacked.records, sequential.records, strict=True):
        assert actual.clients.keys() == expected.clients.keys()
        for client, row in expected.clients.items():
            assert actual.clients[client].pop("chosen", "") == row.pop("chosen", "")
            assert actual.clients[client] == pytest.approx(row, rel=1e-4)


WIDE = {"model": "cnn-3fc-wide", "augment": "crop-flip"}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((method, {}) for method in ("fedfew", "cwfedavg")),
        *((method, WIDE) for method in ("fedavg", "feddrm", "fedcp", "moon", "per-fedavg", "ppfe")),
    ],
)
def test_stacked_convolutions_match_sequential_training(make_config, federate, method, more):
    rng = np.random.default_rng(0)
    y = np.arange(36) % 3
    x = (rng.integers(0, 200, (36, 28, 28, 1)) + 20 * y[:, None, None, None]).astype(np.uint8)
    data = (x, y, [range(9), range(9, 16), range(16, 29)], [range(29, 31), range(31, 34), range(34, 36)])
    settings = {"model": "cnn", "batch_size": 4, "num_server_rounds": 2, "augment": "crop", "ppfe_stages": 2, **more}
    sequential = federate(make_config(method, data=data, stack="loop", **settings))
    stacked = federate(make_config(method, data=data, stack="vmap", **settings))
    assert_same(states(stacked), states(sequential))


SEPARATE_BATCHES = {"fedfew_batches": "own", "fedfew_initialisation": "same", "batch_size": 4, "local_epochs": 2}


def test_stacked_models_with_separate_batches_match_sequential_training(make_config, federate):
    """Augmentation also uses separate random numbers for each model."""
    rng = np.random.default_rng(0)
    y = np.arange(36) % 3
    x = (rng.integers(0, 200, (36, 28, 28, 1)) + 20 * y[:, None, None, None]).astype(np.uint8)
    data = (x, y, [range(9), range(9, 16), range(16, 29)], [range(29, 31), range(31, 34), range(34, 36)])
    images = {"data": data, "model": "cnn", "augment": "crop", "num_server_rounds": 1}
    for settings in ({"model": "mlp", "momentum": 0.5, "fraction_train": 0.75}, images):
        sequential, stacked = (
            federate(make_config("fedfew", stack=s, **SEPARATE_BATCHES | settings)) for s in ("loop", "vmap")
        )
        assert_same(states(stacked), states(sequential))
        models = sequential.strategy.models
        assert np.abs(models[0] - models[1]).max() > 1e-4 and np.abs(models[1] - models[2]).max() > 1e-4


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_models_with_separate_batches_match_across_processes(make_config, federate, use_mode, stack):
    results = {}
    for mode in ("sequential", "processes"):
        use_mode(mode)
        results[mode] = states(federate(make_config("fedfew", stack=stack, model="mlp", **SEPARATE_BATCHES)))
    for name, array in results["sequential"].items():
        np.testing.assert_array_equal(results["processes"][name], array, err_msg=name)


MODES = ["sequential", "threads", "processes"]


@pytest.fixture
def use_mode(monkeypatch):
    """Return a function that selects the mode in which clients without stacking are trained."""

    def choose(mode):
        monkeypatch.setattr(Workspace, "workers", 1 if mode == "sequential" else 3)
        monkeypatch.setattr(Workers, "possible", lambda: mode == "processes")

    return choose


@pytest.mark.parametrize(
    ("method", "more"), [("ditto", {}), ("ppfe", {}), ("ppfe", {"ppfe_reduction": "svd-fedavg"}), ("fedfew", {})]
)
def test_clients_match_across_threads_and_processes(
    make_config, federate, use_mode, monkeypatch, tmp_path, method, more
):
    """Results are bit-identical: they depend neither on other clients nor on the thread or process."""
    results, train = {}, Trainer.train_together
    for mode in MODES:
        use_mode(mode)
        log_file = tmp_path / mode

        def record_process(*arguments, log_file=log_file):
            with log_file.open("a") as file:
                file.write(f"{os.getpid()} {threading.get_ident()}\n")
            return train(*arguments)

        monkeypatch.setattr(Trainer, "train_together", record_process)
        results[mode] = states(federate(make_config(method, stack="loop", model="mlp", **more)))
        processes, threads = zip(*(line.split() for line in log_file.read_text().splitlines()), strict=True)
        assert (set(processes) == {f"{os.getpid()}"}) is (mode != "processes") and len(set(processes)) <= 3
        assert (set(threads) == {f"{threading.get_ident()}"}) is (mode != "threads")
    for mode in MODES[1:]:
        for name, array in results[MODES[0]].items():
            np.testing.assert_array_equal(results[mode][name], array, err_msg=f"{mode}: {name}")


def test_no_process_is_forked_after_gpu_use(make_config, federate, use_mode, monkeypatch):
    """A forked process has no autograd threads for GPUs, and PyTorch refuses to differentiate without them."""
    use_mode("processes")
    monkeypatch.setattr(Workers, "run", lambda *arguments: pytest.fail("a process is forked"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert states(federate(make_config("fedavg", stack="loop")))


@pytest.mark.parametrize(
    ("available", "criterion", "forks"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_a_custom_loss_prevents_forking_with_a_gpu(make_config, monkeypatch, available, criterion, forks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    settings = read_settings(make_config("fedavg"))
    train = replace(settings.train, loss="losses:focal" if criterion else "auto")
    assert Workspace(replace(settings, train=train)).forks is forks


def test_processes_end_with_the_run(make_config, use_mode):
    use_mode("processes")
    before = set(multiprocessing.active_children())
    recorder = run(None, make_config("fedavg", stack="loop", model="mlp"))
    assert recorder.summary["status"] == "completed"
    assert set(multiprocessing.active_children()) <= before  # processes of earlier tests may also end


def test_a_killed_process_drops_its_client_for_the_round(make_config, federate, use_mode, monkeypatch):
    use_mode("processes")
    original = LocalRun.__init__

    def kill_process(self, *arguments):
        original(self, *arguments)
        if self.client.client == 1 and self.client.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(LocalRun, "__init__", kill_process)
    finished = federate(make_config("ditto", stack="loop", model="mlp"))
    dropped = [record.dropped for record in finished.records]
    assert [len(each) for each in dropped] == [0, 2, 0]  # its training and its evaluation
    assert all(client == 1 and "died by signal 9" in reason for client, reason in dropped[1])


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_only_the_diverged_client_is_dropped(make_config, federate, monkeypatch, stack):
    """Client 2 diverges at its first step. The other clients are not affected."""

    original = LocalRun.__init__

    def diverge(self, *arguments):
        original(self, *arguments)
        if self.client.client == 2:
            self.client.lr = float("inf")

    monkeypatch.setattr(LocalRun, "__init__", diverge)
    finished = federate(make_config("fedavg", stack=stack, model="mlp"))
    for record in finished.records:
        assert [(client, "diverged" in reason) for client, reason in record.dropped] == [(2, True)]
        assert {c for c, row in record.clients.items() if "train_loss" in row} == {0, 1, 3}


def unknown_weight(net, batch, context):
    return net["no.such.weight"].sum()


@pytest.mark.parametrize("stack", ["loop", "vmap"])
@pytest.mark.parametrize(
    "fault",
    [Train(torch.zeros(0), unknown_weight), Train(torch.zeros(0), rates={"no-such-layer": 0.5}), "no request"],
    ids=["objective", "rates", "request"],
)
def test_a_faulty_request_raises_with_client_and_round(make_config, federate, monkeypatch, stack, fault):
    original = PersonalClient.work

    def work(self, start):
        if self.client not in (1, 2):
            return original(self, start)
        return replace(fault, start=start) if isinstance(fault, Train) else fault

    monkeypatch.setattr(PersonalClient, "work", work)
    with pytest.raises((KeyError, ValueError, AttributeError)) as raised:
        federate(make_config("fedavg", stack=stack, model="mlp"))
    assert raised.value.__notes__[-1] == "Client 1 raised this error in round 1."


def test_only_the_store_keeps_states_in_memory(make_config, federate, monkeypatch, tmp_path):
    models, alive = [], []

    class SmallStoreGrid(InProcessGrid):
        def __init__(self, num_clients):
            super().__init__(num_clients)
            self.states = MemoryStore(tmp_path, limit=1)

    close = Call.close

    def record_models(call, result):
        models.extend(weakref.ref(array) for array in call._state.values())
        reply = close(call, result)
        alive.append(sum(model() is not None for model in models))
        return reply

    monkeypatch.setattr(Call, "close", record_models)
    federate(make_config("local", stack="loop", model="mlp"), grid=SmallStoreGrid)
    assert len(models) > 8
    assert max(alive) <= 2  # only the two states in use


def test_unused_reserved_gpu_memory_counts_as_free(monkeypatch):
    """A round that fills the device does not reduce the capacity of the next round."""
    total, used = 80 << 30, 1 << 30
    trainer = Trainer(TrainSettings(), torch.device("cpu"))
    trainer.device = torch.device("cuda")
    network = SimpleNamespace(size=11_000_000, layout=SimpleNamespace(size=11_000_000))
    capacities = []
    for reserved in (used, 40 << 30, total):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, r=reserved: (total - r, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, r=reserved: r)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used)
        capacities.append(trainer.capacity(network))
    assert capacities == [int(0.8 * (total - used)) // (40 * 11_000_000)] * 3


def test_a_cohort_larger_than_memory_is_trained_in_pieces(make_config, federate, monkeypatch, use_mode):
    use_mode("sequential")
    monkeypatch.setattr(Trainer, "together", lambda self, network, clients: clients)
    sizes = []
    train = Trainer.train_together

    def limited(self, jobs, network):
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("too many")
        sizes.append(len(jobs))
        return train(self, jobs, network)

    expected = states(federate(make_config("fedavg", stack="vmap", model="mlp")))
    monkeypatch.setattr(Trainer, "train_together", limited)
    actual = states(federate(make_config("fedavg", stack="vmap", model="mlp")))
    assert sizes == [2, 2] * 3
    assert_same(actual, expected)
    monkeypatch.setattr(Trainer, "train_together", train)
    monkeypatch.setattr(Trainer, "capacity", lambda self, network: 3)
    assert_same(states(federate(make_config("fedavg", stack="vmap", model="mlp"))), expected)


@pytest.mark.parametrize("method", ["ditto", "ppfe", "fedfew", "feddrm"])
def test_stacks_match_across_processes(make_config, federate, use_mode, monkeypatch, tmp_path, method):
    """Results are bit-identical: the stacks do not depend on the number of cores."""
    results, sizes, train = {}, {}, Trainer.train_together
    for mode in ("sequential", "processes"):
        use_mode(mode)
        log_file = tmp_path / mode

        def record_stack(self, jobs, network, log_file=log_file):
            with log_file.open("a") as file:
                file.write(f"{os.getpid()} {len(jobs)}\n")
            return train(self, jobs, network)

        monkeypatch.setattr(Trainer, "train_together", record_stack)
        results[mode] = states(federate(make_config(method, stack="vmap", model="mlp")))
        processes, counts = zip(*(line.split() for line in log_file.read_text().splitlines()), strict=True)
        sizes[mode] = sorted(counts)
        assert "2" in counts and (f"{os.getpid()}" in processes) is (mode != "processes")
    assert sizes["processes"] == sizes["sequential"]
    for name, array in results["sequential"].items():
        np.testing.assert_array_equal(results["processes"][name], array, err_msg=name)


def test_groups_are_few_and_of_similar_size():
    assert evenly(range(7), 3) == [range(1), range(1, 3), range(3, 5), range(5, 7)]
    assert evenly(range(4), 4) == [range(4)]
    assert evenly(range(4), 1) == [range(i, i + 1) for i in range(4)]
    trainer = Trainer(TrainSettings(), torch.device("cpu"))
    large, small = (SimpleNamespace(size=size, layout=SimpleNamespace(size=size)) for size in (1 << 17, 1 << 15))
    assert [trainer.together(large, clients) for clients in (2, 3, 5, 30, 1000)] == [2, 2, 3, 15, 16]
    assert [trainer.together(small, clients) for clients in (2, 3, 5, 30, 1000)] == [2, 2, 3, 15, 32]


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow) if mode == "threads" else mode for mode in MODES]
)
def test_an_interrupt_ends_all_training(make_config, federate, monkeypatch, use_mode, mode):
    use_mode(mode)
    before = set(multiprocessing.active_children())
    begun = multiprocessing.Event()
    original = Trainer._run

    def signal_start(self, *args):
        begun.set()
        return original(self, *args)

    monkeypatch.setattr(Trainer, "_run", signal_start)
    config = make_config("fedavg", stack="loop", model="mlp", local_steps=10**7)
    main = threading.main_thread().ident

    def interrupt():
        begun.wait(30)
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        federate(config)
    thread.join()
    assert time.monotonic() - start < 60
    assert set(multiprocessing.active_children()) <= before  # processes of earlier tests may also end


@pytest.mark.slow
def test_an_interrupt_while_clients_are_submitted_ends_their_training(make_config, federate, monkeypatch, use_mode):
    use_mode("threads")
    submit, calls, steps = ThreadPoolExecutor.submit, [], []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return submit(self, *args)

    step = Optimiser.step
    monkeypatch.setattr(Optimiser, "step", lambda self, gradients: (steps.append(1), step(self, gradients))[1])
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        federate(make_config("fedavg", stack="loop", model="mlp", local_steps=10**7))
    steps_at_interrupt = len(steps)
    time.sleep(0.2)
    assert len(steps) == steps_at_interrupt


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_does_not_affect_the_next_run(make_config, federate, monkeypatch, use_mode, mode):
    """A second Ctrl-C ends the wait for the threads. The next run of the process still trains."""
    use_mode(mode)
    original = Engine.__init__

    def interrupted(self, workspace):
        original(self, workspace)
        workspace.trainer.interrupted.set()

    monkeypatch.setattr(Engine, "__init__", interrupted)
    finished = federate(make_config("fedavg", stack="loop", model="mlp"))
    assert all(not record.dropped for record in finished.records)


def test_each_received_array_is_one_shared_tensor(make_config):
    workspace = Workspace(read_settings(make_config("fedavg")))
    first, second = np.ones(3, np.float32), np.ones(3, np.float32)
    assert workspace.tensor(first) is workspace.tensor(first)
    assert workspace.tensor(second) is not workspace.tensor(first)
    assert workspace.tensor(first).data_ptr() == first.ctypes.data
    shared = workspace.tensor(first)
    for number in range(20):  # in addition to arrays for single clients
        workspace.tensor(np.full(3, number, np.float32))
        assert workspace.tensor(first) is shared


@every_method
@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_clients_do_not_modify_received_arrays(make_config, federate, method, stack):
    """Messages pass arrays by reference, so the arrays are compared with copies after all replies."""

    class ComparingGrid(InProcessGrid):
        def _answers(self, messages, end):
            sent = [[a.numpy() for r in m.content.array_records.values() for a in r.values()] for m in messages]
            before = [[a.copy() for a in arrays] for arrays in sent]
            replies = super()._answers(messages, end)
            for arrays, copies in zip(sent, before, strict=True):
                for array, copy in zip(arrays, copies, strict=True):
                    np.testing.assert_array_equal(array, copy)
            return replies

    finished = federate(make_config(method, stack=stack, model="mlp"), grid=ComparingGrid)
    assert all(not record.dropped for record in finished.records)
