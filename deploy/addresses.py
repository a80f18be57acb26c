"""Addresses and ports of this machine."""

import contextlib
import ipaddress
import random
import socket

LISTENING = range(20_000, 32_768)
"""Ports of :func:`free_port`: below those of Linux's outgoing connections, which may take one at any moment."""


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def free_port() -> int:
    """Return a port of this machine that nobody listens on; :class:`OSError` if there is none."""
    # By chance of the system, not of the run's seed: two processes that ask at once shall get two ports.
    start = random.SystemRandom().randrange(len(LISTENING))
    for port in (*LISTENING[start:], *LISTENING[:start]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {LISTENING.start} to {LISTENING.stop - 1} is free")
