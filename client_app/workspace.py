"""Objects that a client process keeps in memory: the data set, the partition, networks and the clients' tensors."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import RLock, local
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from posy.allocator import keep_freed_memory
from posy.client_app.client_cache import ClientCache
from posy.client_app.training.batches import Augment, Samples
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
from posy.data.policy import Policy
from posy.data.settings import SITES
from posy.data.sites import fingerprint, load_site, read_site
from posy.data.task import Task
from posy.extensions import is_custom
from posy.forked import cores
from posy.models.architecture import Architecture, architecture_for
from posy.paths import expanded
from posy.settings import SettingsError
from posy.sharing import IdentityCache
from posy.strategies.client_settings import NodeSettings, all_train_settings, train_settings
from posy.strategies.settings import Settings

DEFAULT_POLICY = Policy()
REMEMBERED = 8
"""Number of initial models, and of received arrays, that stay on the device for reuse by several clients."""


def choose_device(name: str) -> torch.device:
    """Return the device named in the setting ``device``, or raise :class:`SettingsError` if it does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", name)
    if not match:
        raise SettingsError(f"device = {name!r}: it must be auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; choose auto or cpu, or a "
            "smaller N"
        )
    return torch.device(name)


def plain_architecture(settings: Settings, task: Task, words: Sequence[str] = ()) -> Architecture:
    """Return the network named in the settings, before a method changes it.

    ``words`` is the vocabulary of a text data set.
    """
    train, folder = settings.train, settings.data.data_dir
    initialisation, digest = (train.linear_init, train.weights, train.frozen), train.weights_sha256
    return architecture_for(train.model, task, *initialisation, digest=digest, words=words, folder=folder)


class Workspace:
    """One process's data, networks and trainer, which all its clients share.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    site : str
        With ``dataset = sites``, the path to the node's data. It is empty on the server.
    skip_unreadable : bool
        With ``dataset = sites``, whether the node skips image files that it cannot read.
    policy : Policy
        With ``dataset = sites``, the policy of the node.
    node_settings : tuple
        The settings of local training in the node config, all of which the run allows.
    """

    def __init__(
        self,
        settings: Settings,
        site: str = "",
        skip_unreadable: bool = False,
        policy: Policy = DEFAULT_POLICY,
        node_settings: NodeSettings = (),
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.node_settings = node_settings
        self.site = site
        self.site_name = ""
        """With ``dataset = sites``, the site's name according to the server's last message."""
        self.skip_unreadable = skip_unreadable
        self.of_sites = settings.data.dataset == SITES
        self.checked = False
        """Whether :func:`posy.client_app.run_check.check_run` has accepted the run."""
        self.device = choose_device(settings.train.device)
        if self.device.type == "cpu":
            keep_freed_memory()
            if settings.train.threads:
                torch.set_num_threads(settings.train.threads)
        self.trainer = Trainer(settings.train, self.device, policy.min_rows if self.of_sites and site else 1)
        self._local = local()
        self.client_cache = ClientCache(self._load_client, self.device)
        self._lock = RLock()
        self._pooled: dict[tuple[int, ...], Samples] = {}
        self._preprocessing: dict[int, str] = {}
        to_device = partial(_to_device, device=self.device)
        self._initial = lru_cache(REMEMBERED)(lambda architecture, seed: to_device(architecture.initial(seed)))
        self._received = IdentityCache(to_device, REMEMBERED)

    @cached_property
    def dataset(self) -> Dataset:
        """The data set of all clients or of the site, loaded once."""
        return self._loaded[0]

    @cached_property
    def partition(self) -> Partition:
        """The samples of each client. A site has one client."""
        return self._loaded[1]

    @cached_property
    def order_key(self) -> tuple[int, ...]:
        """Additional key for a site's random streams, so that the server cannot infer the samples of a batch."""
        return (self.dataset.order_seed,) if self.dataset.order_seed else ()

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of a site's data and split. It changes if the data or the split changes."""
        return fingerprint(self.dataset, self.partition)

    @cached_property
    def task(self) -> Task:
        """Kind, shape and classes of the samples."""
        return task_of(self.settings.data) if self.of_sites else self.dataset.task

    def preprocessing(self, client: int) -> str:
        """Return the preprocessing of a client's samples for the network, as JSON."""
        part = self.part_of(client) if self.dataset.client_scales else 0  # without client scales, all clients share it
        if part not in self._preprocessing:
            self._preprocessing[part] = Preprocessing.of(self.dataset, part).to_json()
        return self._preprocessing[part]

    @cached_property
    def architecture(self) -> Architecture:
        """The run's network, before the method changes it."""
        words = self.dataset.words if self.settings.train.weights and not self.of_sites else ()
        return plain_architecture(self.settings, self.task, words)

    @cached_property
    def criterion(self) -> Criterion | None:
        """The per-sample loss that training minimises, or None for cross-entropy."""
        train = self.settings.train
        return criterion_of(train.loss, self.task.target, train.huber_delta)

    def augment(self, generator: Callable[[], torch.Generator]) -> Augment | None:
        """Return the training augmentation named in the settings, or None."""
        return Augment(*self._augmentation, generator()) if self._augmentation else None

    @cached_property
    def _augmentation(self) -> tuple[Draw, Change] | None:
        data = self.settings.data
        mean, std = (torch.from_numpy(value).to(self.device) for value in (self.dataset.mean, self.dataset.std))
        return augmentation(data.augment, data.transforms, mean, std)

    def part_of(self, client: int) -> int:
        """Return a client's index in the partition, which is 0 for a site."""
        return 0 if self.of_sites else client

    def settings_of(self, client: int) -> Settings:
        """Return the run's settings for one client, including the client's own settings for local training, if any."""
        if not self.settings.train.client_settings and not self.node_settings:
            return self.settings
        names = () if self.of_sites else self.partition.names
        name = names[client] if client < len(names) else self.site_name
        train = train_settings(self.settings.train, client, name, self.node_settings)
        return replace(self.settings, train=train)

    def possible_settings(self) -> list[Settings]:
        """Return all possible settings of a site's client. The server assigns the client's index and name later."""
        possible = all_train_settings(self.settings.train, self.node_settings)
        return [replace(self.settings, train=train) for train in possible]

    def pooled_samples(self, clients: tuple[int, ...]) -> Samples:
        """Return the training samples of several clients, and keep them in memory."""
        if self.of_sites:
            raise SettingsError("the samples of sites cannot be pooled; choose another method")
        if clients not in self._pooled:
            data = [self.client_data(client) for client in clients]
            x, y = ([getattr(each, name) for each in data] for name in ("x_train", "y_train"))
            self._pooled = {clients: Samples(torch.cat(x), torch.cat(y))}
        return self._pooled[clients]

    def client_data(self, client: int) -> ClientData:
        """Return a client's tensors, and keep them in memory if there is room."""
        return self.client_cache.get(client)

    def _load_client(self, client: int) -> ClientData:
        part, settings = self.part_of(client), self.settings
        return client_data(self.dataset, self.partition, part, settings.data, self.device, seed=settings.run.seed)

    def network(self, architecture: Architecture) -> Network:
        """Return this thread's network for an architecture, and keep it in memory."""
        networks: dict[Architecture, Network] = self._local.__dict__.setdefault("networks", {})
        if architecture not in networks:
            networks[architecture] = Network(architecture.build, architecture.layout, self.device, self.criterion)
        return networks[architecture]

    def initial(self, architecture: Architecture, seed: int) -> Tensor:
        """Return the initial parameters ``(d,)`` for a seed. All clients share them, so do not write to them."""
        with self._lock:
            return self._initial(architecture, seed)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Move an array to the device. An array that several clients receive is moved only once.

        On a CPU, the tensor shares the array's memory if the array is writeable. Do not write to the tensor.
        """
        return self._received(array)

    @property
    def workers(self) -> int:
        """Number of clients that train at once: the number of cores divided by ``threads``, or one on a GPU."""
        threads = self.settings.train.threads
        return max(1, cores() // threads) if self.device.type == "cpu" and threads else 1

    @property
    def forks(self) -> bool:
        """Whether training can run in forked processes. Autograd's GPU threads do not survive a fork."""
        has_used_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        has_checked_loss = (
            is_custom(self.settings.train.loss) and torch.cuda.is_available()
        )  # the check of a custom loss uses autograd
        return not has_used_cuda and not has_checked_loss

    @cached_property
    def _loaded(self) -> tuple[Dataset, Partition]:
        data = self.settings.data
        if not self.of_sites:
            return load_clients(data, Path(data.data_dir), self.settings.split_seed)
        content = read_site(data_path(self.site), data, self.policy, self.skip_unreadable)
        return load_site(content, data, self.policy)


@lru_cache(maxsize=1)
def workspace_for(
    settings: Settings,
    site: str,
    skip_unreadable: bool = False,
    policy: Policy = DEFAULT_POLICY,
    node_settings: NodeSettings = (),
    /,
) -> Workspace:
    """Return this process's workspace for the settings. A call with different settings replaces the workspace."""
    return Workspace(settings, site, skip_unreadable, policy, node_settings)


def _to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def data_path(site: str) -> Path:
    """Return the path to a node's data, or raise :class:`DataError` if its config has no ``data``."""
    if not site:
        raise DataError(
            "this node has no data: its node config needs data, as in --node-config 'data=\"/srv/site\"'", "no-data"
        )
    return expanded(site)
