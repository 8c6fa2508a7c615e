"""Server addresses (``host:port``) and free ports."""

from __future__ import annotations

import socket

from imagenet_fast.base.errors import UserError

LAST_PORT = 2**16 - 1
_CONNECT_SECONDS = 10.0


def check_free(name: str, port: int) -> None:
    """Checks that a port is free, because two gRPC servers would silently share one.

    Args:
      name: the option that gives the port, for the message.
      port: the port, on all addresses of this machine.

    Raises:
      UserError: if the port is in use or not permitted.
    """
    with socket.socket() as listener:
        # Ignore a finished server's connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{name} {port} cannot be used ({error.strerror}): choose another"
            ) from None


def unreachable(server: str) -> str:
    """Returns why a connection to a server fails; empty if it succeeds."""
    try:
        local_address(server)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def local_address(server: str) -> str:
    """Returns the address of this machine from which it connects to a server.

    Raises:
      OSError: if the connection fails.
    """
    host, _, port = server.rpartition(":")
    address = (host.strip("[]"), int(port))
    if not 0 < address[1] <= LAST_PORT:  # The system would take it modulo 65536.
        raise OSError(f"port {port} is not between 1 and {LAST_PORT}")
    try:
        connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
    except UnicodeError:  # For example "a..b".
        raise OSError(f"{host!r} is not a valid host name") from None
    with connection:
        return connection.getsockname()[0]


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
