"""What several tests need: small data sets, and processes that train together."""

import fcntl
import functools
import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from forking import Forks

ROOT = pathlib.Path(__file__).parent.parent

# In the background, and in pytest-xdist's workers, Ctrl-C is ignored, which programs that tests
# start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before TensorFlow is imported anywhere.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_addoption(parser):
    parser.addoption(
        "--first-cases", action="store_true", help="of a parametrized test, only the first case"
    )


@pytest.hookimpl(trylast=True)  # After the selection by markers.
def pytest_collection_modifyitems(config, items):
    """Begins with the files whose tests start processes, and ends with those of the first folders.

    These take a second or less each, so that pytest-xdist's workers finish at the same time.
    """
    if config.getoption("first_cases"):
        first = {}
        for item in items:
            first.setdefault((item.path, item.originalname), item)
        config.hook.pytest_deselected(items=list(set(items).difference(first.values())))
        items[:] = first.values()
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path in slow, item.path), reverse=True)


def pytest_collection_finish():
    """Leaves the modules imported so far out of garbage collections, which they made slow."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Returns a folder that is made once for all tests, also those of pytest-xdist's other workers.

    made_once(name, make): ``make`` is called with the folder's path, which does not exist yet.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # in which those of all workers are

    def get(name, make):
        directory, made = folder / name, folder / f"{name}.made"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(directory, ignore_errors=True)  # Half of it, if that failed.
                make(directory)
                made.touch()
        return directory

    return get


@pytest.fixture(scope="session")
def digits(made_once):
    """scikit-learn's digits as shards: 1,438 training and 359 validation images."""

    def make(directory):
        from imagenet_fast.data.prepare.job import prepare
        from imagenet_fast.data.prepare.sources import open_source

        prepare(open_source("digits"), directory, progress=False)

    return str(made_once("digits", make))


@pytest.fixture(scope="session")
def native_ops():
    """Skips tests of the native ops if there is no compiler for them."""
    from imagenet_fast import Config
    from imagenet_fast.data.jpeg.image_ops import with_resize_kernel

    if with_resize_kernel(Config()).resize_kernel != "native":
        pytest.skip("no C++ compiler")


@pytest.fixture(scope="session")
def model_garden(made_once):
    """The environment of tools/model_garden.sh; pip gets tf-models-official, or it fails."""

    def make(directory):
        for _ in range(2):  # a second time does nothing
            subprocess.run(
                [ROOT / "tools" / "model_garden.sh", directory],
                check=True,
                env={**os.environ, "PYTHON": sys.executable},
            )

    return made_once("model garden", make)


@pytest.fixture
def run_python(run_python_session):
    """Runs Python in a process of its own: run_python(arguments, workers=0, timeout=...)."""
    return run_python_session


@pytest.fixture(scope="session")
def run_python_session(forks):
    """The same, for fixtures that live as long as the session."""
    return functools.partial(_run_python, forks)


@pytest.fixture(scope="session")
def forks():
    """The process that is forked for all tests."""
    forks = Forks()
    yield forks
    forks.close()


def _run_python(
    forks, arguments, workers=0, timeout=300, check=True, environment=None, fresh=False
):
    """Returns the finished process; with workers, as many run together and prefix their lines.

    Args:
      forks: of the process that has imported TensorFlow.
      arguments: what follows ``python``: a script, ``-c text`` or ``-m module``, and its arguments.
      workers: processes that train together; 0: one process, without TF_CONFIG.
      timeout: seconds.
      check: fail unless the status is 0.
      environment: variables to add.
      fresh: start Python anew, workers under tools/launch_local.py: where it matters what has been
        imported, or with which variables, or in what order the elements of a set come.
    """
    arguments = [str(argument) for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    # Modules of another folder may stand for those that have been imported.
    fresh = fresh or environment["PYTHONPATH"].split(os.pathsep)[0] != str(ROOT)
    if fresh or not hasattr(os, "pidfd_open"):  # Linux has it.
        finished = _run_fresh(arguments, environment, workers, timeout)
    else:
        finished = forks.run(arguments, environment, workers, timeout)
    if check:
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-8000:]
    return finished


def _run_fresh(arguments, environment, workers, timeout):
    command = [sys.executable, *arguments]
    if workers:
        split = 2 if arguments[0] == "-m" else 1
        program = " ".join([sys.executable, *arguments[:split]])
        launcher = [sys.executable, str(ROOT / "tools" / "launch_local.py")]
        command = [*launcher, "--workers", str(workers), "--program", program, "--"]
        command += arguments[split:]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=environment,
    )
