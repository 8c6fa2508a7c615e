"""Worker processes: pauses, ends and failures."""

import pathlib
import subprocess
import sys
import time

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.worker_process import WorkerTimeout, module_command, start_worker

# Counts hundredths of a second while it runs.
CLOCK = """
import os, sys, threading, time
os.setpgid(0, 0)
count = 0
def tick():
    global count
    while True:
        time.sleep(0.01)
        count += 1
threading.Thread(target=tick, daemon=True).start()
for _ in sys.stdin:
    print(count, flush=True)
"""


def test_a_worker_is_paused_between_answers():
    with start_worker([sys.executable, "-c", CLOCK], {}, name="the clock") as worker:
        before = worker.ask("")
        time.sleep(0.6)
        assert worker.ask("") - before < 30
        process = worker._process
        assert process.poll() is None
    assert process.poll() is not None


def test_a_worker_that_does_not_answer_in_time():
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(WorkerTimeout, match=r"the clock did not answer in 0\.2 s"),
        start_worker(silent, {}, name="the clock", limit_seconds=0.2),
    ):
        pass


def test_a_worker_ends_with_its_parent(run_python, tmp_path):
    """Even if it is paused, and the parent is killed."""
    program = tmp_path / "program.py"
    ending = "from imagenet_fast.base.worker_process import end_with_parent\nend_with_parent()"
    program.write_text(ending + CLOCK)
    parent = (
        "import os, sys\n"
        "from imagenet_fast.base.worker_process import start_worker\n"
        f"with start_worker([sys.executable, {str(program)!r}], 0, name='x') as worker:\n"
        "    print(worker._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    finished = run_python(["-c", parent], check=False, fresh=True)
    assert finished.returncode == -9
    status = pathlib.Path(f"/proc/{int(finished.stdout)}/stat")
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/python"], r"^it failed under /no/python: No such file or directory; do that$"),
        ([sys.executable, "-c", "raise OSError('no disk')"], r"python.*: OSError: no disk; do tha"),
        ([sys.executable, "-c", "input()"], "it printed no error; do that"),
    ],
)
def test_a_worker_that_fails(command, message):
    with (
        pytest.raises(UserError, match=message),
        start_worker(command, {}, name="it", advice="do that"),
    ):
        pass


def test_modules_of_the_working_directory_are_not_imported(tmp_path):
    """As `python -m` would."""
    for name in ("json", "runpy", "imagenet_fast", "tqdm"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} ran')\n")
    for module in ("imagenet_fast.doctor.worker", "imagenet_fast.lab.xla_compile.worker"):
        done = subprocess.run(
            module_command(module), cwd=tmp_path, input="", capture_output=True, text=True
        )
        assert "ran" not in done.stdout + done.stderr
        assert "imagenet_fast/" in done.stderr  # it was found, and misses its input
