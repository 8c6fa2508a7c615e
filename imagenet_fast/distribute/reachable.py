"""Restricts TensorFlow's servers to some addresses of this machine.

TensorFlow's gRPC servers (``tf.distribute.Server``, tf.data service, workers of a strategy) have
no password, and listen on all addresses, whatever address they are given (``GrpcServer::Init``,
``GrpcDataServerBase::Start``); ``grpc`` is the only protocol of the published wheels. But Linux
lets every process attach programs to its own sockets that drop packets by their destination. They
are attached to the listening sockets, from which connections inherit them.

TensorFlow opens these sockets itself and serves at once. Until the programs are attached, a guard
therefore listens at the same port: sockets that share one (``SO_REUSEPORT``) can have a program
that chooses which of them gets a connection. TensorFlow gets those to allowed addresses; the guard
gets all others, and ignores them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import ipaddress
import os
import pathlib
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

from imagenet_fast.base.addresses import PortInUse, free_port
from imagenet_fast.base.errors import UserError

# Options of sockets, from asm-generic/socket.h. The first, when read, gives the attached program.
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 51
# Instructions of classic BPF, from linux/filter.h and linux/bpf_common.h.
_LOAD_HALF, _LOAD_WORD, _SHIFT_RIGHT, _JUMP, _IF_EQUAL, _RETURN = 0x28, 0x20, 0x74, 0x05, 0x15, 0x06
# Offsets: the Ethernet protocol, and the destination in the headers of IPv4 and IPv6.
_PROTOCOL, _NETWORK_HEADER = -0x1000, -0x100000
_DESTINATION = {4: _NETWORK_HEADER + 16, 6: _NETWORK_HEADER + 24}
_ETHERNET = {4: 0x0800, 6: 0x86DD}
# Results: a socket's number of bytes to keep; the guard's place in its group, and TensorFlow's.
_DROP, _KEEP, _GUARD, _SERVER = 0, 0xFFFFFFFF, 0, 1
_REUSE_PORT = "TF_GRPC_REUSE_PORT"

_Instruction = tuple[int, int, int, int]  # code, instructions to skip if equal, if not, operand


@dataclasses.dataclass(frozen=True)
class Reach:
    """Who can reach servers.

    Attributes:
      ports: their ports.
      addresses: of this machine, at which they can be reached besides the loopback; None: all.
    """

    ports: tuple[int, ...]
    addresses: tuple[str, ...] | None

    def notice(self) -> str:
        """Returns two lines: who can reach the servers, and what they can do."""
        ports = f"port {self.ports[0]} has"
        if len(self.ports) > 1:
            ports = f"ports {' and '.join(map(str, self.ports))} have"
        who = "every account of this machine"
        if self.addresses == ():
            who += ", but no other machine,"
        else:
            at = "any address of it" if self.addresses is None else " or ".join(self.addresses)
            who += f", and every machine that the network lets through to {at},"
        return (
            f"{ports} no password: {who} can connect\n"
            "and then run any TensorFlow operation here: read and write files as this account"
        )


@contextlib.contextmanager
def restricted(
    ports: Sequence[int], addresses: Iterable[str] = (), *, trusted_network: bool = False
) -> Iterator[Reach]:
    """Restricts the TensorFlow servers that start in the context, from their start to their end.

    Args:
      ports: at which they will listen; 0: any free one.
      addresses: of this machine, at which they can be reached besides the loopback.
      trusted_network: whether to go on where the system cannot restrict them.

    Yields:
      Who can reach them, with the ports to use.

    Raises:
      PortInUse: if another program listens at a port.
      UserError: if the system cannot restrict them, or TensorFlow listens otherwise than expected.
    """
    others = tuple(each for each in addresses if not ipaddress.ip_address(each).is_loopback)
    with contextlib.ExitStack() as stack:
        try:
            guards = [stack.enter_context(_guard(port, others)) for port in ports]
        except _UnsupportedError as error:
            if trusted_network:
                yield Reach(tuple(port or free_port() for port in ports), None)
                return
            raise UserError(
                f"this system cannot restrict a server to {' or '.join(others) or 'the loopback'} "
                f"({error}), so every machine that reaches this one could run any TensorFlow "
                "operation here: run it on Linux, or allow that with --trusted_network"
            ) from None
        reach = Reach(tuple(guard.getsockname()[1] for guard in guards), others)
        stack.enter_context(_shared_ports())
        try:
            yield reach
        finally:  # A server may listen even if something else has failed.
            found = [_restrict_listeners(guard, others) for guard in guards]
        if not all(found):
            raise UserError(f"no server listens at {reach.ports[found.index(0)]}")


class _UnsupportedError(Exception):
    """The system has no programs for sockets; says why."""


def _guard(port: int, addresses: Sequence[str]) -> socket.socket:
    """Returns a socket that keeps connections to all other addresses from TensorFlow."""
    if sys.platform != "linux":
        raise _UnsupportedError("it is not Linux")
    family, everywhere = (socket.AF_INET6, "::") if _has_ipv6() else (socket.AF_INET, "0.0.0.0")
    guard = socket.socket(family)
    try:
        _attach(guard, _encoded([(_RETURN, 0, 0, _DROP)]))
        # Ignore a finished server's connections in TIME_WAIT.
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        guard.bind((everywhere, port))
        # Only now: it must not share the port of a server that runs already.
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _set_program(guard, _SO_ATTACH_REUSEPORT_CBPF, program(addresses, _SERVER, _GUARD))
        guard.listen()
    except OSError as error:
        guard.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise PortInUse("port", port, error) from None
        raise _UnsupportedError(error.strerror or str(error)) from None
    return guard


def _has_ipv6() -> bool:
    """Whether gRPC listens on ``[::]``, for IPv4 as well, instead of ``0.0.0.0``."""
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _shared_ports() -> Iterator[None]:
    """In the context, ``tf.distribute.Server`` shares ports, as tf.data service always does."""
    before = os.environ.get(_REUSE_PORT)
    os.environ[_REUSE_PORT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_REUSE_PORT]
        else:
            os.environ[_REUSE_PORT] = before


def _restrict_listeners(guard: socket.socket, addresses: Sequence[str]) -> int:
    """Attaches programs to this process' other listening sockets at the guard's port.

    Returns:
      Their number.
    """
    count, port = 0, guard.getsockname()[1]
    for descriptor in [int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir()]:
        if descriptor == guard.fileno() or not _listens(descriptor, port):
            continue
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            _attach(listener, program(addresses, _KEEP, _DROP))
            if listener.getsockname() != guard.getsockname():
                raise UserError(
                    f"TensorFlow listens at {listener.getsockname()[0]} instead of "
                    f"{guard.getsockname()[0]}: its port {port} was open to others for a moment"
                )
        count += 1
    return count


def _listens(descriptor: int, port: int) -> bool:
    """Returns whether a file descriptor is a socket that listens at a port."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            return (
                opened.family in (socket.AF_INET, socket.AF_INET6)
                and bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                and opened.getsockname()[1] == port
            )
    except OSError:  # It has been closed meanwhile.
        return False


def program(addresses: Sequence[str], accepted: int, refused: int) -> bytes:
    """Returns a program of classic BPF that tells packets by their destination.

    Packets from IPv4 to a socket for both IPv4 and IPv6 count as IPv4.

    Those to the loopback or one of the addresses are ``accepted``, others ``refused``: the results.
    """
    blocks: dict[int, list[_Instruction]] = {
        4: [
            (_LOAD_WORD, 0, 0, _DESTINATION[4]),
            (_SHIFT_RIGHT, 0, 0, 24),
            (_IF_EQUAL, 0, 1, 127),
            (_RETURN, 0, 0, accepted),
        ],
        6: [],
    }
    for text in ("::1", *addresses):
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for place, word in enumerate(words):
            rest = 2 * (len(words) - place) - 1  # to the next address
            blocks[address.version] += [
                (_LOAD_WORD, 0, 0, _DESTINATION[address.version] + 4 * place),
                (_IF_EQUAL, 0, rest, word),
            ]
        blocks[address.version].append((_RETURN, 0, 0, accepted))
    instructions: list[_Instruction] = [(_LOAD_HALF, 0, 0, _PROTOCOL)]
    for version, block in blocks.items():
        block.append((_RETURN, 0, 0, refused))
        instructions += [(_IF_EQUAL, 1, 0, _ETHERNET[version]), (_JUMP, 0, 0, len(block)), *block]
    return _encoded([*instructions, (_RETURN, 0, 0, refused)])


def _encoded(instructions: Sequence[_Instruction]) -> bytes:
    return b"".join(
        struct.pack("=HBBI", code, if_equal, if_not, operand & 0xFFFFFFFF)
        for code, if_equal, if_not, operand in instructions
    )


def _attach(target: socket.socket, content: bytes) -> None:
    """Attaches a program to a socket that chooses the packets that it gets.

    Raises:
      OSError: if the system does not have such programs.
    """
    _set_program(target, _SO_ATTACH_FILTER, content)
    # Systems that imitate Linux may ignore what they do not know. Linux returns the program, with
    # its length in instructions instead of bytes, so that Python cuts it.
    attached = target.getsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, len(content))
    if not attached or not content.startswith(attached):
        raise OSError("it ignores programs for sockets")


def _set_program(target: socket.socket, option: int, content: bytes) -> None:
    instructions = ctypes.create_string_buffer(content, len(content))
    # struct sock_fprog
    fprog = struct.pack("@HP", len(content) // 8, ctypes.addressof(instructions))
    target.setsockopt(socket.SOL_SOCKET, option, fprog)
