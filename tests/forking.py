"""Runs Python in forks of one process that has imported TensorFlow, which takes seconds.

It is forked before it has any other thread, and before it has done anything with what it imported.
What a fork shares with the others, and a process that is started anew does not: the order in which
sets of strings give their elements, what is read from the environment during those imports, and
numpy's matrix products by one thread.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ("numpy", "tensorflow", "keras")
_PR_SET_PDEATHSIG = 1


# --- In the tests


class Forks:
    """The process that is forked, from the first job on; end it with :meth:`close`.

    Args:
      modules: what it imports.
    """

    def __init__(self, modules=MODULES):
        self._modules = modules
        self._process = None

    def run(self, arguments, environment, workers=0, timeout=300):
        """Returns the finished process, or what remains of several workers together.

        As of the launcher, lines of workers begin with ``[worker K]``, and the first failure ends
        the others and gives the status, 128 + n after signal n.

        Args:
          arguments: what follows ``python``: a script, ``-c text`` or ``-m module``, and its
            arguments.
          environment: all variables.
          workers: processes with the launcher's environments; 0: one with ``environment``.
          timeout: seconds.

        Raises:
          subprocess.TimeoutExpired: after that time; nothing is left running.
        """
        environments = [environment]
        if workers:
            launcher = load_launcher()
            ports = launcher.choose_ports(workers, None)
            environments = launcher.worker_environments(ports, environment)
        job = {"arguments": arguments, "environments": environments, "timeout": timeout}
        try:
            answer = self._ask(job)
        except BaseException:
            self.close()  # Whatever it would answer is not for the next job.
            raise
        status, outputs = answer["status"], answer["outputs"]
        if workers:
            status = 128 - status if status < 0 else status
            outputs = [
                [
                    f"[worker {index}] {line}\n"
                    for index, text in enumerate(texts)
                    for line in text.splitlines()
                ]
                for texts in outputs
            ]
        stdout, stderr = map("".join, outputs)
        if answer["late"]:
            raise subprocess.TimeoutExpired(arguments, timeout, stdout, stderr)
        return subprocess.CompletedProcess(arguments, status, stdout, stderr)

    def _ask(self, job):
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                # One thread: numpy's library would start others when it is imported.
                env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
                # Ctrl-C is for the tests, at whose end it ends too.
                start_new_session=True,
            )
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process to fork ended with status {self._process.wait()}"
        return json.loads(answer)

    def close(self):
        """Ends the process, and what it runs."""
        if self._process is not None:
            self._process.communicate()  # Closes its stdin, and waits for its end.
            self._process = None


@functools.cache
def load_launcher():
    """Returns tools/launch_local.py as a module."""
    path = ROOT / "tools" / "launch_local.py"
    specification = importlib.util.spec_from_file_location("launch_local", path)
    launcher = importlib.util.module_from_spec(specification)
    # Dataclasses look their module up.
    sys.modules["launch_local"] = launcher
    specification.loader.exec_module(launcher)
    return launcher


# --- In the process that is forked


def serve():
    """Runs jobs until stdin ends; in each of their processes, returns what it is to run."""
    # TensorFlow imports pandas where it is installed, and that pyarrow, which starts a thread.
    sys.modules.update(dict.fromkeys(("pandas", "pyarrow")))
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for module in ("pandas", "pyarrow"):
        del sys.modules[module]
    assert sys.path[1] == str(ROOT), "PYTHONPATH, in whose place that of a job will be"
    threads = len(list(pathlib.Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: what they hold would be held for ever in a fork"
    # Collecting garbage, as at each end, need not go through all that was imported.
    gc.collect()
    gc.freeze()
    server, prctl = os.getpid(), ctypes.CDLL(None).prctl
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := sys.stdin.readline():
        job = json.loads(line)
        # Closed when they have been read.
        outputs = [[tempfile.TemporaryFile() for _ in job["environments"]] for _ in range(2)]  # noqa: SIM115
        children = []
        for environment, stdout, stderr in zip(job["environments"], *outputs):
            child = os.fork()
            if not child:
                os.setsid()
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:  # It died before the line above.
                    os._exit(1)
                answers.close()
                _become_new(environment, stdout, stderr)
                return job["arguments"]
            children.append(child)
        status, late = _wait(children, job["timeout"])
        texts = [[_content(file) for file in files] for files in outputs]
        answer = {"status": status, "late": late, "outputs": texts}
        print(json.dumps(answer), file=answers, flush=True)
    return None


def _become_new(environment, stdout, stderr):
    """Makes this process as if it had been started with these variables and outputs."""
    os.environ.clear()
    os.environ.update(environment)
    with pathlib.Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    # Lines are to be there if it is killed.
    sys.stdout.reconfigure(line_buffering=True)
    if "numpy" in sys.modules:  # Else workers that have no common seed would draw the same.
        sys.modules["numpy"].random.seed()


def _wait(children, timeout):
    """Waits for all, or the first that fails; returns its status, or 0, and whether it was late.

    Nothing is left of the children's process groups.
    """
    end = time.monotonic() + timeout
    first, late = 0, False
    running = {os.pidfd_open(child): child for child in children}
    while running:
        # No job comes before the last one is answered: it is the end of the tests.
        ready = select.select([0, *running], [], [], max(0, end - time.monotonic()))[0]
        if not ready or 0 in ready:
            late = True
            ready = list(running)
            _kill(running.values())
        for descriptor in ready:
            child = running.pop(descriptor)
            os.close(descriptor)
            _kill([child])
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status and not first:
                first = status
                _kill(running.values())
    return first, late


def _kill(children):
    """Ends them and what they have started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            # The group first: as long as its leader is not waited for, its number is not another's.
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # It may have had no time to make itself a group.
            os.kill(child, signal.SIGKILL)


def _content(file):
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def run(first, *others):
    """Does what ``python`` does with these arguments."""
    sys.path[1:2] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv[:] = others
        sys.path[0] = str(pathlib.Path.cwd())
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        text, *others = others
        sys.argv[:] = ["-c", *others]
        sys.path[0] = ""
        exec(compile(text, "<string>", "exec"), main.__dict__)
    else:
        path = pathlib.Path(first)
        sys.argv[:] = [first, *others]
        sys.path[0] = str(path.resolve().parent)
        main.__file__ = str(path)
        exec(compile(path.read_text(), path, "exec"), main.__dict__)


if __name__ == "__main__":
    arguments = serve()
    if arguments:
        run(*arguments)
