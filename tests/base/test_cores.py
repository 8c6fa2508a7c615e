import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagenet_fast import Config
from imagenet_fast.base import environment
from imagenet_fast.base.cores import cpu_cores
from imagenet_fast.data import manifest
from imagenet_fast.data.dataset import thread_count
from imagenet_fast.data.prepare import shard_writer
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.sources import open_source


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7}, raising=False)


def test_only_usable_cores_are_counted(three_cores):
    assert cpu_cores() == environment.hardware()["cores"] == thread_count(Config()) == 3


def test_systems_without_cpu_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu_cores() == os.cpu_count()


def test_prepare_and_verify_use_one_thread_a_core(three_cores, tmp_path, monkeypatch):
    counts = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count):
            counts.append(count)
            super().__init__(count)

    monkeypatch.setattr(shard_writer, "ThreadPoolExecutor", Pool)
    prepare(open_source("digits"), tmp_path, progress=False)
    monkeypatch.setattr(manifest, "ThreadPoolExecutor", Pool)
    manifest.verify(tmp_path, progress=False)
    assert counts == [3, 3]
