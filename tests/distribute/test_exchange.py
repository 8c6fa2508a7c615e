"""Texts across worker processes, and workers that stop or hang."""

import json
import pathlib
import types

import pytest
import tensorflow as tf

from imagenet_fast.distribute import exchange
from imagenet_fast.distribute.exchange import (
    text_of_chief,
    texts_of_all,
    wait_for_all,
)

JOB = pathlib.Path(__file__).with_name("exchange_job.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory, run_python_session):
    """Returns the results of the two workers that stay."""
    folder = tmp_path_factory.mktemp("exchange")
    run_python_session([JOB, folder / "worker"], workers=3)
    return [json.loads((folder / f"worker{i}.json").read_text()) for i in range(2)]


@pytest.mark.slow
def test_texts(job):
    for worker_found in job:
        assert worker_found["texts"] == [f"worker {worker} " + "ä " * 300 for worker in range(3)]
        assert worker_found["chief"] == "0"


@pytest.mark.slow
def test_all_workers_name_the_one_that_stopped(job):
    for worker in job:
        assert worker["error"].endswith("(/job:worker/replica:0/task:2)")


@pytest.fixture
def exiting_chief(monkeypatch):
    """exiting_chief(result) simulates a chief that publishes a result, and exits once read."""

    def publish(result):
        class Service:
            def set_config_key_value(self, key, value):
                if "/read/" in key:
                    raise tf.errors.UnavailableError(None, None, "Socket closed (task:0)")

            def get_config_key_value(self, key, timeout_in_ms):
                return json.dumps(result)

        monkeypatch.setattr(exchange, "context", types.SimpleNamespace(context=Service))
        monkeypatch.setattr(exchange, "_tasks", lambda _: (["task:0", "task:1", "task:2"], 1))

    return publish


def test_the_chief_may_exit_when_all_have_read(exiting_chief):
    exiting_chief({"texts": ["a", "b", "c"]})
    assert texts_of_all(None, "b") == ["a", "b", "c"]


def test_the_stopped_worker_is_named_although_the_chief_exits(exiting_chief):
    exiting_chief({"texts": ["a", "b"], "error": "no answer (task:2)"})
    with pytest.raises(tf.errors.UnavailableError, match=r"^no answer \(task:2\)$"):
        texts_of_all(None, "b")


@pytest.mark.parametrize(("index", "named"), [(0, 1), (1, 0)])
def test_a_worker_that_runs_but_does_not_answer(monkeypatch, index, named):
    published = {}

    class Service:
        def set_config_key_value(self, key, value):
            published[key.rpartition("/")[2]] = value

        def get_config_key_value(self, key, timeout_in_ms):
            raise tf.errors.DeadlineExceededError(None, None, "timed out")

        def check_collective_ops_peer_health(self, task, timeout_in_ms):
            """It runs."""

    monkeypatch.setattr(exchange, "context", types.SimpleNamespace(context=Service))
    monkeypatch.setattr(exchange, "_tasks", lambda _: (["task:0", "task:1"], index))
    expected = rf"no answer within {0.2 if index else 0.1} s \(task:{named}\)"
    with pytest.raises(tf.errors.UnavailableError, match=expected):
        texts_of_all(None, "a", 0.1)
    if not index:  # The chief publishes the error.
        assert json.loads(published["all"])["error"] == "no answer within 0.1 s (task:1)"


def test_the_limit_is_one_for_all_workers(monkeypatch):
    """Otherwise the others, whose limit is twice as long, could give up and name the chief."""
    published, seconds = [], [0]

    class Service:
        def set_config_key_value(self, key, value):
            published.append((seconds[0], json.loads(value)))

        def get_config_key_value(self, key, timeout_in_ms):
            if key.endswith("text/1") and seconds[0] > 8:
                return "late"
            seconds[0] += timeout_in_ms / 1000
            raise tf.errors.DeadlineExceededError(None, None, "timed out")

        def check_collective_ops_peer_health(self, task, timeout_in_ms):
            """It runs."""

    monkeypatch.setattr(exchange, "context", types.SimpleNamespace(context=Service))
    monkeypatch.setattr(exchange.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(exchange, "_tasks", lambda _: (["task:0", "task:1", "task:2"], 0))
    with pytest.raises(tf.errors.UnavailableError, match=r"no answer within 10 s \(task:2\)"):
        texts_of_all(None, "a", 10)
    ((when, result),) = published
    assert when < 2 * 10 and result["error"].endswith("(task:2)")


def test_a_worker_without_a_chief_names_it(monkeypatch):
    class Service:
        def set_config_key_value(self, key, value):
            raise tf.errors.UnavailableError(None, None, "failed to connect")

    monkeypatch.setattr(exchange, "context", types.SimpleNamespace(context=Service))
    monkeypatch.setattr(exchange, "_tasks", lambda _: (["task:0", "task:1"], 1))
    with pytest.raises(tf.errors.UnavailableError, match=r"^failed to connect \(task:0\)$"):
        texts_of_all(None, "b")


def test_one_process():
    alone = tf.distribute.get_strategy()
    assert texts_of_all(alone, "text") == ["text"]
    assert text_of_chief(alone, "text") == "text"
    wait_for_all(alone)
