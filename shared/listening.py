"""Where servers listen: ``::`` is every address of this machine, of IPv6 and of IPv4, where asyncio and http.server would take those of IPv6 alone."""

from __future__ import annotations

import socket

EVERY = "::"


def listening_address(host: str) -> str:
    """``host``, or where that is every address and this machine has no IPv6, every address of IPv4."""
    return "0.0.0.0" if host == EVERY and not socket.has_dualstack_ipv6() else host


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not listen yet.

    Raises: OSError.
    """
    address = listening_address(host)
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == EVERY:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
