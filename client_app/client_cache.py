"""An in-memory cache of clients' tensors."""

import os
from collections.abc import Callable
from functools import cached_property
from threading import RLock

import torch

from posy.data.client import ClientData
from posy.forked import cores

MEMORY_SHARE = 0.25
"""Fraction of the device's memory that all processes together may use for clients' tensors."""


class ClientCache:
    """Caches the tensors of one process's clients, up to a memory limit.

    The cache evicts nothing. Clients take turns, so the least recently used client is the one that is needed next.

    Parameters
    ----------
    load : callable
        Returns the tensors of the client with a given index.
    device : torch.device
        The device of the tensors.
    """

    def __init__(self, load: Callable[[int], ClientData], device: torch.device) -> None:
        self.processes = cores()
        """Number of client processes that may share this machine's memory: one for each core."""
        self._load = load
        self._device = device
        self._clients: dict[int, ClientData] = {}
        self._used = 0
        self._lock = RLock()

    @cached_property
    def room(self) -> int:
        """Number of bytes that the clients' tensors may use in this process."""
        if self._device.type == "cuda":
            return int(MEMORY_SHARE * torch.cuda.get_device_properties(self._device).total_memory)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8 << 30
        return int(MEMORY_SHARE * memory) // self.processes

    def get(self, client: int) -> ClientData:
        """Return a client's tensors."""
        with self._lock:
            data = self._clients.get(client)
            if data is None:
                data = self._load(client)
                if self._used + data.nbytes <= self.room:
                    self._clients[client] = data
                    self._used += data.nbytes
            return data

    def load_all(self, num_clients: int) -> None:
        """Load clients' tensors until all are loaded or the cache is full."""
        for client in range(num_clients):
            if self._used >= self.room:
                return
            self.get(client)
