"""What several tests need: small data sets, and processes that train together."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# In the background, and in pytest-xdist's workers, Ctrl-C is ignored, which programs that tests
# start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before TensorFlow is imported anywhere.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# As the commands do: hundreds of processes start faster. Notebooks are run without it.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """scikit-learn's digits as shards: 1,438 training and 359 validation images."""
    from imagenet_fast.data.prepare import prepare
    from imagenet_fast.data.sources import open_source

    directory = tmp_path_factory.mktemp("data") / "digits"
    prepare(open_source("digits"), directory, progress=False)
    return str(directory)


@pytest.fixture
def run_python():
    """Runs Python in a process of its own: run_python(arguments, workers=0, timeout=...)."""
    return _run_python


@pytest.fixture(scope="session")
def run_python_session():
    """The same, for fixtures that live as long as the session."""
    return _run_python


def _run_python(arguments, workers=0, timeout=300, check=True, environment=None):
    """Returns the finished process; with workers, as many run together and prefix their lines.

    Args:
      arguments: what follows ``python``: a script or ``-m module``, and its arguments.
      workers: processes under tools/launch_local.py; 0: one process, without TF_CONFIG.
      timeout: seconds.
      check: fail unless the status is 0.
      environment: variables to add.
    """
    arguments = [str(argument) for argument in arguments]
    command = [sys.executable, *arguments]
    if workers:
        split = 2 if arguments[0] == "-m" else 1
        program = " ".join([sys.executable, *arguments[:split]])
        launcher = [sys.executable, str(ROOT / "tools" / "launch_local.py")]
        command = [*launcher, "--workers", str(workers), "--program", program, "--"]
        command += arguments[split:]
    finished = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )
    if check:
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
    return finished
