"""What a client process keeps resident: data set, partition, networks, the clients' tensors."""

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from threading import RLock, local
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from data.augment import random_resized_crop
from data.client import ClientData, client_data
from data.datasets import Dataset, load_dataset
from data.errors import DataError
from data.partitions import Partition, partition
from data.sites import load_site, task_of
from data.task import Task
from models.architecture import Architecture, architecture_for
from posy.config import Settings, from_json
from posy.settings import SITES, SettingsError
from posy.training import Network, Trainer

CACHED_BYTES = 2 << 30
REMEMBERED = 2


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
        raise SettingsError(f"device = {name!r}: it must be auto, cpu, cuda or cuda:N") from error
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
    """

    def __init__(self, settings: Settings, site: str = "") -> None:
        self.settings = settings
        self.site = site
        self.of_sites = settings.data.dataset == SITES
        self.device = choose_device(settings.train.device)
        if self.device.type == "cpu" and settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self.trainer = Trainer(settings.train, self.device)
        self._local = local()
        self._clients: OrderedDict[int, ClientData] = OrderedDict()
        self._received: OrderedDict[int, tuple[Any, Tensor]] = OrderedDict()
        self._cached = 0
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
    def task(self) -> Task:
        """Kind, shape and classes of the samples."""
        return task_of(self.settings.data) if self.of_sites else self.dataset.task

    @cached_property
    def architecture(self) -> Architecture:
        """The plain network of the run."""
        return architecture_for(self.settings.train.model, self.task)

    @property
    def augment(self) -> Callable[..., Tensor] | None:
        """Training augmentation, if the settings ask for one."""
        return random_resized_crop if self.settings.data.augment == "crop" else None

    def part_of(self, client: int) -> int:
        """Return a client's place in the partition: a site with its own data is all there is of it."""
        return 0 if self.of_sites else client

    def client_data(self, client: int) -> ClientData:
        """Return a client's tensors, made when it is first asked for and kept while they fit."""
        with self._lock:
            if client not in self._clients:
                data = client_data(self.dataset, self.partition, self.part_of(client), self.settings.data, self.device)
                self._clients[client] = data
                self._cached += _size(data)
                while len(self._clients) > 1 and self._cached > CACHED_BYTES:
                    self._cached -= _size(self._clients.popitem(last=False)[1])
            self._clients.move_to_end(client)
            return self._clients[client]

    def network(self, architecture: Architecture) -> Network:
        """Return the resident network of an architecture; every thread has its own."""
        networks: dict[Architecture, Network] = self._local.__dict__.setdefault("networks", {})
        if architecture not in networks:
            networks[architecture] = Network(architecture.build, architecture.layout, self.device)
        return networks[architecture]

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
            return tensor

    @property
    def workers(self) -> int:
        """Clients that are trained at the same time: one on each core, or one on a GPU."""
        threads = self.settings.train.threads
        return max(1, cores() // threads) if self.device.type == "cpu" and threads else 1

    @cached_property
    def _benchmark(self) -> Dataset:
        return load_dataset(self.settings.data, Path(self.settings.data.data_dir), self.settings.run.seed)

    @cached_property
    def _own(self) -> tuple[Dataset, Partition]:
        return load_site(data_path(self.site), self.settings.data, self.settings.run.seed)


@lru_cache(maxsize=1)
def workspace_for(settings_json: str, site: str, /) -> Workspace:
    """Return this process's workspace for some settings; a change of settings replaces it."""
    return Workspace(from_json(settings_json), site)


def data_path(site: str) -> Path:
    """Return the path of a node's own data.

    Raises
    ------
    DataError
        If the node has none.
    """
    if not site:
        raise DataError("this node holds no data: its node config needs data, as in --node-config 'data=\"/srv/site\"'")
    return Path(site).expanduser()


def _size(client: ClientData) -> int:
    tensors = (client.x_train, client.y_train, client.x_test, client.y_test)
    return sum(t.numel() * t.element_size() for t in tensors)
