import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

LAUNCHER = pathlib.Path(__file__).parents[2] / "tools" / "launch_local.py"
# Every wait below ends by then, whatever is broken.
PATIENCE = 20.0

# What the launcher sets, or looks at.
SET_HERE = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "TF_CONFIG",
    "TF_NUM_INTRAOP_THREADS",
)

# A worker that tells its process id, and ends by itself if nobody ends it.
SLEEPER = """
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(30)
"""


@pytest.fixture
def machine(tmp_path):
    """Returns a function that creates an environment with a number of GPUs."""

    def make(gpus=0, **variables):
        lines = "".join(
            f"echo 'GPU {index}: NVIDIA (UUID: GPU-{index})'\n" for index in range(gpus)
        )
        (tmp_path / "bin").mkdir(exist_ok=True)
        command = tmp_path / "bin" / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{lines}")
        command.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in SET_HERE}
        path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, "PATH": path, **variables}

    return make


@pytest.fixture
def start(tmp_path, machine):
    """Returns a function that starts the launcher with a script as the workers' program."""
    with contextlib.ExitStack() as launchers:

        def launch(script, *arguments, workers=2, environment=None):
            path = tmp_path / "worker.py"
            path.write_text(script)
            process = subprocess.Popen(
                [
                    *(sys.executable, LAUNCHER, "--workers", str(workers), "--program"),
                    shlex.join([sys.executable, str(path)]),
                    *arguments,
                ],
                env=environment or machine(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            launchers.enter_context(process)
            launchers.callback(process.kill)
            return process

        yield launch


@pytest.fixture
def run(start):
    """Returns a function that runs the launcher to its end: (status, stdout, stderr)."""

    def launch(*arguments, **options):
        process = start(*arguments, **options)
        output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output, errors

    return launch


def refused(*arguments, environment=None):
    """Runs a wrong command line and returns the message."""
    result = subprocess.run(
        [sys.executable, LAUNCHER, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def lines_of(output, worker):
    prefix = f"[worker {worker}] "
    return [line[len(prefix) :] for line in output.split("\n") if line.startswith(prefix)]


def printed(output, worker):
    """Returns what a worker printed as JSON."""
    return json.loads("\n".join(lines_of(output, worker)))


def environments(run, **options):
    status, output, errors = run(
        "import json, os; print(json.dumps(dict(os.environ)))", "--", **options
    )
    assert status == 0, errors
    return [printed(output, worker) for worker in range(options.get("workers", 2))]


def read_pids(process, count):
    return [int(process.stdout.readline().split()[-1]) for _ in range(count)]


def is_alive(pid):
    """Returns whether a process runs; zombies do not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def all_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_each_worker_has_its_own_place_in_one_cluster(run):
    configs = [json.loads(each["TF_CONFIG"]) for each in environments(run, workers=3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:[0-9]+", address) for address in addresses)
    assert [config["cluster"] for config in configs] == [{"worker": addresses}] * 3
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]


def test_ports_from_a_base(run):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = free.getsockname()[1]
    script = "import os; print(os.environ['TF_CONFIG'])"
    status, output, _ = run(script, "--port_base", str(base), workers=1)
    assert status == 0
    assert printed(output, 0)["cluster"]["worker"] == [f"127.0.0.1:{base}"]


def test_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = refused("--workers", "1", "--port_base", port, "--program", "true")
    assert f"port {port}" in message


def test_starts_imagenet_fast_with_all_that_follows(tmp_path, machine):
    path = stand_in(tmp_path, "import json, sys; print(json.dumps(sys.argv[1:]))")
    # What is in the working directory replaces no module.
    (tmp_path / "json.py").write_text("raise SystemExit('ran')")
    result = subprocess.run(
        [sys.executable, LAUNCHER, "--workers", "1", "--", "train", "--workers=3", "--", "a b"],
        cwd=tmp_path,
        env=machine(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.stdout == '[worker 0] ["train", "--workers=3", "--", "a b"]\n'


def test_starts_the_imagenet_fast_of_a_checkout(tmp_path, machine):
    """It need not be installed."""
    shutil.copytree(
        stand_in(tmp_path, "print('started')") + "/imagenet_fast", tmp_path / "imagenet_fast"
    )
    result = subprocess.run(
        [sys._base_executable, LAUNCHER, "--workers", "1", "--", "train"],
        cwd=tmp_path,
        env=machine(PYTHONPATH=""),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.stdout == "[worker 0] started\n", result.stderr


def stand_in(folder, content):
    """Returns a folder with a package that stands for ours, for PYTHONPATH."""
    package = folder / "path" / "imagenet_fast"
    package.mkdir(parents=True)
    # A package without it would give way to the installed one.
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(content)
    return str(package.parent)


# Stands for the package: a server that listens, or a program that tells its arguments.
PACKAGE = """
import os, signal, socket, sys, time

name, *arguments = sys.argv[1:]
if name == "input-server":
    if os.environ.get("FAIL") == "start":
        sys.exit(5)
    assert "TF_CONFIG" not in os.environ and "127.0.0.1" in os.environ["no_proxy"]
    time.sleep(0.5)
    host, port = (argument.partition("=")[2] for argument in arguments)
    listener = socket.create_server((host, int(port)))
    print("pid", os.getpid(), flush=True)
    signal.alarm(30)
    if os.environ.get("FAIL") == "later":
        listener.accept()
        listener.accept()
        sys.exit(6)
    if os.environ.get("FAIL") == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)
print(arguments[-1])
for address in arguments[-1].partition("=")[2].split(","):
    host, port = address.split(":")
    socket.create_connection((host, int(port))).close()
if os.environ.get("FAIL"):
    time.sleep(30 if os.environ["FAIL"] == "later" else 0)
"""


@pytest.fixture
def run_servers(tmp_path, machine):
    """Returns a function that runs a worker beside two servers: (status, stdout, stderr)."""
    path = stand_in(tmp_path, PACKAGE)

    def launch(*arguments, **variables):
        launcher = [sys.executable, LAUNCHER, "--workers", "1", "--input_servers", "2"]
        finished = subprocess.run(
            [*launcher, *arguments, "--", "train", "--seed=3"],
            cwd=tmp_path,
            env=machine(PYTHONPATH=path, **variables),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return finished.returncode, finished.stdout, finished.stderr

    return launch


def server_pids(output):
    return [int(lines.split()[1]) for lines in re.findall(r"\[input server \d\] (pid \d+)", output)]


def test_input_servers_listen_before_the_workers_start_and_end_after_them(run_servers):
    status, output, errors = run_servers()
    assert status == 0, errors
    (flag,) = lines_of(output, 0)
    assert re.fullmatch(r"--input_servers=127\.0\.0\.1:\d+,127\.0\.0\.1:\d+", flag)
    assert len(set(flag.partition("=")[2].split(","))) == 2
    pids = server_pids(output)
    assert len(pids) == 2 and all_gone(pids)
    assert errors == ""


def test_input_servers_ports_follow_those_of_the_workers(run_servers):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = min(free.getsockname()[1], 65000)
    status, output, _ = run_servers("--port_base", str(base))
    assert status == 0
    assert lines_of(output, 0) == [f"--input_servers=127.0.0.1:{base + 1},127.0.0.1:{base + 2}"]


def test_workers_do_not_start_without_the_input_servers(run_servers):
    status, output, errors = run_servers(FAIL="start")
    assert status == 5
    assert re.search(r"input server \d failed \(status 5\)", errors)
    assert not lines_of(output, 0)


def test_input_server_that_fails_ends_the_workers(run_servers):
    # It does when the launcher and the worker have both connected.
    status, output, errors = run_servers(FAIL="later")
    assert status == 6
    assert re.search(r"input server \d failed \(status 6\); stopping the remaining workers", errors)
    assert all_gone(server_pids(output))


def test_input_server_that_ignores_sigterm_is_killed_and_the_run_succeeds(run_servers):
    status, output, _ = run_servers("--grace", "0.3", FAIL="deaf")
    assert status == 0
    assert all_gone(server_pids(output))


def test_lines_are_prefixed_and_streams_kept_apart(run):
    script = """
import sys
print("first\\n\\nlast", end="")
print("to stderr", file=sys.stderr)
"""
    status, output, errors = run(script)
    assert status == 0
    for worker in range(2):
        assert lines_of(output, worker) == ["first", "", "last"]
        assert lines_of(errors, worker) == ["to stderr"]
    assert len(output.splitlines()) == 6


def test_lines_come_as_they_are_written(start):
    process = start("import time; print('now'); time.sleep(30)", workers=1)
    begin = time.monotonic()
    assert process.stdout.readline() == "[worker 0] now\n"
    assert time.monotonic() - begin < 15


def test_redrawn_bars_become_lines(start):
    script = r"""
import sys, time
for text in ("\r 10%", "\r 20%", "\r    \r", "message\r", "\n", "\r 30%\n", "\r 40%\r"):
    sys.stderr.write(text)
    sys.stderr.flush()
    time.sleep(0.05)
"""
    errors = start(script, workers=1).stderr.buffer.read()
    texts = (b" 10%", b" 20%", b"message", b" 30%", b" 40%")
    assert errors == b"".join(b"[worker 0] %s\n" % text for text in texts)


def test_waits_for_all_when_one_ends_well(run):
    script = """
import json, os, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
time.sleep(index)
print("done")
"""
    status, output, _ = run(script)
    assert status == 0
    assert lines_of(output, 0) == lines_of(output, 1) == ["done"]


# Worker 1 fails once the file named by the last argument is there.
FAILS = """
import json, os, pathlib, signal, sys, time
print("pid", os.getpid(), flush=True)
{first}
end = time.monotonic() + 30
while time.monotonic() < end:
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        if pathlib.Path(sys.argv[-1]).exists():
            {failure}
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("failure", "expected"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_failure_of_one_ends_the_others(start, tmp_path, failure, expected):
    cue = tmp_path / "cue"
    process = start(FAILS.format(first="", failure=failure), "--", str(cue), workers=3)
    pids = read_pids(process, 3)
    cue.touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == expected
    assert f"worker 1 failed (status {expected})" in errors
    assert all_gone(pids)


def test_worker_that_ignores_sigterm_is_killed(start, tmp_path):
    cue, deaf = tmp_path / "cue", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = FAILS.format(first=deaf, failure="sys.exit(7)")
    process = start(script, "--grace", "0.3", "--", str(cue))
    pids = read_pids(process, 2)
    cue.touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 7
    assert all_gone(pids)


def test_workers_can_end_in_order(start):
    polite = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(30)
"""
    process = start(polite, workers=1)
    process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert lines_of(output, 0) == ["saved"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_the_launcher_ends_all(start, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, which the launcher respects")
    process = start(SLEEPER)
    pids = read_pids(process, 2)
    assert all(map(is_alive, pids))
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert all_gone(pids)


def test_second_signal_waits_no_longer(start):
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    deaf += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    process = start(deaf + SLEEPER, "--grace", "25")
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    assert "stopping the remaining workers" in process.stderr.readline()
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert all_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_workers_do_not_outlive_a_killed_launcher(start):
    process = start(SLEEPER)
    pids = read_pids(process, 2)
    assert all(map(is_alive, pids))
    process.kill()
    assert all_gone(pids)


def test_what_a_worker_started_does_not_outlive_it(start, tmp_path):
    script = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
while not pathlib.Path(sys.argv[-1]).exists():
    time.sleep(0.02)
"""
    cue = tmp_path / "cue"
    process = start(script, "--", str(cue), workers=1)
    pids = read_pids(process, 1)
    assert is_alive(pids[0])
    cue.touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert all_gone(pids)


def test_closed_output_ends_the_run(start):
    script = """
import os, subprocess
child = subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(os.getpid(), child.pid)
while True:
    print("y" * 1000)
"""
    process = start(script, workers=1)
    pids = [int(word) for word in process.stdout.readline().split()[-2:]]
    process.stdout.close()
    assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
    assert "Traceback" not in process.stderr.read()
    assert all_gone(pids)


def test_cores_are_shared(run, machine):
    cores = len(os.sched_getaffinity(0))
    for own in environments(run, workers=2):
        assert own["TF_NUM_INTRAOP_THREADS"] == str(max(1, cores // 2))
        assert own["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert "CUDA_VISIBLE_DEVICES" not in own
    own = environments(run, workers=1, environment=machine(OMP_NUM_THREADS="5"))[0]
    assert own["OMP_NUM_THREADS"] == "5"
    assert own["TF_NUM_INTRAOP_THREADS"] == str(cores)


def test_gpus_are_shared_evenly(run, machine):
    shares = environments(run, workers=2, environment=machine(gpus=5))
    assert [own["CUDA_VISIBLE_DEVICES"] for own in shares] == ["0,1", "2,3"]
    assert all("TF_NUM_INTRAOP_THREADS" not in own for own in shares)


def test_gpus_that_the_user_chose_stay(run, machine):
    environment = machine(gpus=1, CUDA_VISIBLE_DEVICES="")
    shares = environments(run, workers=2, environment=environment)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in shares] == ["", ""]
    assert all("TF_NUM_INTRAOP_THREADS" in own for own in shares)


def test_fewer_gpus_than_workers(machine):
    message = refused("--workers", "3", "--program", "true", environment=machine(gpus=2))
    assert "3 workers cannot share 2 GPUs" in message


def test_workers_reach_each_other_without_a_proxy(run, machine):
    environment = machine(no_proxy="example.org")
    environment.pop("NO_PROXY", None)
    own = environments(run, workers=1, environment=environment)[0]
    assert own["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert own["NO_PROXY"] == "127.0.0.1,localhost"


# Worker 1 ends as given until its second start; the others wait for that.
ENDS_ONCE = """
import json, os, pathlib, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
started = pathlib.Path(sys.argv[-1])
print("started", flush=True)
if index == 1 and not started.exists():
    started.touch()
    {ending}
if index == 1:
    started.with_name("again").touch()
while not started.with_name("again").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(128 + 15)"])
def test_a_worker_that_is_killed_starts_again(run, tmp_path, ending):
    """SIGTERM may have let it end its own processes first."""
    script = ENDS_ONCE.format(ending=ending)
    arguments = ("--restart_after", "0.5", "--", str(tmp_path / "started"))
    status, output, errors = run(script, *arguments, workers=3)
    assert status == 0, errors
    assert [len(lines_of(output, worker)) for worker in range(3)] == [1, 2, 1]
    assert "worker 1 was killed; it starts again in 0.5 s" in errors


@pytest.mark.parametrize(
    ("restart", "ending", "expected"),
    [
        ((), "os.kill(os.getpid(), 9)", 137),
        (("--restart_after", "0"), "sys.exit(2)", 2),
        (("--restart_after", "0"), "sys.exit(137)", 137),
    ],
)
def test_workers_with_an_error_of_their_own_do_not_start_again(
    run, tmp_path, restart, ending, expected
):
    script = ENDS_ONCE.format(ending=ending)
    status, output, _ = run(script, *restart, "--", str(tmp_path / "started"), workers=2)
    assert status == expected
    assert lines_of(output, 1) == ["started"]


def test_a_killed_worker_does_not_start_again_when_another_has_finished(run, tmp_path):
    script = """
import json, os, pathlib, time
if json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
    os.kill(os.getpid(), 9)
time.sleep(0.5)
"""
    status, _, errors = run(script, "--restart_after", "10", "--", workers=2)
    assert status == 0 and "starts again in 10 s" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0", "--", "train"], "--workers is 0"),
        (["--workers", "two", "--", "train"], "invalid int value"),
        (["--", "train"], "--workers"),
        (["--workers", "2"], "nothing to run"),
        (["--workers", "2", "--"], "nothing to run"),
        (["--workers", "2", "train"], "train"),
        (["--workers", "2", "--port_base", "65535", "--", "train"], "--port_base is 65535"),
        (["--workers", "2", "--port_base", "0", "--", "train"], "--port_base is 0"),
        (["--workers", "2", "--grace", "-1", "--", "train"], "--grace is -1"),
        (["--workers", "2", "--restart_after", "-1", "--", "train"], "--restart_after is -1"),
        (["--workers", "2", "--input_servers", "-1", "--", "train"], "--input_servers is -1"),
        (["--workers", "2", "--program", "/no/such/file"], "cannot start '/no/such/file'"),
    ],
)
def test_wrong_command_lines_are_explained(arguments, message, machine):
    assert message in refused(*arguments, environment=machine())
