"""Server addresses that cannot be reached."""

import socket

import pytest

from imagenet_fast.base.addresses import free_port, unreachable


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
