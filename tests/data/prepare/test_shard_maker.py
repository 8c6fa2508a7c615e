"""Single shards, and what a worker elsewhere leaves of them."""

import dataclasses

import numpy as np
import pytest

from imagenet_fast.base.errors import UserError
from imagenet_fast.data.manifest import JOURNAL
from imagenet_fast.data.prepare.job import prepare
from imagenet_fast.data.prepare.journal import leave, left_path
from imagenet_fast.data.prepare.plan import deal, tasks_by_index
from imagenet_fast.data.prepare.shard_maker import ShardMaker
from imagenet_fast.data.prepare.sources.arrays import ArraySource


@pytest.fixture
def source():
    generator = np.random.default_rng(0)
    arrays = {
        split: (generator.integers(0, 256, (count, 9, 7), np.uint8), np.arange(count) % 3)
        for split, count in {"train": 60, "validation": 12}.items()
    }
    return ArraySource("noise", "noise", "abc", arrays)


@pytest.fixture
def whole(source, tmp_path):
    prepare(source, tmp_path / "whole", encoding="png", progress=False)
    return contents(tmp_path / "whole")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tasks(source, job):
    return tasks_by_index(source, deal(source.splits, job["shards"], job["seed"]))


def begin(source, directory, monkeypatch, error=KeyboardInterrupt):
    """Starts a job and writes no shard; returns the job."""
    jobs = []

    def make(self, *_):
        jobs.append(self.job)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ShardMaker, "make", make)
        with pytest.raises(error):
            prepare(source, directory, encoding="png", threads=1, progress=False)
    return jobs[0]


def test_two_workers_with_the_same_shard_do_not_disturb_each_other(
    source, whole, tmp_path, monkeypatch
):
    job = begin(source, tmp_path / "data", monkeypatch)
    maker, task = ShardMaker(source, tmp_path / "data", job), tasks(source, job)[0]
    numbers, done = [], []

    def overtake(skipped):
        numbers.append(skipped)
        if len(numbers) == 2:  # a second worker begins later and ends first
            done.append(maker.make(task, lambda _: None))

    done.append(maker.make(task, overtake))
    assert done[0] == done[1]
    found = contents(tmp_path / "data")
    found.pop(JOURNAL)
    assert found == {task.file: whole[task.file]}


def test_what_workers_left_is_not_done_again(source, whole, tmp_path, monkeypatch):
    directory = tmp_path / "data"
    job = begin(source, directory, monkeypatch)
    maker = ShardMaker(source, directory, job)
    made = tasks(source, job)[:3]
    for task in made:
        leave(directory, maker.make(task, lambda _: None))
    times = {task.file: (directory / task.file).stat().st_mtime_ns for task in made}
    begin(source, directory, monkeypatch)  # takes them into the journal
    assert (directory / JOURNAL).read_bytes().count(b"\n") == 4
    assert not list(directory.glob(".*"))
    prepare(source, directory, encoding="png", progress=False)
    assert contents(directory) == whole
    assert {file: (directory / file).stat().st_mtime_ns for file in times} == times


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"split": 1}'])
def test_what_no_worker_left(source, tmp_path, monkeypatch, content):
    begin(source, tmp_path, monkeypatch)
    path = left_path(tmp_path, "train-00000-of-00008")
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: is damaged .*; delete it"):
        prepare(source, tmp_path, encoding="png", progress=False)


def test_a_shard_of_another_split_is_made_anew(source, whole, tmp_path, monkeypatch):
    directory = tmp_path / "data"
    job = begin(source, directory, monkeypatch)
    (task, *_) = tasks(source, job)
    done = ShardMaker(source, directory, job).make(task, lambda _: None)
    leave(directory, dataclasses.replace(done, split="test"))
    (directory / ".backup.done").write_text("the user's")
    prepare(source, directory, encoding="png", progress=False)
    found = contents(directory)
    assert found.pop(".backup.done") == b"the user's"
    assert found == whole


def test_a_source_without_opening_cannot_be_opened_elsewhere(source):
    with pytest.raises(UserError, match="noise: cannot be opened by other machines"):
        source.opener()
