"""Addresses and ports of this machine."""

import contextlib
import ipaddress
import random
import socket

LISTENING = range(20_000, 32_768)
"""Ports that :func:`free_port` tries. They are below the range that Linux assigns to outgoing connections."""


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is reachable only from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost"


def free_port() -> int:
    """Return an unused port on this machine, or raise :class:`OSError` if all are in use."""
    # Do not use the run's seed, because two processes that search at the same time need different ports.
    start = random.SystemRandom().randrange(len(LISTENING))
    for port in (*LISTENING[start:], *LISTENING[:start]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {LISTENING.start} to {LISTENING.stop - 1} is free")
