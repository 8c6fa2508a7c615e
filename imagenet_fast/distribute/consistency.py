"""Consistency checks across workers before training."""

from __future__ import annotations

import dataclasses
import json

import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import Options, option_text
from imagenet_fast.distribute.exchange import texts_of_all
from imagenet_fast.distribute.workers import workers_of


def check_same_options(options: Options, strategy: tf.distribute.Strategy) -> None:
    """Checks that all workers were started with the same options.

    Raises:
      UserError: in all workers, with the options that differ, the workers and their values.
    """
    if workers_of(strategy) is None:
        return
    values = {
        field.name: option_text(getattr(options, field.name))
        for field in dataclasses.fields(options)
        # Workers on one machine may name different GPUs; make_strategy compares their numbers.
        if field.name != "gpus"
    }
    chief, *others = map(json.loads, texts_of_all(strategy, json.dumps(values)))
    differences = []
    for name, value in chief.items():
        different = [
            f"{other.get(name)} at worker {worker}"
            for worker, other in enumerate(others, start=1)
            if other.get(name) != value
        ]
        if different:
            differences.append(f"{name} is {value} at the chief, {', '.join(different)}")
    if differences:
        raise UserError(f"workers were started with different options: {'; '.join(differences)}")


def check_consistent(
    strategy: tf.distribute.Strategy,
    what: str,
    value: str,
    advice: str = "start all workers with the same options",
) -> None:
    """Checks that all workers have the same value, before differences cause a deadlock.

    All workers must call it; with one process it does nothing.

    ``what`` completes "workers disagree on ...", and ``advice`` says what to do then.

    Raises:
      UserError: in all workers, with the first worker that differs from worker 0.
    """
    if workers_of(strategy) is None:
        return
    values = texts_of_all(strategy, value)
    for worker, other in enumerate(values):
        if other != values[0]:
            raise UserError(
                f"workers disagree on {what}: worker {worker} {other!r}, worker 0 {values[0]!r}; "
                f"{advice}"
            )
