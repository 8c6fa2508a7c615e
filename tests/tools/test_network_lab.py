import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))

from network_lab import namespaces, requirements
from network_lab.__main__ import parse
from network_lab.errors import LabError
from network_lab.layout import Layout, parse_bandwidth, parse_latency
from network_lab.switch import wire_bytes

LAB = pathlib.Path(__file__).parents[2] / "tools" / "network_lab"
# Every wait below ends by then, whatever is broken.
PATIENCE = 30.0

# Tells where it is, and that it can be reached from the worker before it.
NEIGHBOUR = """
import json, os, socket, time
job = json.loads(os.environ["TF_CONFIG"])
addresses, index = job["cluster"]["worker"], job["task"]["index"]
host, port = addresses[index].split(":")
listener = socket.create_server((host, int(port)))
next_host, next_port = addresses[(index + 1) % len(addresses)].split(":")
for attempt in range(100):
    try:
        connection = socket.create_connection((next_host, int(next_port)), timeout=5)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(f"from {index}".encode())
caller, _ = listener.accept()
heard = caller.recv(100).decode()
names = sorted(name for _, name in socket.if_nameindex())
print(json.dumps({"job": job, "heard": heard, "interfaces": names}))
"""

# Tells its process and that of a child in a session of its own; both end if nobody ends them.
SLEEPER = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""

SWITCH = """
from network_lab.layout import Layout
from network_lab.switch import Switch
Switch({taps}, {layout}, queue=10**6).run()
"""


@pytest.fixture(scope="module")
def machine():
    """Skips the test if this machine cannot have a lab; returns the backend."""
    try:
        requirements.check()
        return requirements.choose_backend("auto", Layout(workers=2))
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture
def start(machine):
    """Returns a function that starts a lab."""
    with contextlib.ExitStack() as labs:

        def launch(*arguments, script=None):
            arguments = [*arguments, *(["--", sys.executable, "-c", script] if script else [])]
            process = subprocess.Popen(
                [sys.executable, LAB, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            labs.callback(clean)
            labs.enter_context(process)
            labs.callback(process.kill)
            return process

        yield launch


def clean():
    command = [sys.executable, LAB, "--clean"]
    subprocess.run(command, check=True, timeout=PATIENCE)


def left_of(process):
    return namespaces.existing(f"network-lab-{process.pid}-")


def interfaces():
    return sorted(name for _, name in socket.if_nameindex())


def runs(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition):
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def read_pids(process, workers):
    """Returns the process IDs that the workers of SLEEPER print."""
    lines = [process.stdout.readline() for _ in range(workers)]
    return [int(pid) for line in lines for pid in line.split("pids")[1].split()]


def refused_without_commands(*arguments):
    """Runs a command line without `ip` in PATH, and returns the message."""
    result = subprocess.run(
        [sys.executable, LAB, *arguments],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def frame(target, sender, size=100, kind=0, payload=0, transport=0):
    """A frame as read from a TAP device, between the ports with these numbers."""
    addresses = bytes([2, 0, 0, 0, 0, target, 2, 0, 0, 0, 0, sender])
    return struct.pack("=BBHHHH", 0, kind, 0, payload, transport, 0) + addresses + bytes(size - 12)


@pytest.fixture
def switched():
    """Returns a function that connects a switch to sockets in place of interfaces."""
    with contextlib.ExitStack() as opened:

        def connect(layout):
            pairs = [
                socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for _ in range(layout.workers)
            ]
            for inner, outer in pairs:
                opened.enter_context(inner).setblocking(False)
                opened.enter_context(outer).settimeout(PATIENCE)
            taps = [inner.fileno() for inner, _ in pairs]
            switch = subprocess.Popen(
                [sys.executable, "-c", SWITCH.format(taps=taps, layout=layout)],
                cwd=LAB.parent,
                pass_fds=taps,
            )
            opened.enter_context(switch)
            opened.callback(switch.kill)
            ports = [outer for _, outer in pairs]
            # All are heard of, so that nothing is sent to all any more.
            for number, port in enumerate(ports):
                port.send(frame(99, number))
            for port in ports:
                for _ in range(layout.workers - 1):
                    port.recv(2000)
            return ports

        yield connect


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("0.5 s", 0.5), ("250US", 250e-6), ("0", 0), ("0ms", 0)]
)
def test_latencies_are_read(text, seconds):
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["40", "ms", "-1ms", "4 0ms", "40msec", "", "1e-3s"])
def test_a_malformed_latency_is_refused(text):
    with pytest.raises(LabError, match="40ms"):
        parse_latency(text)


@pytest.mark.parametrize(
    ("text", "bits"), [("200mbit", 200e6), ("1.5 Gbit", 1.5e9), ("64kbit", 64e3)]
)
def test_bandwidths_are_read(text, bits):
    assert parse_bandwidth(text) == pytest.approx(bits)


@pytest.mark.parametrize("text", ["200", "200mb", "200mbps", "0mbit", "-1gbit", "", "fast"])
def test_a_malformed_bandwidth_is_refused(text):
    with pytest.raises(LabError):
        parse_bandwidth(text)


def test_the_layout_says_who_is_near():
    layout = Layout(workers=6, groups=3, latency=0.04, group_latency=0.001)
    assert [layout.group(worker) for worker in range(6)] == [0, 0, 1, 1, 2, 2]
    assert layout.latency_between(2, 3) == 0.001
    assert layout.latency_between(1, 2) == layout.latency_between(5, 0) == 0.04
    assert len({layout.address(worker) for worker in range(6)}) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "1 to 250"),
        ({"workers": 251}, "1 to 250"),
        ({"workers": 8, "groups": 3}, "8 workers .* 3 groups"),
        ({"workers": 8, "groups": 0}, "0 groups"),
        ({"workers": 8, "latency": 0.1}, "only one"),
        ({"workers": 8, "groups": 2, "group_latency": 0.1}, "100 ms"),
        ({"workers": 8, "bandwidth": 1e6, "group_bandwidth": 1e9}, "more than one group"),
        ({"workers": 8, "groups": 2, "group_bandwidth": 1e9}, "a bandwidth between"),
    ],
)
def test_an_impossible_layout_is_refused(options, message):
    with pytest.raises(LabError, match=message):
        Layout(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups=2", "--check"], "--workers"),
        (["--workers=8", "--groups=3", "--check"], "3 groups"),
        (["--workers=8", "--groups=2", "--latency=40", "--check"], "'40' is not a latency"),
        (["--workers=2", "--bandwidth=200", "--check"], "'200' is not a bandwidth"),
        (["--workers=2", "--group_bandwidth=", "--check"], "'' is not a bandwidth"),
        (["--workers=2", "--grace=-1", "--check"], "--grace"),
        (["--workers=two", "--check"], "--workers"),
        (["--workers=2"], "after --"),
        (["--workers=2", "--check", "--", sys.executable], "after --"),
        (["--workers=2", "--", "no-such-command"], "'no-such-command'"),
        (["--workers=2", "--clean"], "--clean"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message):
    with pytest.raises(LabError, match=message):
        parse(arguments)


def test_rates_within_and_between_groups_are_read():
    rates = ["--bandwidth=200mbit", "--group_bandwidth=10gbit"]
    layout = parse(["--workers=4", "--groups=2", *rates, "--check"]).layout
    assert layout.bandwidth_between(0, 1) == 10e9
    assert layout.bandwidth_between(0, 2) == 200e6


def test_the_command_line_is_looked_at_before_the_machine():
    wrong = refused_without_commands("--workers=8", "--groups=3", "--check")
    assert "3 groups" in wrong
    assert "iproute2" not in wrong


@pytest.mark.skipif(os.geteuid() != 0, reason="root lacks less")
def test_missing_commands_are_named():
    assert "iproute2" in refused_without_commands("--workers=2", "--check")


def test_all_that_the_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LabError, match=r"root: (.|\n)*command ip: (.|\n)*command tc: .*iproute2"):
        requirements.check()


def test_a_segment_counts_as_the_packets_that_it_becomes():
    assert wire_bytes(frame(1, 0, size=1514)) == 1514
    # Ethernet 14, IP 20, and TCP 8 * 4 bytes; 3000 of payload in packets of 1448.
    segment = bytearray(frame(1, 0, size=66 + 3000, kind=1, payload=1448, transport=34))
    segment[10 + 34 + 12] = 8 << 4
    assert wire_bytes(bytes(segment)) == 3000 + 3 * 66


def test_the_switch_delays_by_group(switched):
    ports = switched(Layout(workers=4, groups=2, latency=0.6, group_latency=0.05))
    started = time.monotonic()
    ports[0].send(frame(2, 0))
    ports[0].send(frame(1, 0))
    ports[1].recv(2000)
    near = time.monotonic() - started
    ports[2].recv(2000)
    far = time.monotonic() - started
    assert 0.05 <= near < 0.6 <= far < 1.2


def test_the_switch_lets_targets_take_turns(switched):
    # A frame takes 10 ms.
    ports = switched(Layout(workers=3, bandwidth=0.8e6))
    started = time.monotonic()
    for _ in range(60):
        ports[0].send(frame(1, 0, size=1000))
    ports[0].send(frame(2, 0, size=1000))
    ports[2].recv(2000)
    other = time.monotonic() - started
    for _ in range(60):
        ports[1].recv(2000)
    assert other < 0.4
    assert 0.61 <= time.monotonic() - started < 1.2


def test_the_switch_limits_what_a_port_receives(switched):
    ports = switched(Layout(workers=3, bandwidth=0.8e6))
    started = time.monotonic()
    for _ in range(20):
        ports[0].send(frame(2, 0, size=1000))
        ports[1].send(frame(2, 1, size=1000))
    for _ in range(40):
        ports[2].recv(2000)
    assert 0.4 <= time.monotonic() - started < 1.2


def test_a_group_has_links_besides_those_between_groups(switched):
    # A frame takes 10 ms between groups, 1 ms within.
    layout = Layout(workers=4, groups=2, bandwidth=0.8e6, group_bandwidth=8e6)
    ports = switched(layout)
    started = time.monotonic()
    for _ in range(60):
        ports[0].send(frame(2, 0, size=1000))
        ports[2].send(frame(1, 2, size=1000))
    for _ in range(60):
        ports[0].send(frame(1, 0, size=1000))
    senders = [ports[1].recv(2000)[10 + 11] for _ in range(100)]
    near = time.monotonic() - started
    assert 0.4 <= near < 0.6
    assert senders.count(0) == 60
    for _ in range(20):
        ports[1].recv(2000)
    assert 0.6 <= time.monotonic() - started < 1.2


def test_only_the_switch_has_links_of_a_group():
    layout = Layout(workers=4, groups=2, bandwidth=1e6, group_bandwidth=1e9)
    with pytest.raises(LabError, match="--backend=netem"):
        requirements.choose_backend("netem", layout)


@pytest.mark.network_lab
@pytest.mark.long
@pytest.mark.parametrize("backend", ["switch", "netem"])
def test_latency_and_rate_are_as_asked(start, backend):
    try:
        requirements.choose_backend(backend, Layout(workers=2))
    except LabError as error:
        pytest.skip(str(error))
    process = start(
        *("--workers=4", "--groups=2", "--latency=30ms", "--group_latency=10ms"),
        *("--bandwidth=40mbit", f"--backend={backend}", "--check"),
    )
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert f"delays by: {backend}" in output
    numbers = {
        line[:6]: [float(number) for number in re.findall(r"\d+\.\d+", line)]
        for line in output.splitlines()[2:]
    }
    near_asked, near, _, near_rate = numbers["within"]
    far_asked, far, _, far_rate = numbers["betwee"]
    asked, *rates = numbers["all po"]
    assert (near_asked, far_asked, asked) == (10, 30, 38.3)
    assert 10 <= near < 20
    assert 30 <= far < 50
    for rate in (near_rate, far_rate, *rates):
        assert 0.4 * asked < rate < 1.1 * asked
    assert not left_of(process)


@pytest.mark.network_lab
def test_workers_reach_each_other_under_the_addresses_in_tf_config(start):
    before = interfaces()
    process = start("--workers=4", "--groups=2", "--latency=5ms", script=NEIGHBOUR)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    printed = {}
    for line in output.splitlines():
        worker, text = re.fullmatch(r"\[worker (\d)\] (.*)", line).groups()
        printed[int(worker)] = json.loads(text)
    assert sorted(printed) == [0, 1, 2, 3]
    clusters = [printed[worker]["job"]["cluster"] for worker in range(4)]
    assert all(cluster == clusters[0] for cluster in clusters)
    layout = Layout(workers=4, groups=2)
    hosts = [address.split(":")[0] for address in clusters[0]["worker"]]
    assert hosts == [layout.address(worker) for worker in range(4)]
    for worker in range(4):
        assert printed[worker]["job"]["task"] == {"type": "worker", "index": worker}
        assert printed[worker]["heard"] == f"from {(worker - 1) % 4}"
        # Of the machine's own there is none; eth0 is the lab's.
        assert {"eth0", "lo"} <= set(printed[worker]["interfaces"])
    assert not left_of(process)
    assert interfaces() == before


@pytest.mark.network_lab
def test_one_failure_ends_all(start):
    script = "import os, sys, time\nif '\"index\": 1' in os.environ['TF_CONFIG']: sys.exit(3)\n"
    process = start("--workers=3", script=script + "time.sleep(60)")
    started = time.monotonic()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert "worker 1 failed (status 3)" in errors
    assert time.monotonic() - started < 20
    assert not left_of(process)


@pytest.mark.network_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_workers_and_lab(start, number):
    process = start("--workers=2", script=SLEEPER)
    pids = read_pids(process, workers=2)
    assert len(left_of(process)) >= 2
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert not left_of(process)
    wait_until(lambda: not any(map(runs, pids)))


@pytest.mark.network_lab
def test_a_signal_during_building_leaves_nothing(start):
    process = start("--workers=30", script=SLEEPER)
    wait_until(lambda: len(left_of(process)) > 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert not left_of(process)


@pytest.mark.network_lab
def test_the_end_of_the_switch_is_the_end_of_the_lab(start):
    process = start("--workers=2", "--backend=switch", script=SLEEPER)
    pids = read_pids(process, workers=2)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    (switch,) = {int(pid) for pid in children.split()} - set(pids)
    os.kill(switch, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode
    assert "switch has ended" in errors
    assert not left_of(process)


@pytest.mark.network_lab
def test_clean_removes_what_a_killed_lab_left_and_nothing_else(start):
    others = f"network-lab-of-{os.getpid()}"
    running = start("--workers=1", script=SLEEPER)
    killed = start("--workers=2", script=SLEEPER)
    pids, (running_pid, *_) = read_pids(killed, workers=2), read_pids(running, workers=1)
    subprocess.run(["ip", "netns", "add", others], check=True)
    try:
        killed.kill()
        # Its parent need not have noticed.
        wait_until(lambda: not runs(killed.pid))
        assert len(left_of(killed)) >= 2
        clean()
        assert not left_of(killed)
        wait_until(lambda: not any(map(runs, pids)))
        assert left_of(running)
        assert runs(running_pid)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert others in names
    finally:
        subprocess.run(["ip", "netns", "del", others], check=True)
