"""Addresses of servers, as ``host:port``."""

from __future__ import annotations

import socket

from imagenet_fast.base.errors import UserError

LAST_PORT = 2**16 - 1
# Seconds in which a server must answer.
_ANSWER_WITHIN = 10.0


def check_free(name: str, port: int) -> None:
    """Checks that nobody listens on a port: two servers of gRPC's would share it, unasked.

    Args:
      name: of the option that gives it.
      port: on any of this machine's addresses.

    Raises:
      UserError: if it cannot be used.
    """
    with socket.socket() as listener:
        # What is left of a finished server's connections does not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{name} {port} cannot be used ({error.strerror}): choose another"
            ) from None


def unreachable(server: str) -> str:
    """Returns why nothing listens at an address; nothing if something does."""
    try:
        own_address_towards(server)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def own_address_towards(server: str) -> str:
    """Returns this machine's address as a server sees it.

    Raises:
      OSError: if nothing listens there.
    """
    host, _, port = server.rpartition(":")
    place = (host.strip("[]"), int(port))
    if not 0 < place[1] <= LAST_PORT:  # else the system takes it modulo 65536
        raise OSError(f"port {port} is not between 1 and {LAST_PORT}")
    try:
        connection = socket.create_connection(place, timeout=_ANSWER_WITHIN)
    except UnicodeError:  # as of "a..b"
        raise OSError(f"{host!r} is no name of a host") from None
    with connection:
        return connection.getsockname()[0]


def free_port() -> int:
    """Returns a port of this machine's that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
