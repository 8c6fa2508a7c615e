import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagenet_fast import Config
from imagenet_fast.base import environment
from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.data import manifest, prepare
from imagenet_fast.data.pipeline import thread_count
from imagenet_fast.data.sources import open_source


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7}, raising=False)


def test_cores_are_those_that_the_process_may_use(three_cores):
    assert cpu_cores() == environment.hardware()["cores"] == thread_count(Config()) == 3


def test_cores_where_a_process_may_use_all(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_cores() == os.cpu_count()


def test_data_sets_are_made_and_verified_in_as_many_threads(three_cores, tmp_path, monkeypatch):
    counts = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count):
            counts.append(count)
            super().__init__(count)

    monkeypatch.setattr(prepare, "ThreadPoolExecutor", Pool)
    prepare.prepare(open_source("digits"), tmp_path, progress=False)
    monkeypatch.setattr(manifest, "ThreadPoolExecutor", Pool)
    manifest.verify(tmp_path, progress=False)
    assert counts == [3, 3]
