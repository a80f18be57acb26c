"""The engine of one machine: side by side, in processes, on threads and one after the other, clients do the same."""

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
    """Return everything that is left after a run: the server's arrays, and each client's."""
    arrays = {f"server {k}": v for k, v in state_of(finished.strategy).items()}
    for client in range(finished.strategy.num_clients):
        arrays |= {f"client {client} {k}": v for k, v in finished.kept(client).items()}
    return arrays


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        known = np.isfinite(array)
        np.testing.assert_array_equal(np.isfinite(found[name]), known, err_msg=name)
        distance = np.linalg.norm((found[name] - array)[known])
        assert distance <= SAME * np.linalg.norm(array[known]), name


@every_method
@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_stacked_training_matches_sequential_training(make_config, federate, method, model):
    alone = ("fedrep", "fedper", "fedbabu", "fednh", "pfedfda", "confree", "fedpac", "fedas")
    if method in alone and model == "linear":
        pytest.skip("a single layer leaves nothing to share, or to train")
    # PPFE's factors turn where singular values are close, so its comparison is without them.
    settings = {"momentum": 0.5, "weight_decay": 0.01, "local_epochs": 2, "fraction_train": 0.75}
    settings |= {"model": model, "ppfe_reduction": "none"}
    alone = federate(make_config(method, stack="loop", **settings))
    together = federate(make_config(method, stack="vmap", **settings))
    assert_same(states(together), states(alone))
    for found, expected in zip(together.records, alone.records, strict=True):
        assert found.clients.keys() == expected.clients.keys()
        for client, row in expected.clients.items():
            assert found.clients[client].pop("chosen", "") == row.pop("chosen", "")
            assert found.clients[client] == pytest.approx(row, rel=1e-4)


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
    alone = federate(make_config(method, data=data, stack="loop", **settings))
    together = federate(make_config(method, data=data, stack="vmap", **settings))
    assert_same(states(together), states(alone))


OWN = {"fedfew_batches": "own", "fedfew_initialisation": "same", "batch_size": 4, "local_epochs": 2}


def test_stacked_models_with_separate_batches_match_sequential_training(make_config, federate):
    """Also where images are augmented: by random numbers of each model's own."""
    rng = np.random.default_rng(0)
    y = np.arange(36) % 3
    x = (rng.integers(0, 200, (36, 28, 28, 1)) + 20 * y[:, None, None, None]).astype(np.uint8)
    data = (x, y, [range(9), range(9, 16), range(16, 29)], [range(29, 31), range(31, 34), range(34, 36)])
    images = {"data": data, "model": "cnn", "augment": "crop", "num_server_rounds": 1}
    for settings in ({"model": "mlp", "momentum": 0.5, "fraction_train": 0.75}, images):
        alone, together = (federate(make_config("fedfew", stack=s, **OWN | settings)) for s in ("loop", "vmap"))
        assert_same(states(together), states(alone))
        models = alone.strategy.models
        assert np.abs(models[0] - models[1]).max() > 1e-4 and np.abs(models[1] - models[2]).max() > 1e-4


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_models_with_separate_batches_match_across_processes(make_config, federate, where, stack):
    results = {}
    for place in ("one after the other", "processes"):
        where(place)
        results[place] = states(federate(make_config("fedfew", stack=stack, model="mlp", **OWN)))
    for name, array in results["one after the other"].items():
        np.testing.assert_array_equal(results["processes"][name], array, err_msg=name)


PLACES = ["one after the other", "threads", "processes"]


@pytest.fixture
def where(monkeypatch):
    """Return what lets clients that are not stacked be trained at one of the places."""

    def choose(place):
        monkeypatch.setattr(Workspace, "workers", 1 if place == "one after the other" else 3)
        monkeypatch.setattr(Workers, "possible", lambda: place == "processes")

    return choose


@pytest.mark.parametrize(
    ("method", "more"), [("ditto", {}), ("ppfe", {}), ("ppfe", {"ppfe_reduction": "svd-fedavg"}), ("fedfew", {})]
)
def test_clients_match_across_threads_and_processes(make_config, federate, where, monkeypatch, tmp_path, method, more):
    """Bit for bit: a client's arithmetic does not depend on who else is trained, on the thread, or on the process."""
    results, train = {}, Trainer.train_together
    for place in PLACES:
        where(place)
        used = tmp_path / place.replace(" ", "-")

        def noted(*arguments, used=used):
            with used.open("a") as file:
                file.write(f"{os.getpid()} {threading.get_ident()}\n")
            return train(*arguments)

        monkeypatch.setattr(Trainer, "train_together", noted)
        results[place] = states(federate(make_config(method, stack="loop", model="mlp", **more)))
        processes, threads = zip(*(line.split() for line in used.read_text().splitlines()), strict=True)
        here = f"{os.getpid()}", f"{threading.get_ident()}"
        assert (set(processes) == {here[0]}) is (place != "processes") and len(set(processes)) <= 3
        assert (set(threads) == {here[1]}) is (place != "threads")
    for place in PLACES[1:]:
        for name, array in results[PLACES[0]].items():
            np.testing.assert_array_equal(results[place][name], array, err_msg=f"{place}: {name}")


def test_no_process_is_forked_after_gpu_use(make_config, federate, where, monkeypatch):
    """Autograd's threads for GPUs would not be there, and PyTorch refuses to differentiate without them."""
    where("processes")
    monkeypatch.setattr(Workers, "run", lambda *arguments: pytest.fail("a process is forked"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert states(federate(make_config("fedavg", stack="loop")))


@pytest.mark.parametrize(
    ("available", "criterion", "forks"), [(False, True, True), (True, False, True), (True, True, False)]
)
def test_a_custom_loss_prevents_forking_with_a_gpu(make_config, monkeypatch, available, criterion, forks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(Workspace, "criterion", torch.nn.functional.cross_entropy if criterion else None)
    assert Workspace(read_settings(make_config("fedavg"))).forks is forks


def test_processes_end_with_the_run(make_config, where):
    where("processes")
    before = set(multiprocessing.active_children())
    recorder = run(None, make_config("fedavg", stack="loop", model="mlp"))
    assert recorder.summary["status"] == "completed"
    assert set(multiprocessing.active_children()) <= before  # those of earlier tests may end, too


def test_a_killed_process_drops_its_client_for_the_round(make_config, federate, where, monkeypatch):
    where("processes")
    begin = LocalRun.__init__

    def dying(self, *arguments):
        begin(self, *arguments)
        if self.client.client == 1 and self.client.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(LocalRun, "__init__", dying)
    finished = federate(make_config("ditto", stack="loop", model="mlp"))
    dropped = [record.dropped for record in finished.records]
    assert [len(each) for each in dropped] == [0, 2, 0]  # its training and its evaluation
    assert all(client == 1 and "died by signal 9" in reason for client, reason in dropped[1])


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_only_the_diverged_client_is_dropped(make_config, federate, monkeypatch, stack):
    """Client 2 diverges at its first step: of the others nothing changes."""

    begin = LocalRun.__init__

    def poisoned(self, *arguments):
        begin(self, *arguments)
        if self.client.client == 2:
            self.client.lr = float("inf")

    monkeypatch.setattr(LocalRun, "__init__", poisoned)
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
    plain = PersonalClient.work

    def work(self, start):
        if self.client not in (1, 2):
            return plain(self, start)
        return replace(fault, start=start) if isinstance(fault, Train) else fault

    monkeypatch.setattr(PersonalClient, "work", work)
    with pytest.raises((KeyError, ValueError, AttributeError)) as raised:
        federate(make_config("fedavg", stack=stack, model="mlp"))
    assert raised.value.__notes__[-1] == "Client 1 raised this error in round 1."


def test_only_the_store_keeps_states_in_memory(make_config, federate, monkeypatch, tmp_path):
    models, alive = [], []

    class Watched(InProcessGrid):
        def __init__(self, num_clients):
            super().__init__(num_clients)
            self.states = MemoryStore(tmp_path, limit=1)

    close = Call.close

    def noted(call, result):
        models.extend(weakref.ref(array) for array in call._state.values())
        reply = close(call, result)
        alive.append(sum(model() is not None for model in models))
        return reply

    monkeypatch.setattr(Call, "close", noted)
    federate(make_config("local", stack="loop", model="mlp"), grid=Watched)
    assert len(models) > 8
    assert max(alive) <= 2  # of the two that are in hand


def test_unused_reserved_gpu_memory_counts_as_free(monkeypatch):
    """After a round that has filled the device, the next one must not go on in smaller pieces."""
    total, used = 80 << 30, 1 << 30
    trainer = Trainer(TrainSettings(), torch.device("cpu"))
    trainer.device = torch.device("cuda")
    network = SimpleNamespace(size=11_000_000, layout=SimpleNamespace(size=11_000_000))
    found = []
    for reserved in (used, 40 << 30, total):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, r=reserved: (total - r, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, r=reserved: r)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used)
        found.append(trainer.capacity(network))
    assert found == [int(0.8 * (total - used)) // (40 * 11_000_000)] * 3


def test_a_cohort_larger_than_memory_is_trained_in_pieces(make_config, federate, monkeypatch, where):
    where("one after the other")
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
    found = states(federate(make_config("fedavg", stack="vmap", model="mlp")))
    assert sizes == [2, 2] * 3
    assert_same(found, expected)
    monkeypatch.setattr(Trainer, "train_together", train)
    monkeypatch.setattr(Trainer, "capacity", lambda self, network: 3)
    assert_same(states(federate(make_config("fedavg", stack="vmap", model="mlp"))), expected)


@pytest.mark.parametrize("method", ["ditto", "ppfe", "fedfew", "feddrm"])
def test_stacks_match_across_processes(make_config, federate, where, monkeypatch, tmp_path, method):
    """Bit for bit: how many cores there are does not decide who is stacked with whom."""
    results, sizes, train = {}, {}, Trainer.train_together
    for place in ("one after the other", "processes"):
        where(place)
        noted_in = tmp_path / place.replace(" ", "-")

        def noted(self, jobs, network, noted_in=noted_in):
            with noted_in.open("a") as file:
                file.write(f"{os.getpid()} {len(jobs)}\n")
            return train(self, jobs, network)

        monkeypatch.setattr(Trainer, "train_together", noted)
        results[place] = states(federate(make_config(method, stack="vmap", model="mlp")))
        processes, counts = zip(*(line.split() for line in noted_in.read_text().splitlines()), strict=True)
        sizes[place] = sorted(counts)
        assert "2" in counts and (f"{os.getpid()}" in processes) is (place != "processes")
    assert sizes["processes"] == sizes["one after the other"]
    for name, array in results["one after the other"].items():
        np.testing.assert_array_equal(results["processes"][name], array, err_msg=name)


def test_groups_are_few_and_of_similar_size():
    assert evenly(range(7), 3) == [range(1), range(1, 3), range(3, 5), range(5, 7)]
    assert evenly(range(4), 4) == [range(4)]
    assert evenly(range(4), 1) == [range(i, i + 1) for i in range(4)]
    trainer = Trainer(TrainSettings(), torch.device("cpu"))
    large, small = (SimpleNamespace(size=size, layout=SimpleNamespace(size=size)) for size in (1 << 17, 1 << 15))
    assert [trainer.together(large, clients) for clients in (2, 3, 5, 30, 1000)] == [2, 2, 3, 15, 16]
    assert [trainer.together(small, clients) for clients in (2, 3, 5, 30, 1000)] == [2, 2, 3, 15, 32]


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_ends_all_training(make_config, federate, monkeypatch, where, place):
    where(place)
    before = set(multiprocessing.active_children())
    begun = multiprocessing.Event()
    replay = Trainer._run

    def noted(self, *args):
        begun.set()
        return replay(self, *args)

    monkeypatch.setattr(Trainer, "_run", noted)
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
    assert set(multiprocessing.active_children()) <= before  # those of earlier tests may end, too


def test_an_interrupt_while_clients_are_submitted_ends_their_training(make_config, federate, monkeypatch, where):
    where("threads")
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
    taken = len(steps)
    time.sleep(0.2)
    assert len(steps) == taken


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_does_not_affect_the_next_run(make_config, federate, monkeypatch, where, place):
    """A second Ctrl-C ends the wait for the threads: the next run of the process must train all the same."""
    where(place)
    made = Engine.__init__

    def interrupted(self, workspace):
        made(self, workspace)
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
    for number in range(20):  # beside what each client alone receives
        workspace.tensor(np.full(3, number, np.float32))
        assert workspace.tensor(first) is shared


@every_method
@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_clients_do_not_modify_received_arrays(make_config, federate, method, stack):
    """Arrays pass by reference: what was sent must be the same when all have answered."""

    class Guarded(InProcessGrid):
        def _answers(self, messages, end):
            sent = [[a.numpy() for r in m.content.array_records.values() for a in r.values()] for m in messages]
            before = [[a.copy() for a in arrays] for arrays in sent]
            replies = super()._answers(messages, end)
            for now, then in zip(sent, before, strict=True):
                for array, copy in zip(now, then, strict=True):
                    np.testing.assert_array_equal(array, copy)
            return replies

    finished = federate(make_config(method, stack=stack, model="mlp"), grid=Guarded)
    assert all(not record.dropped for record in finished.records)
