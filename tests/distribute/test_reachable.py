"""Servers can be reached at some addresses of this machine only."""

import contextlib
import ipaddress
import os
import pathlib
import socket
import struct

import pytest
from server_processes import other_address

from imagenet_fast.base.addresses import PortInUse
from imagenet_fast.base.errors import UserError
from imagenet_fast.distribute import reachable
from imagenet_fast.distribute.reachable import Reach, program, restricted

# Packets to addresses that the kernel drops never arrive, so connections to them only time out.
SECONDS = 0.5


def result(content, destination):
    """Runs a program on a packet to an address, as the kernel does; only what programs need."""
    address = ipaddress.ip_address(destination)
    packet = {-0x1000: 0x0800 if address.version == 4 else 0x86DD}
    start = -0x100000 + (16 if address.version == 4 else 24)
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    packet.update({start + 4 * place: word for place, word in enumerate(words)})
    instructions = list(struct.iter_unpack("=HBBi", content))
    value = place = 0
    while True:
        code, if_equal, if_not, operand = instructions[place]
        place += 1
        if code in (0x28, 0x20):
            value = packet[operand]
        elif code == 0x74:
            value >>= operand
        elif code == 0x05:
            place += operand
        elif code == 0x15:
            place += if_equal if value == operand & 0xFFFFFFFF else if_not
        else:
            assert code == 0x06
            return operand & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("addresses", "reached", "not_reached"),
    [
        (
            (),
            ["127.0.0.1", "127.255.0.9", "::1"],
            ["10.0.0.1", "126.0.0.1", "::", "::2", "fe80::1"],
        ),
        (("10.0.0.1",), ["127.0.0.1", "::1", "10.0.0.1"], ["10.0.0.2", "::a00:1", "0.0.0.0"]),
        (
            ("2001:db8::5", "192.0.2.7", "fe80::1%1", "255.1.2.3"),
            ["2001:db8::5", "192.0.2.7", "fe80::1", "255.1.2.3", "::1", "127.0.0.1"],
            ["2001:db8::6", "2001:db9::5", "2001:db8:0:1::5", "::5", "192.0.2.8", "255.1.2.2"],
        ),
        # Packets of IPv4, even to a socket of IPv6.
        (("::ffff:192.0.2.7",), ["192.0.2.7"], ["192.0.2.8", "::ffff:192.0.2.7"]),
        # More than the offset of a conditional jump spans.
        (tuple(f"10.0.{n}.1" for n in range(200)), ["10.0.199.1", "::1"], ["10.0.200.1", "::2"]),
    ],
)
def test_the_program_tells_packets_by_their_destination(addresses, reached, not_reached):
    content = program(addresses, accepted=0xFFFFFFFF, refused=7)
    assert {result(content, each) for each in reached} == {0xFFFFFFFF}
    assert {result(content, each) for each in not_reached} == {7}


def listen(port):
    """A listening socket like those of gRPC."""
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", port))
    server.listen()
    return server


def connects(address, port):
    try:
        socket.create_connection((address, port), timeout=SECONDS).close()
    except TimeoutError:
        return False
    return True


@pytest.fixture
def stranger():
    """An address of this machine that is not the loopback, as other machines use."""
    return other_address()


needs_linux = pytest.mark.skipif(
    not pathlib.Path("/proc/self/net/if_inet6").exists(), reason="needs Linux with IPv6"
)


@needs_linux
def test_others_never_connect_from_the_first_moment_to_the_last(stranger):
    with restricted([0]) as reach:
        (port,) = reach.ports
        server = listen(port)
        assert connects("127.0.0.1", port) and connects("::1", port)
        assert not connects(stranger, port)
    with server:
        assert connects("127.0.0.1", port) and connects("::1", port)
        assert not connects(stranger, port)
        server.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = server.accept()
                with connection:
                    local = ipaddress.ip_address(connection.getsockname()[0])
                    assert (local.ipv4_mapped or local).is_loopback
    assert reach.addresses == ()


@needs_linux
def test_whole_messages_arrive_at_an_address_that_is_named(stranger):
    with restricted([0, 0], [stranger, "127.0.0.1"]) as reach:
        servers = [listen(port) for port in reach.ports]
    assert reach.addresses == (stranger,)
    for server, port in zip(servers, reach.ports):
        with server, socket.create_connection((stranger, port), timeout=5) as client:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(5)
                client.sendall(bytes(100_000))
                client.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as received:
                    assert received.read() == bytes(100_000)


@needs_linux
def test_a_server_that_starts_before_an_error_is_restricted_as_well(stranger):
    with pytest.raises(KeyError), restricted([0]) as reach:
        server = listen(reach.ports[0])
        raise KeyError
    with server:
        assert not connects(stranger, reach.ports[0])


@needs_linux
def test_nothing_is_left_behind(monkeypatch):
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "0")
    before = len([*pathlib.Path("/proc/self/fd").iterdir()])
    with restricted([0]) as reach:
        assert os.environ["TF_GRPC_REUSE_PORT"] == "1"
        server = listen(reach.ports[0])
    server.close()
    assert os.environ["TF_GRPC_REUSE_PORT"] == "0"
    assert len([*pathlib.Path("/proc/self/fd").iterdir()]) == before
    with listen(reach.ports[0]):  # The guard has left the port.
        assert connects("127.0.0.1", reach.ports[0])


@needs_linux
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, ""), (socket.AF_INET6, "::1")])
def test_a_port_in_use(family, host):
    with socket.create_server((host, 0), family=family, reuse_port=True) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PortInUse, match=rf"port {port} cannot be used \(Address already in use"),
            restricted([port]),
        ):
            raise AssertionError


@needs_linux
def test_a_server_that_does_not_listen_is_an_error():
    with pytest.raises(UserError, match="no server listens at"), restricted([0]):
        pass


@needs_linux
def test_a_server_that_listens_otherwise_is_an_error():
    """It shares no group of sockets with the guard, which so did not protect it."""
    with (
        pytest.raises(UserError, match=r"listens at 0\.0\.0\.0 instead of ::.* open to others"),
        restricted([0]) as reach,
        socket.socket() as server,
    ):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", reach.ports[0]))
        server.listen()
        # restricted looks when this context has ended.
        kept = server.dup()
    kept.close()


def not_linux(monkeypatch):
    monkeypatch.setattr(reachable.sys, "platform", "darwin")


def no_programs(monkeypatch):
    def refuse(target, option, content):
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(reachable, "_set_program", refuse)


def ignored_programs(monkeypatch):
    monkeypatch.setattr(reachable, "_set_program", lambda target, option, content: None)


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        (not_linux, "it is not Linux"),
        (no_programs, "Protocol not available"),
        (ignored_programs, "it ignores programs for sockets"),
    ],
)
def test_systems_that_cannot_restrict_a_server(monkeypatch, system, reason):
    system(monkeypatch)
    told = rf"cannot restrict a server to 10\.0\.0\.1 \({reason}\).*--trusted_network"
    with pytest.raises(UserError, match=told), restricted([0], ["10.0.0.1"]):
        raise AssertionError
    with restricted([0, 50], ["10.0.0.1"], trusted_network=True) as reach:
        assert reach.ports[0] > 0 and reach.ports[1] == 50
        assert reach.addresses is None


def test_notices():
    what = "\nand then run any TensorFlow operation here: read and write files as this account"
    assert Reach((50,), ()).notice() == (
        "port 50 has no password: every account of this machine, but no other machine, can connect"
        f"{what}"
    )
    assert Reach((50, 60), ("10.0.0.1",)).notice() == (
        "ports 50 and 60 have no password: every account of this machine, and every machine that "
        f"the network lets through to 10.0.0.1, can connect{what}"
    )
    assert "lets through to any address of it, can" in Reach((50,), None).notice()
