"""What a client process keeps resident: data set, partition, networks, the clients' tensors."""

import os
from collections import OrderedDict
from functools import cached_property, lru_cache
from pathlib import Path
from threading import RLock, local
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from posy.client_app.training.batches import Augment
from posy.client_app.training.networks import Network
from posy.client_app.training.trainer import Trainer
from posy.data.agreement import task_of
from posy.data.augment import crop, draw_boxes
from posy.data.client import ClientData, client_data
from posy.data.dataset import Dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.partitions import Partition, partition
from posy.data.settings import SITES
from posy.data.sites import fingerprint, load_site, read_site
from posy.data.task import Task
from posy.models.architecture import Architecture, architecture_for
from posy.paths import expanded
from posy.settings import SettingsError
from posy.strategies.settings import Settings

_DEVICES = "it must be auto, cpu, cuda or cuda:N"
CACHED_PART = 0.25
"""Of the device's memory, what the clients' tensors of all processes may take."""
REMEMBERED = 8
"""Arrays kept on the device that several clients need: initial models, and what came with messages."""


def choose_device(name: str) -> torch.device:
    """Return the device that a setting names.

    Raises
    ------
    SettingsError
        If the name is not a device, or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device = {name!r}: {_DEVICES}") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device = {name!r}: {_DEVICES}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workspace:
    """Data, networks and trainer of one process, shared by all clients that it serves.

    Parameters
    ----------
    settings : Settings
        All settings of the run.
    site : str
        Path of the node's own data, where ``dataset`` is ``sites``; the server has none.
    skip_unreadable : bool
        Whether the node goes on without image files that cannot be read.
    """

    def __init__(self, settings: Settings, site: str = "", skip_unreadable: bool = False) -> None:
        self.settings = settings
        self.site = site
        self.skip_unreadable = skip_unreadable
        self.of_sites = settings.data.dataset == SITES
        self.device = choose_device(settings.train.device)
        if self.device.type == "cpu" and settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self.trainer = Trainer(settings.train, self.device)
        self._local = local()
        self._clients: dict[int, ClientData] = {}
        self._initial: OrderedDict[tuple[Architecture, int], Tensor] = OrderedDict()
        self._received: OrderedDict[int, tuple[Any, Tensor]] = OrderedDict()
        self._cached = 0
        self.processes = cores()
        """Processes that share this machine's memory: there may be a client's on each core."""
        self._lock = RLock()

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, loaded once: that of all clients, or the site's own."""
        return self._own[0] if self.of_sites else self._benchmark

    @cached_property
    def partition(self) -> Partition:
        """Which samples each client has; a site's has one client."""
        return self._own[1] if self.of_sites else partition(self.dataset, self.settings.data, self.settings.run.seed)

    @cached_property
    def fingerprint(self) -> str:
        """Of a site's data and its split; any change changes it."""
        return fingerprint(self.dataset, self.partition)

    @cached_property
    def task(self) -> Task:
        """Kind, shape and classes of the samples."""
        return task_of(self.settings.data) if self.of_sites else self.dataset.task

    @cached_property
    def architecture(self) -> Architecture:
        """The plain network of the run."""
        return architecture_for(self.settings.train.model, self.task)

    def augment(self, generator: torch.Generator) -> Augment | None:
        """Return the training augmentation, if the settings ask for one."""
        return Augment(draw_boxes, crop, generator) if self.settings.data.augment == "crop" else None

    def part_of(self, client: int) -> int:
        """Return a client's place in the partition: a site with its own data is all there is of it."""
        return 0 if self.of_sites else client

    def client_data(self, client: int) -> ClientData:
        """Return a client's tensors, made when it is first asked for and kept if there is room.

        Those that are kept stay: clients come in turns, so that to make room for one is to lose the next.
        """
        with self._lock:
            data = self._clients.get(client)
            if data is None:
                data = client_data(self.dataset, self.partition, self.part_of(client), self.settings.data, self.device)
                if self._cached + _size(data) <= self._room:
                    self._clients[client] = data
                    self._cached += _size(data)
            return data

    def network(self, architecture: Architecture) -> Network:
        """Return the resident network of an architecture; every thread has its own."""
        networks: dict[Architecture, Network] = self._local.__dict__.setdefault("networks", {})
        if architecture not in networks:
            networks[architecture] = Network(architecture.build, architecture.layout, self.device)
        return networks[architecture]

    def initial(self, architecture: Architecture, seed: int) -> Tensor:
        """Return freshly initialised parameters ``(d,)``, made once for all clients: they must not be written to."""
        with self._lock:
            key = architecture, seed
            if key not in self._initial:
                self._initial[key] = torch.from_numpy(architecture.initial(seed)).to(self.device)
                while len(self._initial) > REMEMBERED:
                    self._initial.popitem(last=False)
            self._initial.move_to_end(key)
            return self._initial[key]

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array on the device; one that came last time too, as for clients of one model, is not moved again.

        It shares the array's memory where it can, and must not be written to.
        """
        with self._lock:
            kept, tensor = self._received.get(id(array), (None, torch.empty(0)))
            if kept is not array:
                tensor = torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)
                self._received[id(array)] = array, tensor
                while len(self._received) > REMEMBERED:
                    self._received.popitem(last=False)
            self._received.move_to_end(id(array))
            return tensor

    @property
    def workers(self) -> int:
        """Clients that are trained at the same time: one on each core, or one on a GPU."""
        threads = self.settings.train.threads
        return max(1, cores() // threads) if self.device.type == "cpu" and threads else 1

    @cached_property
    def _room(self) -> int:
        """Bytes that clients' tensors may take."""
        if self.device.type == "cuda":
            return int(CACHED_PART * torch.cuda.get_device_properties(self.device).total_memory)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
        return int(CACHED_PART * memory) // self.processes

    @cached_property
    def _benchmark(self) -> Dataset:
        return load_dataset(self.settings.data, Path(self.settings.data.data_dir), self.settings.run.seed)

    @cached_property
    def _own(self) -> tuple[Dataset, Partition]:
        content = read_site(data_path(self.site), self.settings.data, self.skip_unreadable)
        return load_site(content, self.settings.data, self.settings.run.seed)


@lru_cache(maxsize=1)
def workspace_for(settings: Settings, site: str, skip_unreadable: bool = False, /) -> Workspace:
    """Return this process's workspace for some settings; a change of settings replaces it."""
    return Workspace(settings, site, skip_unreadable)


def data_path(site: str) -> Path:
    """Return the path of a node's own data.

    Raises
    ------
    DataError
        If the node has none.
    """
    if not site:
        raise DataError("this node holds no data: its node config needs data, as in --node-config 'data=\"/srv/site\"'")
    return expanded(site)


def _size(client: ClientData) -> int:
    tensors = (client.x_train, client.y_train, client.x_test, client.y_test)
    return sum(t.numel() * t.element_size() for t in tensors)
