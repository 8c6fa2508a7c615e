"""Jobs of tests in forks of one process: as if each had been started anew, and ended at last."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from forking import ROOT, load_launcher

# Prints the number of a process that it starts, and of itself; then does what its argument says.
PROGRAM = """
import os, subprocess, sys, time
sleeper = subprocess.Popen(["sleep", "60"])
print(sleeper.pid, os.getpid(), flush=True)
exec(sys.argv[1])
"""


@pytest.fixture
def run(forks, tmp_path):
    """Runs the program's last line: run(line, **options)."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(line, **options):
        return forks.run([str(tmp_path / "program.py"), line], dict(os.environ), **options)

    return start


def assert_ended(text):
    """Of the processes whose numbers the program has printed."""
    numbers = [int(word) for line in text.splitlines() for word in line.split("]")[-1].split()]
    assert numbers
    deadline = time.monotonic() + 10
    for number in numbers:
        state = pathlib.Path(f"/proc/{number}/stat")
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.02)


OF_ITS_OWN = """
import json, os, sys, __main__
environment = dict(os.environ)
own = __main__ is sys.modules["__main__"] and __main__.__dict__ is globals()
package = [name for name in sys.modules if name.startswith("imagenet_fast")]
print(json.dumps([__name__, own, sys.argv, sys.path[:2], os.getcwd(), environment, package]))
print(sys.stdin.read(), file=sys.stderr, end="")
sys.exit(3)
"""


@pytest.mark.parametrize("kind", ["-c", "script"])
def test_as_a_process_of_its_own(forks, tmp_path, kind):
    path = tmp_path / "script.py"
    path.write_text(OF_ITS_OWN)
    arguments = [*(["-c", OF_ITS_OWN] if kind == "-c" else [str(path)]), "--x=a b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OF_ITS_OWN": "1"}
    finished = forks.run(arguments, environment)
    expected = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert (finished.returncode, finished.stderr) == (expected.returncode, expected.stderr)
    assert json.loads(finished.stdout) == json.loads(expected.stdout)


def test_a_module(forks):
    finished = forks.run(["-m", "imagenet_fast", "trian"], dict(os.environ))
    assert finished.returncode == 2
    assert "did you mean 'train'?" in finished.stderr


def test_no_two_draw_the_same(forks):
    text = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, other = (forks.run(["-c", text], dict(os.environ)).stdout.split() for _ in range(2))
    assert not set(one) & set(other)


def test_a_failure(run):
    finished = run("raise ValueError('no such thing')")
    assert finished.returncode == 1
    assert finished.stderr.endswith("ValueError: no such thing\n")
    assert_ended(finished.stdout)
    finished = run("os.kill(os.getpid(), 11)")
    assert finished.returncode == -11
    assert_ended(finished.stdout)


def test_workers(run):
    line = (
        "import json; own = json.loads(os.environ['TF_CONFIG']); "
        "print(own['task']['index'], len(own['cluster']['worker']), os.environ['OMP_NUM_THREADS'])"
    )
    finished = run(line, workers=2)
    assert finished.returncode == 0
    cores = max(1, load_launcher().count_cores() // 2)
    told = finished.stdout.splitlines()
    assert told[1::2] == [f"[worker {index}] {index} 2 {cores}" for index in range(2)]
    assert_ended("\n".join(told[::2]))


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGTERM)", 128 + 15)]
)
def test_a_worker_that_fails_ends_the_others(run, end, status):
    start = time.monotonic()
    line = f"import signal; time.sleep(0.5); '\"index\": 1' in os.environ['TF_CONFIG'] and {end}"
    finished = run(f"{line}; time.sleep(60)", workers=3)
    assert finished.returncode == status
    assert time.monotonic() - start < 30
    assert_ended(finished.stdout)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_late(run, workers):
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run("time.sleep(60)", workers=workers, timeout=1)
    assert len(caught.value.stdout.splitlines()) == max(1, workers)
    assert_ended(caught.value.stdout)
    assert run("print(1)").returncode == 0, "jobs can go on"


def test_it_ends_with_the_tests(tmp_path):
    """Though they had no time to close it."""
    text = f"""
import os
from forking import Forks
forks = Forks(modules=())
forks.run(["-c", "1"], dict(os.environ))
print(forks._process.pid, flush=True)
forks.run({[str(tmp_path / "program.py"), "time.sleep(60)"]}, dict(os.environ))
"""
    told = tmp_path / "told"
    (tmp_path / "program.py").write_text(
        PROGRAM.replace("flush=True", f"file=open({str(told)!r}, 'w'), flush=True")
    )
    tests = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    with tests:
        try:
            server = tests.stdout.readline()
            deadline = time.monotonic() + 60
            while not told.exists() or not told.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            tests.kill()
    assert_ended(server + told.read_text())
