"""The options of optimizers and of the learning rate."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import (
    BELOW_ONE,
    FRACTION,
    IN_ORDER,
    LASTS,
    NOT_NEGATIVE,
    POSITIVE,
    Beside,
    Check,
    option,
)
from imagenet_fast.base.shared_options import SharedOptions
from imagenet_fast.optimizers.batch_tables import BATCH_TABLES

_LARS = Beside("optimizer", ("lars",))
_MUON = Beside("optimizer", ("muon",))
_OWN_OPTIMIZERS = Beside("optimizer", ("sgd", "lars", "muon"))
_OTHER_OPTIMIZERS = Beside("optimizer", ("sgd", "lars", "muon"), unless=True)
# A table sets the option itself.
_NO_BATCH_TABLE = Beside("batch_table", unless=True)
_STEPS = Beside("schedule", ("steps",))
_KNOTS = Beside("schedule", ("piecewise_linear",))
_WARMUP = Beside("schedule", ("constant", "steps", "polynomial", "cosine"))


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(SharedOptions):
    """The optimizer, and what is done to gradients, labels and weights beside it."""

    optimizer: str = option(
        "sgd",
        "sgd; lars, for batches above 2000; muon, for the filters of convolutions, with sgd for "
        "the rest; a Keras optimizer by its name, as adam; or, with TensorFlow Addons, tfa:NAME, "
        "as tfa:LAMB or tfa:Lookahead(adam)",
        group="optimization",
    )
    momentum: float = option(
        0.9,
        "fraction of the momentum that a step keeps, in optimizers that have one",
        group="optimization",
        check=BELOW_ONE,
        beside=_NO_BATCH_TABLE,
    )
    nesterov: bool = option(
        True,
        "Nesterov's momentum, of sgd, lars and muon",
        group="optimization",
        beside=_OWN_OPTIMIZERS,
    )
    weight_decay: float = option(
        1e-4,
        "fraction of the weights that is added to their gradients (L2) in sgd, lars and, but for "
        "filters, muon; else the optimizer's own weight_decay, as adamw's",
        group="optimization",
        check=NOT_NEGATIVE,
        beside=_NO_BATCH_TABLE,
    )
    weight_decay_on: str = option(
        "auto",
        "what weight_decay is for; weights: not biases, nor gamma and beta of batch norm; "
        "weights_and_biases; all; auto: weights in lars, else weights_and_biases",
        group="optimization",
        choices=("auto", "weights", "weights_and_biases", "all"),
        beside=Beside("weight_decay", (0.0,), unless=True),
    )
    lars_eeta: float = option(
        0.001,
        "trust coefficient of lars",
        group="optimization",
        check=POSITIVE,
        beside=_LARS,
    )
    lars_epsilon: float = option(
        0.0,
        "added to the norm of the gradient in lars",
        group="optimization",
        check=NOT_NEGATIVE,
        beside=_LARS,
    )
    optimizer_epsilon: float = option(
        0.0,
        "added to the denominators of Keras' and Addons' optimizers, as of rmsprop; 0: what the "
        "optimizer has by itself",
        group="optimization",
        check=NOT_NEGATIVE,
        beside=_OTHER_OPTIMIZERS,
    )
    rate_in_momentum: str = option(
        "auto",
        "where sgd, lars and muon multiply by the learning rate; yes: before the momentum "
        "(MLPerf's scaled momentum); no: after it; auto: lars before, the others after",
        group="optimization",
        choices=("auto", "yes", "no"),
        beside=_OWN_OPTIMIZERS,
    )
    bias_rate_factor: float = option(
        1.0,
        "learning rate of biases, and of beta of batch norm, in sgd, lars and muon, as a multiple"
        " of learning_rate; their weight_decay is divided by it",
        group="optimization",
        check=POSITIVE,
        beside=_OWN_OPTIMIZERS,
    )
    muon_momentum: float = option(
        0.6,
        "momentum of filters in muon; that of the rest is momentum",
        group="optimization",
        check=BELOW_ONE,
        beside=_MUON,
    )
    muon_head_rate_factor: float = option(
        1.0,
        "learning rate of the last layer's weights in muon, as a multiple of learning_rate; their "
        "weight_decay is divided by it",
        group="optimization",
        check=POSITIVE,
        beside=_MUON,
    )
    clip_norm: float = option(
        0.0,
        "largest norm of all gradients together, after the all-reduce; 0: no clipping",
        group="optimization",
        check=NOT_NEGATIVE,
    )
    ema_decay: float = option(
        0.0,
        "fraction that a step keeps of the weights' moving average (EMA), with which evaluation "
        "and export work; 0: no average",
        group="optimization",
        check=BELOW_ONE,
    )
    ema_every: int = option(
        1,
        "steps, counted anew in each epoch, after which that average takes in the weights, with "
        "as much of it kept as all of them would have",
        group="optimization",
        check=POSITIVE,
        beside=Beside("ema_decay"),
    )
    lookahead_every: int = option(
        0,
        "steps after which the weights go back to lookahead's slow weights (Zhang et al. 2019); "
        "0: none",
        group="optimization",
        check=NOT_NEGATIVE,
    )
    lookahead_decay: float = option(
        0.95,
        "fraction that a step keeps of lookahead's slow weights at the end of the run, to which it "
        "grows with the cube of the time",
        group="optimization",
        check=BELOW_ONE,
        beside=Beside("lookahead_every"),
    )
    label_smoothing: float = option(
        0.0,
        "probability spread evenly over all classes",
        group="optimization",
        check=BELOW_ONE,
    )
    loss_scale: float = option(
        0.0,
        "fixed scale of the loss under mixed_float16; 0: adapted as training goes",
        group="hardware",
        check=NOT_NEGATIVE,
        beside=Beside("precision", ("mixed_float16",)),
    )


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(SharedOptions):
    """The length of a run, and the learning rate during it."""

    duration: Duration = option(
        Duration(90, "epochs"),
        "length of the run, as '90 epochs' or '5000 steps'; also examples",
        group="optimization",
        check=LASTS,
    )
    learning_rate: float = option(
        0.1,
        "reference learning rate, for a batch of learning_rate_batch images",
        group="learning rate",
        check=NOT_NEGATIVE,
        beside=_NO_BATCH_TABLE,
    )
    learning_rate_batch: int = option(
        256,
        "batch size for which learning_rate is meant; see rate_scaling",
        group="learning rate",
        check=POSITIVE,
    )
    rate_scaling: str = option(
        "linear",
        "how the learning rate grows with batch_size / learning_rate_batch: linear (the linear "
        "scaling rule), sqrt or none",
        group="learning rate",
        choices=("linear", "sqrt", "none"),
        beside=_NO_BATCH_TABLE,
    )
    batch_table: str = option(
        "",
        "take learning_rate, warmup, momentum and weight_decay for batch_size from a family of "
        f"recipes for lars, interpolated between theirs: {' or '.join(BATCH_TABLES)}; "
        "empty: do not",
        group="learning rate",
        choices=("", *BATCH_TABLES),
        beside=_WARMUP,
    )
    warmup: Duration = option(
        Duration(5, "epochs"),
        "time at the start in which the learning rate grows from warmup_start to that of this "
        "batch",
        group="learning rate",
        beside=(_WARMUP, _NO_BATCH_TABLE),
    )
    warmup_kind: str = option(
        "gradual",
        "gradual: by the same amount each step; constant: warmup_start, until the warmup ends",
        group="learning rate",
        choices=("gradual", "constant"),
        beside=_WARMUP,
    )
    warmup_start: float = option(
        -1.0,
        "first learning rate of the warmup; -1: learning_rate, and no warmup unless the scaled "
        "one is higher",
        group="learning rate",
        check=Check(lambda value: value >= 0 or value == -1, "not be negative, or be -1"),
        beside=(_WARMUP, _NO_BATCH_TABLE),
    )
    schedule: str = option(
        "steps",
        "learning-rate schedule after the warmup: constant; steps, at decay_at; polynomial or "
        "cosine, to end_learning_rate at the end of the run; piecewise_linear, through knots",
        group="learning rate",
        choices=("constant", "steps", "polynomial", "cosine", "piecewise_linear"),
    )
    decay_at: tuple[Duration, ...] = option(
        (Duration(30, "epochs"), Duration(60, "epochs"), Duration(80, "epochs")),
        "schedule=steps: when to multiply the learning rate by decay_factor",
        group="learning rate",
        check=IN_ORDER,
        beside=(_STEPS, Beside("decay_every", unless=True)),
    )
    decay_factor: float = option(
        0.1,
        "schedule=steps: by which the learning rate is multiplied at each of decay_at, or "
        "decay_every",
        group="learning rate",
        check=FRACTION,
        beside=_STEPS,
    )
    decay_every: Duration = option(
        Duration(0, "steps"),
        "schedule=steps: how often to multiply the learning rate; 0 steps: not so, but at decay_at",
        group="learning rate",
        beside=_STEPS,
    )
    decay_power: float = option(
        2.0,
        "schedule=polynomial: power to which the fraction of the run that is left is raised",
        group="learning rate",
        check=POSITIVE,
        beside=Beside("schedule", ("polynomial",)),
    )
    end_learning_rate: float = option(
        0.0,
        "schedule=polynomial and cosine: learning rate at the end of the run",
        group="learning rate",
        check=NOT_NEGATIVE,
        beside=Beside("schedule", ("polynomial", "cosine")),
    )
    knots_at: tuple[Duration, ...] = option(
        (),
        "schedule=piecewise_linear: times, counted from step 1, between which the learning rate "
        "changes linearly; a warmup is in them, too",
        group="learning rate",
        check=IN_ORDER,
        beside=_KNOTS,
    )
    knots: tuple[float, ...] = option(
        (),
        "schedule=piecewise_linear: the learning rate at each of knots_at, as a fraction of that "
        "of this batch",
        group="learning rate",
        check=Check(lambda value: not value or min(value) >= 0, "not be negative"),
        beside=_KNOTS,
    )

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate of this batch, after the warmup.

        Linear scaling is the rule of Goyal et al. 2017; by the square root, which their Table 2a
        tries too, the variance of a step stays the same.
        """
        ratio = self.batch_size / self.learning_rate_batch
        factor = {"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[self.rate_scaling]
        return self.learning_rate * factor

    @property
    def warmup_first_rate(self) -> float | None:
        """The learning rate with which the warmup begins; None where there is none."""
        if self.warmup_start >= 0:
            return self.warmup_start
        return self.learning_rate if self.scaled_learning_rate > self.learning_rate else None

    def _check_together(self) -> None:
        super()._check_together()
        if self.schedule == "piecewise_linear" and not self.knots:
            raise UserError("schedule=piecewise_linear needs knots_at and knots")
        if len(self.knots) != len(self.knots_at):
            raise UserError(
                f"there are {len(self.knots)} knots, but {len(self.knots_at)} times in knots_at"
            )


@dataclasses.dataclass(frozen=True)
class UpdateOptions(OptimizerOptions, ScheduleOptions):
    """How weights are updated: the optimizer, and its learning rate."""
