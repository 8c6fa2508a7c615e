"""Server addresses (``host:port``) and free ports."""

from __future__ import annotations

import ipaddress
import socket

from imagenet_fast.base.errors import UserError

LAST_PORT = 2**16 - 1
LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 10.0


class PortInUse(UserError):  # noqa: N818 - it says what is wrong
    """A port, which an option gives, cannot be used."""

    def __init__(self, name: str, port: int, error: OSError) -> None:
        super().__init__(f"{name} {port} cannot be used ({error.strerror}): choose another")


def check_free(name: str, port: int) -> None:
    """Checks that a port is free, because two gRPC servers would silently share one.

    Args:
      name: the option that gives the port, for the message.
      port: the port, on all addresses of this machine.

    Raises:
      PortInUse: if the port is in use or not permitted.
    """
    with socket.socket() as listener:
        # Ignore a finished server's connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise PortInUse(name, port, error) from None


def own_addresses(host: str) -> tuple[str, ...]:
    """Returns the addresses of this machine that a name or an address stands for.

    Raises:
      UserError: if there are none, or it stands for all.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"host {host!r} cannot be resolved ({reason}): give a name or address of this machine"
        ) from None
    # Each is listed with its port and, for IPv6, with its interface.
    places = {str(address[0]): (family, address) for family, _, _, _, address in found}
    if any(ipaddress.ip_address(each).is_unspecified for each in places):
        raise UserError(
            f"host {host} means all addresses of this machine: give the one at which other "
            "machines reach it"
        )
    own = tuple(each for each, place in places.items() if _is_own(*place))
    if not own:
        meaning = "" if host in places else f" ({' and '.join(places)})"
        raise UserError(f"host {host}{meaning} is no address of this machine: give one that is")
    return own


def _is_own(family: int, address: tuple) -> bool:
    if ipaddress.ip_address(address[0]).is_multicast:  # Sockets may bind them.
        return False
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind(address)
            trial.connect((address[0], 9, *address[2:]))  # Fails for broadcast addresses.
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether a host is ``localhost``, or an address of the loopback interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def join(host: str, port: int | str) -> str:
    """Returns ``host:port``, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
