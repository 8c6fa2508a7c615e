"""Checks that workers agree before they train together."""

from __future__ import annotations

import dataclasses
import zlib

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import Options, option_text
from imagenet_fast.distribute.exchange import texts_of_all
from imagenet_fast.distribute.workers import worker_place, workers_of


def check_same_options(options: Options, strategy: tf.distribute.Strategy) -> None:
    """Checks that all workers were started with the same options.

    Raises:
      UserError: in all of them, naming the options that differ, the workers and their values.
    """
    if workers_of(strategy) is None:
        return
    # Workers of one machine may each name GPUs of their own; make_strategy compares the numbers.
    names = [field.name for field in dataclasses.fields(options) if field.name != "gpus"]
    texts = [option_text(getattr(options, name)) for name in names]
    digests = texts_of_all(strategy, f"{zlib.crc32(repr(texts).encode())}")
    if len(set(digests)) == 1:
        return
    workers, _ = worker_place(strategy)
    told = []
    for name, text in zip(names, texts):
        values = texts_of_all(strategy, text)
        others = [
            f"{value} at worker {replica * workers // len(values)}"
            for replica, value in enumerate(values)
            if value != values[0]
        ]
        if others:
            told.append(f"{name} is {values[0]} at the chief, {', '.join(dict.fromkeys(others))}")
    raise UserError(f"workers were started with different options: {'; '.join(told)}")


def check_consistent(
    strategy: tf.distribute.Strategy,
    what: str,
    how: str,
    advice: str = "start all workers with the same options",
) -> None:
    """Checks that all workers do something alike, where else they would wait for ever.

    Args:
      strategy: of the workers, all of which must come here; under others nothing is to be checked.
      what: the name of it, to complete "workers disagree on ...".
      how: how this worker does it.
      advice: what to do if others do it otherwise.

    Raises:
      UserError: in all workers, naming the first replica that differs from replica 0.
    """
    if workers_of(strategy) is None:
        return
    texts = texts_of_all(strategy, how)
    for replica, text in enumerate(texts):
        if text != texts[0]:
            raise UserError(
                f"workers disagree on {what}: replica {replica} {text!r}, replica 0 {texts[0]!r}; "
                f"{advice}"
            )
