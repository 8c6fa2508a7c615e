"""Consistency checks in one process; the jobs of other tests have several."""

import json
import re

import pytest
import tensorflow as tf

from imagenet_fast import Config, UserError
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.distribute import consistency
from imagenet_fast.distribute.consistency import check_consistent, check_same_options


def test_one_process_has_nothing_to_compare():
    alone = tf.distribute.get_strategy()
    check_same_options(Config(), alone)
    check_consistent(alone, "anything", "this way")


def test_options_that_differ_are_named_with_their_worker(monkeypatch):
    """Of three workers, the last has another seed."""
    monkeypatch.setattr(consistency, "workers_of", lambda strategy: "workers")

    def texts(strategy, own):
        return [own, own, json.dumps({**json.loads(own), "seed": "7"})]

    monkeypatch.setattr(consistency, "texts_of_all", texts)
    message = "workers were started with different options: seed is 3 at the chief, 7 at worker 2"
    with pytest.raises(UserError, match=re.escape(message) + "$"):
        check_same_options(SharedOptions(batch_size=256, seed=3), tf.distribute.get_strategy())
