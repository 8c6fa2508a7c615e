"""Schedule changes of a run that resumes, such as a longer duration."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import option_text
from imagenet_fast.config import Config
from imagenet_fast.optimizers.muon import resets_of_norm
from imagenet_fast.training.build.schedule import build_schedule
from imagenet_fast.training.checkpoints.config_file import directory_of
from imagenet_fast.training.checkpoints.model_dir import (
    CHECKPOINTS,
    SCHEDULE_OPTIONS,
    checkpoint_steps,
)
from imagenet_fast.training.run import Run
from imagenet_fast.training.schedule_steps import total_steps


def change_of_schedule(run: Run, earlier: Config) -> str:
    """Checks that the steps of the run in ``model_dir`` would be the same with another schedule.

    The resumed run is then the run that would have started with that schedule.

    Args:
      run: as it resumes.
      earlier: its configuration so far.

    Returns:
      The change, to complete "resumes ..."; empty: its schedule is the same.

    Raises:
      UserError: if they would not, or if the schedule leaves nothing to train.
    """
    config = run.config
    names = [name for name in config.differences(earlier) if name in SCHEDULE_OPTIONS]
    if not names:
        return ""
    directory, total = config.model_dir, run.total_steps
    *_, step = checkpoint_steps(directory_of(directory) / CHECKPOINTS)
    change = ", ".join(
        f"{name}={option_text(getattr(config, name))!r} instead of "
        f"{option_text(getattr(earlier, name))!r}"
        for name in names
    )
    new_run = (
        "to train further from its weights, start a new run: another --model_dir, "
        f"--initial_weights={directory}"
    )
    if total < step:
        raise UserError(
            f"{directory} holds a run of {step} steps, more than the {total} of "
            f"duration={str(config.duration)!r}; choose another --model_dir"
        )
    rates = _learning_rates(config, run.steps_per_epoch, total)
    before = _learning_rates(earlier, run.steps_per_epoch, step)
    different = np.flatnonzero(rates[:step] != before)
    if len(different):
        first = different[0]
        raise UserError(
            f"the run in {directory} cannot resume at step {step} with {change}: the learning rate "
            f"of step {first + 1} would have been {rates[first]:.7g}, but was {before[first]:.7g}; "
            f"{new_run}"
        )
    if reason := _other_difference(run, earlier, step):
        raise UserError(f"the run in {directory} cannot resume with {change}: {reason}; {new_run}")
    left = rates[step:]
    if len(left) and not left.any():
        raise UserError(
            f"the run in {directory} cannot resume with {change}: its schedule ends with a "
            f"learning rate of 0; {new_run}"
        )
    lasting = f"; learning rate {left[0]:.4g}" if len(left) else ""
    ending = f" to {left[-1]:.4g}" if len(left) and left[-1] != left[0] else ""
    return f"from step {step} with {change}{lasting}{ending}"


def _other_difference(run: Run, earlier: Config, step: int) -> str:
    """Returns what the schedule changes in the first steps besides learning rates; empty: nothing.

    Args:
      run: has the new schedule.
      earlier: has the one so far, with the same learning rates in these steps.
      step: number of steps.
    """
    config, total = run.config, run.total_steps
    before = total_steps(earlier, run.steps_per_epoch)
    if config.lookahead_every and total != before:
        return "the steps of lookahead depend on the duration"
    for every in {1, config.proxy_every}:
        resets, resets_before = (
            resets_of_norm(config.muon_norm_every, math.ceil(steps / every))
            for steps in (total, before)
        )
        updates = math.ceil(step / every)
        if resets[:updates] != resets_before[:updates]:
            return "the steps in which muon_norm_every resets norms depend on the duration"
    if config.decoupled_weight_decay and (
        config.scaled_learning_rate != earlier.scaled_learning_rate
    ):
        return "decoupled_weight_decay depends on the scaled learning rate"
    until, until_before = (
        each.whitening_bias_until.steps(run.steps_per_epoch, each.batch_size)
        for each in (config, earlier)
    )
    if until != until_before:
        return "the learning rates of the whitening layer's bias would have been others"
    return ""


def _learning_rates(config: Config, steps_per_epoch: int, steps: int) -> np.ndarray:
    """Returns the learning rates of the first steps, float32."""
    schedule = build_schedule(config, steps_per_epoch)
    return tf.vectorized_map(schedule, tf.range(steps, dtype=tf.int64)).numpy()
