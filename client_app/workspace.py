"""What a client process keeps resident: data set, partition, networks, the clients' tensors."""

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from threading import RLock, local
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from posy.allocator import keep_freed_memory
from posy.client_app.training.batches import Augment
from posy.client_app.training.losses import criterion_of
from posy.client_app.training.networks import Network
from posy.client_app.training.trainer import Trainer
from posy.client_app.training.work import Criterion
from posy.data.agreement import task_of
from posy.data.augment import Change, Draw, augmentation
from posy.data.client import ClientData, client_data
from posy.data.dataset import Dataset
from posy.data.datasets import load_clients
from posy.data.errors import DataError
from posy.data.inputs import Preprocessing
from posy.data.partitions import Partition
from posy.data.settings import SITES
from posy.data.sites import fingerprint, load_site, read_site
from posy.data.task import Task
from posy.forked import cores
from posy.models.architecture import Architecture, architecture_for
from posy.paths import expanded
from posy.settings import SettingsError
from posy.sharing import Once
from posy.strategies.settings import Settings

CACHED_PART = 0.25
"""Part of the device's memory that the clients' tensors of all processes may take."""
REMEMBERED = 8
"""Number of arrays kept on the device because several clients need them: initial models, and as many from messages."""


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names, or raise :class:`SettingsError` if there is none of that name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", name)
    if not known:
        raise SettingsError(f"device = {name!r}: it must be auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(known[1] or 0) >= torch.cuda.device_count():
        raise SettingsError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def plain_architecture(settings: Settings, task: Task, words: Sequence[str] = ()) -> Architecture:
    """Return the network that the settings ask for, before a method changes it; ``words`` are those of texts."""
    train, folder = settings.train, settings.data.data_dir
    start, digest = (train.linear_init, train.weights, train.frozen), train.weights_sha256
    return architecture_for(train.model, task, *start, digest=digest, words=words, folder=folder)


class Workspace:
    """Data, networks and trainer of one process, shared by all clients that it serves.

    Where ``dataset`` is ``sites``, ``site`` is the path of the node's own data (the server has none), and
    ``skip_unreadable`` says whether the node goes on without image files that cannot be read.
    """

    def __init__(self, settings: Settings, site: str = "", skip_unreadable: bool = False) -> None:
        self.settings = settings
        self.site = site
        self.skip_unreadable = skip_unreadable
        self.of_sites = settings.data.dataset == SITES
        self.device = choose_device(settings.train.device)
        if self.device.type == "cpu":
            keep_freed_memory()
            if settings.train.threads:
                torch.set_num_threads(settings.train.threads)
        self.trainer = Trainer(settings.train, self.device)
        self._local = local()
        self._clients: dict[int, ClientData] = {}
        self._cached = 0
        self.processes = cores()
        """Processes that share this machine's memory: there may be a client's on each core."""
        self._lock = RLock()
        self._initial = lru_cache(REMEMBERED)(lambda architecture, seed: self._moved(architecture.initial(seed)))
        self._received = Once(self._moved, REMEMBERED)

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, loaded once: that of all clients, or the site's own."""
        return self._loaded[0]

    @cached_property
    def partition(self) -> Partition:
        """Which samples each client has; a site's has one client."""
        return self._loaded[1]

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of a site's data and its split; it changes with any of them."""
        return fingerprint(self.dataset, self.partition)

    @cached_property
    def task(self) -> Task:
        """Kind, shape and classes of the samples."""
        return task_of(self.settings.data) if self.of_sites else self.dataset.task

    @cached_property
    def preprocessing(self) -> str:
        """What is done to samples before a network sees them, as JSON."""
        return Preprocessing.of(self.dataset).to_json()

    @cached_property
    def architecture(self) -> Architecture:
        """The plain network of the run."""
        words = self.dataset.words if self.settings.train.weights and not self.of_sites else ()
        return plain_architecture(self.settings, self.task, words)

    @cached_property
    def criterion(self) -> Criterion | None:
        """What training minimises for each sample, where it is not the cross-entropy."""
        return criterion_of(self.settings.train.loss)

    def augment(self, generator: Callable[[], torch.Generator]) -> Augment | None:
        """Return the training augmentation, if the settings ask for one."""
        return Augment(*self._augmentation, generator()) if self._augmentation else None

    @cached_property
    def _augmentation(self) -> tuple[Draw, Change] | None:
        data = self.settings.data
        mean, std = (torch.from_numpy(value).to(self.device) for value in (self.dataset.mean, self.dataset.std))
        return augmentation(data.augment, data.transforms, mean, std)

    def part_of(self, client: int) -> int:
        """Return a client's place in the partition; that of a site with its own data is 0."""
        return 0 if self.of_sites else client

    def client_data(self, client: int) -> ClientData:
        """Return a client's tensors, made when it is first asked for and kept if there is room.

        What is kept stays: clients take turns, so the one dropped to make room would be the next to be needed.
        """
        with self._lock:
            data = self._clients.get(client)
            if data is None:
                part, settings = self.part_of(client), self.settings
                data = client_data(
                    self.dataset, self.partition, part, settings.data, self.device, seed=settings.run.seed
                )
                if self._cached + data.nbytes <= self._room:
                    self._clients[client] = data
                    self._cached += data.nbytes
            return data

    def load_clients(self) -> None:
        """Make the tensors of all clients, as far as there is room."""
        for client in range(self.settings.data.num_clients):
            if self._cached >= self._room:
                return
            self.client_data(client)

    def network(self, architecture: Architecture) -> Network:
        """Return the resident network of an architecture; every thread has its own."""
        networks: dict[Architecture, Network] = self._local.__dict__.setdefault("networks", {})
        if architecture not in networks:
            networks[architecture] = Network(architecture.build, architecture.layout, self.device, self.criterion)
        return networks[architecture]

    def initial(self, architecture: Architecture, seed: int) -> Tensor:
        """Return freshly initialised parameters ``(d,)``, made once for all clients: they must not be written to."""
        with self._lock:
            return self._initial(architecture, seed)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array on the device; one that came before, as for clients of one model, is not moved again.

        It shares the array's memory where it can, and must not be written to.
        """
        return self._received(array)

    @property
    def workers(self) -> int:
        """Clients that are trained at the same time: one on each core, or one on a GPU."""
        threads = self.settings.train.threads
        return max(1, cores() // threads) if self.device.type == "cpu" and threads else 1

    @property
    def forks(self) -> bool:
        """Whether forked processes can train: autograd's threads for GPUs, once started, do not survive a fork."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        tried = self.criterion is not None and torch.cuda.is_available()  # with its gradient
        return not used and not tried

    @cached_property
    def _room(self) -> int:
        """Bytes that clients' tensors may take."""
        if self.device.type == "cuda":
            return int(CACHED_PART * torch.cuda.get_device_properties(self.device).total_memory)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
        return int(CACHED_PART * memory) // self.processes

    def _moved(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)

    @cached_property
    def _loaded(self) -> tuple[Dataset, Partition]:
        data, seed = self.settings.data, self.settings.run.seed
        if not self.of_sites:
            return load_clients(data, Path(data.data_dir), seed)
        return load_site(read_site(data_path(self.site), data, self.skip_unreadable), data, seed)


@lru_cache(maxsize=1)
def workspace_for(settings: Settings, site: str, skip_unreadable: bool = False, /) -> Workspace:
    """Return this process's workspace for some settings; a change of settings replaces it."""
    return Workspace(settings, site, skip_unreadable)


def data_path(site: str) -> Path:
    """Return the path of a node's own data, or raise :class:`DataError` if it has none."""
    if not site:
        raise DataError("this node holds no data: its node config needs data, as in --node-config 'data=\"/srv/site\"'")
    return expanded(site)
