"""A cache of the clients' tensors in the memory of a process."""

import os
from collections.abc import Callable
from functools import cached_property
from threading import RLock

import torch

from posy.data.client import ClientData
from posy.forked import cores

MEMORY_SHARE = 0.25
"""Fraction of the device's memory that the clients' tensors of all processes may use."""


class ClientCache:
    """The tensors of the clients of one process, which stay in memory if there is room.

    No client's tensors are evicted. Clients take turns, so the evicted client would be the next one in use.

    Parameters
    ----------
    load : callable
        Returns the tensors of a client by its index.
    device : torch.device
        The device of the tensors.
    """

    def __init__(self, load: Callable[[int], ClientData], device: torch.device) -> None:
        self.processes = cores()
        """Number of processes that share this machine's memory: up to one client process on each core."""
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
        """Load the tensors of all clients until the memory for them is full."""
        for client in range(num_clients):
            if self._used >= self.room:
                return
            self.get(client)
