"""Addresses and ports of this machine."""

import ipaddress
import socket


def is_loopback(address: str) -> bool:
    """Tell whether HOST:PORT is reached from this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
