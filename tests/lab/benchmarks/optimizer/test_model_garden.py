"""Model Garden's LARS in a separate process: with fakes, and once with Model Garden itself."""

import sys
import time

import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.lab.benchmarks.optimizer.compare import compare_optimizers, start_lars

JOB = ([[3, 4], [4]], [True, False], {"learning_rate": 0.1})


@pytest.fixture
def environment(tmp_path):
    """environment(text) creates a directory whose bin/python is a shell script."""

    def make(text):
        (tmp_path / "bin").mkdir()
        python = tmp_path / "bin" / "python"
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
        return str(tmp_path)

    return make


def alive(process):
    return process.poll() is None


def test_answers(environment):
    """Each update waits for the process, which ends with the context."""
    directory = environment(
        'read job; echo \'{"tensorflow": "1.2"}\'\n'
        "read go; sleep 0.3; echo '[0.25, 0.5]'\n"
        'read go; echo "[${#job}, 0.0]"; read go'
    )
    with start_lars(directory, *JOB) as worker:
        assert worker.answer == {"tensorflow": "1.2"}
        start = time.perf_counter()
        assert worker.ask("update") == [0.25, 0.5]
        assert time.perf_counter() - start > 0.25
        assert worker.ask("update")[0] > len(str(JOB[0]))
        process = worker._process
        assert alive(process)
    assert not alive(process)


def test_a_failure_at_the_start(environment):
    directory = environment("read job; echo Traceback >&2; echo 'ImportError: no official' >&2")
    with pytest.raises(UserError, match=r"bin/python: ImportError: no official; tools/model_gard"):
        start_lars(directory, *JOB).__enter__()


def test_a_failure_later(environment):
    directory = environment("read job; echo '{}'; read go; exit 1")
    with (
        start_lars(directory, *JOB) as worker,
        pytest.raises(UserError, match="printed no error"),
    ):
        worker.ask("update")


def test_an_environment_without_model_garden(environment):
    directory = environment(f'exec "{sys.executable}" "$@"')
    with pytest.raises(UserError, match="No package metadata was found for tf-models-official"):
        start_lars(directory, *JOB).__enter__()


@pytest.mark.slow
@pytest.mark.long
def test_model_garden_itself(model_garden):
    """In an environment made by the tool."""
    directory = str(model_garden)
    comparison = compare_optimizers("resnet8", warmup=1, repeats=2, model_garden=directory)
    assert comparison.names[-1] == "Model Garden LARS"
    assert min(comparison.times[-1].seconds) > 0
    assert comparison.notes[-1].startswith("Model Garden 2.")
