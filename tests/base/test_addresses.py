"""Server addresses that cannot be reached."""

import socket

import pytest
from server_processes import other_address

from imagenet_fast.base.addresses import (
    free_port,
    is_loopback,
    join,
    own_addresses,
    unreachable,
)
from imagenet_fast.base.errors import UserError


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("a..b:8888", "'a..b' is not a valid host name"),
        (f"{'a' * 64}.b:8888", f"'{'a' * 64}.b' is not a valid host name"),
        ("127.0.0.1:99999", "port 99999 is not between 1 and 65535"),
        ("127.0.0.1:0", "port 0 is not between 1 and 65535"),
    ],
)
def test_invalid_addresses(server, reason):
    assert unreachable(server) == reason


def test_a_listening_port_and_a_free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable(f"127.0.0.1:{port}") == ""
        # Python takes the port modulo 65536.
        assert "is not between" in unreachable(f"127.0.0.1:{port + 2**16}")
    assert unreachable(f"127.0.0.1:{free_port()}") == "Connection refused"


def test_own_addresses(monkeypatch):
    other = other_address()
    for address in ("127.0.0.1", "127.0.0.9", other):
        assert own_addresses(address) == (address,)
    assert "127.0.0.1" in own_addresses("localhost")
    # A name of this machine, of which another machine has an address, too.
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("192.0.2.77", "127.0.1.1", other)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert own_addresses("reader-0") == ("127.0.1.1", other)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("198.51.100.7", "host 198.51.100.7 is no address of this machine: give one that is"),
        ("2001:db8::7", "host 2001:db8::7 is no address of this machine"),
        # Sockets can be bound to these, but nobody can connect to them.
        ("224.0.0.1", "host 224.0.0.1 is no address of this machine"),
        ("255.255.255.255", "host 255.255.255.255 is no address of this machine"),
        ("0.0.0.0", "host 0.0.0.0 means all addresses of this machine: give the one"),
        ("::", "host :: means all addresses of this machine: give the one"),
        ("0", "host 0 means all addresses of this machine: give the one"),
        ("", "host '' cannot be resolved"),
        ("127.0.0.1:5050", "host '127.0.0.1:5050' cannot be resolved"),
        ("a..b", "host 'a..b' cannot be resolved"),
        ("a\0b", r"host 'a\\x00b' cannot be resolved"),
        ("a" * 70, "cannot be resolved .*: give a name or address of this machine"),
    ],
)
def test_hosts_that_are_not_this_machine(host, told):
    with pytest.raises(UserError, match=told):
        own_addresses(host)


def test_a_name_of_another_machine(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(
        UserError, match=r"host away \(198.51.100.7\) is no address of this machine"
    ):
        own_addresses("away")


def test_loopback_and_join():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["", "host0", "10.0.0.1", "0.0.0.0", "localhost.evil.org"]))
    assert join("host", 5) == "host:5"
    assert join("fd00::2", "%port%") == "[fd00::2]:%port%"
