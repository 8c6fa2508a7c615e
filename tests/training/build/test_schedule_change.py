"""Runs that resume with another schedule, such as a longer duration."""

import pathlib
import types

import pytest

from imagenet_fast import Config, UserError
from imagenet_fast.training.build.schedule_change import change_of_schedule
from imagenet_fast.training.checkpoints.model_dir import check_model_dir, claim_model_dir
from imagenet_fast.training.run import Run

STEPS = 44  # of an epoch
DIGITS = {"warmup": "0 epochs", "batch_size": 32, "learning_rate_batch": 32}
DECAYS = {**DIGITS, "duration": "12 epochs", "decay_at": "8 epochs,11 epochs"}
COSINE = {**DIGITS, "duration": "12 epochs", "schedule": "cosine"}
CONSTANT = {**DIGITS, "duration": "12 epochs", "schedule": "constant"}
KNOTS = {
    "duration": "12 epochs",
    "batch_size": 32,
    "schedule": "piecewise_linear",
    "knots_at": "0 epochs,3 epochs,12 epochs",
    "knots": (0.1, 1.0, 0.0),
}


def run_of(config):
    """A run of STEPS an epoch."""
    split = types.SimpleNamespace(examples=STEPS * config.batch_size)
    return Run(config, types.SimpleNamespace(splits={"train": split}), None)


@pytest.fixture
def change(tmp_path):
    """Returns the change of a run that resumes at a step with other options."""

    def change(options, step, **changes):
        config = Config(model_dir=str(tmp_path), **options)
        claim_model_dir(config, ("cat", "dog"))
        if step:
            (tmp_path / "checkpoints" / f"ckpt-{step}.index").touch()
            (tmp_path / "checkpoints" / f"ckpt-{step}.data-00000-of-00001").touch()
        changed = config.replace(**changes)
        earlier = check_model_dir(changed, ("cat", "dog"))
        assert earlier == config
        return change_of_schedule(run_of(changed), earlier)

    return change


@pytest.mark.parametrize(
    ("options", "step", "changes", "expected"),
    [
        (DECAYS, 528, {}, ""),
        (
            DECAYS,
            528,
            {"duration": "20 epochs"},
            "from step 528 with duration='20 epochs' instead of '12 epochs'; learning rate 0.001",
        ),
        (
            DECAYS,
            352,
            {"decay_at": "9 epochs,15 epochs", "duration": "20 epochs"},
            "from step 352 with duration='20 epochs' instead of '12 epochs', "
            "decay_at='9 epochs,15 epochs' instead of '8 epochs,11 epochs'; "
            "learning rate 0.1 to 0.001",
        ),
        (
            DECAYS,
            528,
            {"decay_at": "8 epochs,11 epochs,13 epochs", "duration": "14 epochs"},
            "; learning rate 0.001 to 0.0001",
        ),
        # Norms are reset in every fourth step, whatever the duration.
        (
            {**CONSTANT, "optimizer": "muon", "muon_norm_every": (4,)},
            528,
            {"duration": "20 epochs"},
            "learning rate 0.1",
        ),
        # Shortened to what is done.
        (DECAYS, 352, {"duration": "8 epochs"}, "duration='8 epochs' instead of '12 epochs'"),
    ],
)
def test_changes_from_a_step_on(change, options, step, changes, expected):
    text = change(options, step, **changes)
    assert text.endswith(expected) and bool(text) == bool(expected)


@pytest.mark.parametrize(
    ("options", "step", "changes", "message"),
    [
        (
            DECAYS,
            353,
            {"decay_at": "9 epochs,11 epochs"},
            r"at step 353 with decay_at=.*: the learning rate of step 353 would have been 0.1, but "
            r"was 0.01; to train "
            "further .* --initial_weights=",
        ),
        (
            DECAYS,
            528,
            {"duration": "24 epochs", "decay_at": "16 epochs,22 epochs"},
            r"but was 0\.01; to train further",
        ),
        (
            COSINE,
            528,
            {"duration": "20 epochs"},
            "the learning rate of step 2 would have been 0.09999",
        ),
        (KNOTS, 528, {"duration": "20 epochs"}, "its schedule ends with a learning rate of 0"),
        (DECAYS, 400, {"duration": "8 epochs"}, "a run of 400 steps, more than the 352 of "),
        (
            {**DECAYS, "lookahead_every": 5},
            528,
            {"duration": "20 epochs"},
            "the steps of lookahead depend on the duration",
        ),
        (
            {**CONSTANT, "optimizer": "muon", "muon_norm_every": (2, 17)},
            528,
            {"duration": "20 epochs"},
            "the steps in which muon_norm_every resets norms depend on the duration",
        ),
        (
            {**KNOTS, "decoupled_weight_decay": True},
            100,
            {"learning_rate": 0.2, "knots": (0.05, 0.5, 0.0)},
            "decoupled_weight_decay depends on the scaled learning rate",
        ),
        (
            {**CONSTANT, "model": "airbench94", "whitening_bias_until": "3 epochs"},
            528,
            {"whitening_bias_until": "5 epochs"},
            "the learning rates of the whitening layer's bias would have been others",
        ),
        (DECAYS, 528, {"duration": "20 epochs", "seed": 3}, r"other options \(seed is 0 there, 3"),
        # Nothing says at which step it is.
        (DECAYS, 0, {"duration": "20 epochs"}, r"other options \(duration is 12 epochs there"),
    ],
)
def test_changes_of_steps_that_are_done(change, options, step, changes, message):
    with pytest.raises(UserError, match=message):
        change(options, step, **changes)


def test_no_run(tmp_path):
    assert check_model_dir(Config(model_dir=str(tmp_path / "new")), ("cat", "dog")) is None
    assert not pathlib.Path(tmp_path / "new").exists()
