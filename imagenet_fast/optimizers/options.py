"""Options of the optimizer and the learning-rate schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

from imagenet_fast.base.durations import UNITS, Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import warn_once
from imagenet_fast.base.option import (
    BELOW_ONE,
    FRACTION,
    IN_ORDER,
    LASTS,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    OnlyIf,
    option,
)
from imagenet_fast.base.shared_options import SharedOptions

_option = functools.partial(option, group="optimization")
_rate_option = functools.partial(option, group="learning rate")
_LARS = OnlyIf("optimizer", ("lars",))
_MUON = OnlyIf("optimizer", ("muon",))
_AIRBENCH = OnlyIf("model", ("airbench94", "airbench95", "airbench96"))
_PACKAGE_OPTIMIZERS = OnlyIf("optimizer", ("sgd", "lars", "muon"))
_STEPS = OnlyIf("schedule", ("steps",))
_KNOTS = OnlyIf("schedule", ("piecewise_linear",))
_WARMUP = OnlyIf("schedule", ("constant", "steps", "polynomial", "cosine"))
_SOME_WARMUP = OnlyIf("warmup", tuple(Duration(0, unit) for unit in UNITS), unless=True)

# Why one loss cannot be used.
ONE_LABEL = (
    "loss=cross_entropy learns one class an image, but images have several labels: give "
    "--loss=binary_cross_entropy, focal or asymmetric"
)


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(SharedOptions):
    """The optimizer, gradient clipping, the loss, its scale and weight averages."""

    optimizer: str = _option(
        "sgd",
        "sgd; lars, for batches above 2000; muon, for the filters of convolutions, with sgd for "
        "all other weights; the name of a Keras optimizer, such as adam; or, with TensorFlow "
        "Addons, tfa:NAME, such as tfa:LAMB or tfa:Lookahead(adam)",
    )
    optimizer_arguments: tuple[str, ...] = _option(
        (),
        "arguments of a Keras optimizer, as beta_1=0.9,beta_2=0.98; what has an option of its own, "
        "such as learning_rate and weight_decay, is given by that",
        check=Check(
            lambda value: (
                all(own.partition("=")[0].isidentifier() for own in value)
                and all("=" in own for own in value)
            ),
            "be NAME=VALUE, each",
        ),
        only_if=OnlyIf("optimizer", ("sgd", "lars", "muon"), unless=True),
    )
    momentum: float = _option(
        0.9,
        "decay factor of the momentum buffer, in optimizers that have one",
        check=BELOW_ONE,
    )
    nesterov: bool = _option(
        True,
        "use Nesterov momentum in sgd, lars and muon",
        only_if=_PACKAGE_OPTIMIZERS,
    )
    weight_decay: float = _option(
        1e-4,
        "L2 coefficient in sgd, lars and, except for filters, muon; for other optimizers, their "
        "weight_decay, such as adamw's",
        check=NOT_NEGATIVE,
    )
    decoupled_weight_decay: bool = _option(
        False,
        "decouple the weight decay of sgd, and of muon except for filters, from the gradient and "
        "the learning rate (SGDW, Loshchilov and Hutter 2019): each step first multiplies weights "
        "by 1 - weight_decay * learning rate / the scaled one after the warmup",
        only_if=(OnlyIf("optimizer", ("sgd", "muon")), OnlyIf("weight_decay", (0.0,), unless=True)),
    )
    weight_decay_on: str = _option(
        "auto",
        "variables to decay; weights: no biases, no gamma and beta of batch norm; "
        "weights_and_biases; all; auto: weights in lars, else weights_and_biases",
        choices=("auto", "weights", "weights_and_biases", "all"),
        only_if=OnlyIf("weight_decay", (0.0,), unless=True),
    )
    lars_eeta: float = _option(
        0.001,
        "trust coefficient of lars",
        check=POSITIVE,
        only_if=_LARS,
    )
    optimizer_epsilon: float = _option(
        0.0,
        "added to the norm of the gradient in lars, and to the denominators of optimizers of Keras "
        "and Addons, such as rmsprop; 0: the optimizer's default, which is 0 in lars",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("optimizer", ("sgd", "muon"), unless=True),
    )
    rate_in_momentum: str = _option(
        "auto",
        "where sgd, lars and muon apply the learning rate; yes: inside the momentum buffer "
        "(MLPerf's scaled momentum); no: outside; auto: inside in lars, outside in the others",
        choices=("auto", "yes", "no"),
        only_if=_PACKAGE_OPTIMIZERS,
    )
    bias_rate_factor: float = _option(
        1.0,
        "learning rate of biases, including beta of batch norm, in sgd, lars and muon, as a "
        "multiple of learning_rate; their weight_decay is divided by it",
        check=POSITIVE,
        only_if=_PACKAGE_OPTIMIZERS,
    )
    bias_rate_factor_on: str = _option(
        "all",
        "biases whose learning rate bias_rate_factor changes: all, or batch_norm, beta of batch "
        "norm only",
        choices=("all", "batch_norm"),
        only_if=(_PACKAGE_OPTIMIZERS, OnlyIf("bias_rate_factor", (1.0,), unless=True)),
    )
    layer_decay: float = _option(
        1.0,
        "factor of the learning rate from each block of the network to the one before it; the "
        "classification head's is 1 (layer-wise decay, Clark et al. 2020, Bao et al. 2022); 1: the "
        "same for all",
        check=FRACTION,
    )
    muon_momentum: float = _option(
        0.6,
        "momentum of filters in muon; momentum applies to all other weights",
        check=BELOW_ONE,
        only_if=_MUON,
    )
    muon_steps: int = _option(
        3,
        "Newton-Schulz iterations that orthogonalize the updates of filters in muon",
        check=POSITIVE,
        only_if=_MUON,
    )
    muon_coefficients: tuple[float, ...] = _option(
        (3.4445, -4.775, 2.0315),
        "coefficients of x, x^3 and x^5 in the polynomial that each of muon_steps applies to the "
        "singular values; default: Jordan's",
        check=Check(lambda value: len(value) == 3, "have three values"),
        only_if=_MUON,
    )
    muon_norm_every: tuple[int, ...] = _option(
        (1,),
        "steps between resets of the norm of filters in muon to the root of their number; two "
        "values, as 2,17: growing linearly from the first to the second over the run",
        check=Check(
            lambda value: len(value) in (1, 2) and min(value) > 0, "have one or two positive values"
        ),
        only_if=_MUON,
    )
    muon_head_rate_factor: float = _option(
        1.0,
        "learning rate of the last layer's weights in muon, as a multiple of learning_rate; their "
        "weight_decay is divided by it",
        check=POSITIVE,
        only_if=_MUON,
    )
    clip_norm: float = _option(
        0.0,
        "maximum global norm of the gradients, after the all-reduce; 0: no clipping",
        check=NOT_NEGATIVE,
    )
    ema_decay: float = _option(
        0.0,
        "decay factor per step of the weights' exponential moving average (EMA), which evaluation "
        "and export use; 0: no average",
        check=BELOW_ONE,
        in_evaluation=True,
    )
    ema_every: int = _option(
        1,
        "steps between updates of the EMA, each with ema_decay ** ema_every; the first update is "
        "after the first step of each epoch",
        check=POSITIVE,
        only_if=OnlyIf("ema_decay"),
    )
    lookahead_every: int = _option(
        0,
        "steps between resets of the weights to lookahead's slow weights (Zhang et al. 2019); the "
        "last steps of a run are discarded if it does not divide their number; 0: no lookahead",
        check=NOT_NEGATIVE,
    )
    lookahead_decay: float = _option(
        0.95,
        "decay factor per step of lookahead's slow weights at the end of the run; it grows with "
        "the cube of the progress",
        check=BELOW_ONE,
        only_if=OnlyIf("lookahead_every"),
    )
    loss: str = _option(
        "cross_entropy",
        "loss of an image; cross_entropy: of the softmax; binary_cross_entropy: of each class's "
        "sigmoid, summed over the classes, with a last layer whose bias starts at -log(classes); "
        "predicted probabilities are then sigmoids, whose sum need not be 1; focal, asymmetric: "
        "likewise, with less weight for classes that are predicted well. Images with several "
        "labels need one of the last three",
        choices=("cross_entropy", "binary_cross_entropy", "focal", "asymmetric"),
        in_evaluation=True,
    )
    focal_gamma: float = _option(
        2.0,
        "power of a class's error in the focal loss, by which its cross-entropy is multiplied",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("loss", ("focal",)),
    )
    focal_alpha: float = _option(
        0.25,
        "weight of the classes that an image has in the focal loss; others have 1 - focal_alpha",
        check=FRACTION,
        only_if=OnlyIf("loss", ("focal",)),
    )
    positive_gamma: float = _option(
        0.0,
        "as focal_gamma, in the asymmetric loss, of the classes that an image has",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("loss", ("asymmetric",)),
    )
    negative_gamma: float = _option(
        4.0,
        "as positive_gamma, of the classes that an image does not have",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("loss", ("asymmetric",)),
    )
    probability_margin: float = _option(
        0.05,
        "probability of a class that an image does not have below which the asymmetric loss is 0",
        check=BELOW_ONE,
        only_if=OnlyIf("loss", ("asymmetric",)),
    )
    class_weights: str = _option(
        "",
        "weight of each class in the training loss; balanced: inversely to its number of images, "
        'on average 1; or a JSON file of weights by class, {"cat": 2, "dog": 0.5}, 1 for others; '
        "empty: 1",
        only_if=(OnlyIf("proxy_model", unless=True), OnlyIf("teacher", unless=True)),
    )
    label_smoothing: float = _option(
        0.0,
        "probability distributed evenly over all classes, or over a class and its absence if "
        "images have several labels, in the loss of training and validation",
        check=BELOW_ONE,
        only_if=OnlyIf("teacher", unless=True),
    )
    teacher: str = _option(
        "",
        "model_dir of a trained run with the same classes, from whose predictions for the same "
        "augmented images the network learns, instead of from labels (Beyer et al. 2022); empty: "
        "from labels",
        only_if=OnlyIf("loss", ("cross_entropy",)),
        may_change_on_resume=True,  # its folder; restore() checks its weights
    )
    distillation_temperature: float = _option(
        1.0,
        "by which the logits of network and teacher are divided in the training loss",
        check=POSITIVE,
        only_if=OnlyIf("teacher"),
    )
    select_by_loss: float = _option(
        1.0,
        "fraction of each replica's part of a batch to train on: the images with the highest loss, "
        "found by a forward pass of the network or of proxy_model; 1: all",
        check=FRACTION,
    )
    proxy_every: int = _option(
        1,
        "steps between updates of proxy_model, whose learning-rate schedule is the network's",
        check=POSITIVE,
        only_if=OnlyIf("proxy_model"),
    )
    loss_scale: float = option(
        0.0,
        "fixed loss scale under mixed_float16; 0: dynamic",
        group="hardware",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("precision", ("mixed_float16",)),
    )


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(SharedOptions):
    """The length of a run, and its learning-rate schedule."""

    duration: Duration = _option(
        Duration(90, "epochs"),
        "length of the run in epochs, steps or examples, as '90 epochs'; a recipe's warmup, "
        "decays, knots, train_until and size_ramp_at scale with it",
        check=LASTS,
    )
    learning_rate: float = _rate_option(
        0.1,
        "learning rate for a batch of learning_rate_batch images",
        check=NOT_NEGATIVE,
    )
    learning_rate_batch: int = _rate_option(
        256,
        "batch size that learning_rate is for; see rate_scaling",
        check=POSITIVE,
        only_if=OnlyIf("rate_scaling", ("none",), unless=True),
    )
    rate_scaling: str = _rate_option(
        "linear",
        "scaling of the learning rate with batch_size / learning_rate_batch: linear (the linear "
        "scaling rule), sqrt or none",
        choices=("linear", "sqrt", "none"),
    )
    warmup: Duration = _rate_option(
        Duration(5, "epochs"),
        "initial period in which the learning rate grows from warmup_start to the scaled one",
        only_if=_WARMUP,
    )
    warmup_start: float = _rate_option(
        -1.0,
        "initial learning rate of the warmup; -1: learning_rate, and no warmup unless the scaled "
        "one is higher",
        check=Check(lambda value: value >= 0 or value == -1, "not be negative, or be -1"),
        only_if=(_WARMUP, _SOME_WARMUP),
    )
    whitening_bias_until: Duration = _rate_option(
        Duration(0, "epochs"),
        "time at which the learning rate of the bias of airbench's whitening layer has fallen "
        "linearly to 0, from the run's first one (3 epochs in airbench94_muon); 0 epochs: it "
        "follows the schedule",
        only_if=(_PACKAGE_OPTIMIZERS, _AIRBENCH),
    )
    schedule: str = _rate_option(
        "steps",
        "learning-rate schedule after the warmup: constant; steps, at decay_at; polynomial or "
        "cosine, to end_learning_rate at the end of the run; piecewise_linear, through knots",
        choices=("constant", "steps", "polynomial", "cosine", "piecewise_linear"),
    )
    decay_at: tuple[Duration, ...] = _rate_option(
        (Duration(30, "epochs"), Duration(60, "epochs"), Duration(80, "epochs")),
        "schedule=steps: times at which the learning rate is multiplied by decay_factor",
        check=IN_ORDER,
        only_if=(_STEPS, OnlyIf("decay_every", unless=True)),
    )
    decay_factor: float = _rate_option(
        0.1,
        "schedule=steps: factor of the learning rate at each of decay_at, or every decay_every",
        check=FRACTION,
        only_if=(_STEPS, OnlyIf("decay_at", ((),), unless=True)),
    )
    decay_every: Duration = _rate_option(
        Duration(0, "steps"),
        "schedule=steps: period after which the learning rate is multiplied by decay_factor; "
        "0 steps: at decay_at instead",
        only_if=_STEPS,
    )
    decay_power: float = _rate_option(
        2.0,
        "schedule=polynomial: power of the remaining fraction of the run",
        check=POSITIVE,
        only_if=OnlyIf("schedule", ("polynomial",)),
    )
    end_learning_rate: float = _rate_option(
        0.0,
        "schedule=polynomial and cosine: learning rate at the end of the run",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("schedule", ("polynomial", "cosine")),
    )
    knots_at: tuple[Duration, ...] = _rate_option(
        (),
        "schedule=piecewise_linear: times, counted from step 1, between which the learning rate "
        "changes linearly; they include any warmup",
        check=IN_ORDER,
        only_if=_KNOTS,
    )
    knots: tuple[float, ...] = _rate_option(
        (),
        "schedule=piecewise_linear: learning rate at each of knots_at, as a fraction of the "
        "scaled one",
        check=Check(lambda value: not value or min(value) >= 0, "not be negative"),
        only_if=_KNOTS,
    )

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate of this batch size, after the warmup.

        Linear scaling is the rule of Goyal et al. 2017. Square-root scaling, in their Table 2a,
        keeps the variance of a step constant.
        """
        ratio = self.batch_size / self.learning_rate_batch
        factor = {"linear": ratio, "sqrt": ratio**0.5, "none": 1.0}[self.rate_scaling]
        return self.learning_rate * factor

    @property
    def warmup_first_rate(self) -> float | None:
        """The initial learning rate of the warmup, or None without a warmup."""
        if self.warmup_start >= 0:
            return self.warmup_start
        return self.learning_rate if self.scaled_learning_rate > self.learning_rate else None

    def warn_of_unused_warmup(self, given: Collection[str]) -> None:
        """Warns if there is no warmup although its length is given.

        Recipes have a warmup for larger batches, which smaller ones do not need.

        ``given`` are the options that the user has given beside a recipe.
        """
        has_warmup = self.warmup_first_rate is not None or not self.warmup.amount
        if "warmup" not in given or has_warmup or self.schedule == "piecewise_linear":
            return
        warn_once(
            "warmup without effect: there is no warmup, because the scaled "
            f"learning rate, {self.scaled_learning_rate:g}, is not above learning_rate; for a "
            "warmup from 0 give warmup_start=0"
        )

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
    """Weight updates: the optimizer and the learning-rate schedule."""

    def _check_together(self) -> None:
        super()._check_together()
        if self.decoupled_weight_decay and not self.learning_rate:
            raise UserError(
                "decoupled_weight_decay divides by the learning rate after the warmup, but "
                "learning_rate is 0: give a positive learning_rate, or leave out "
                "decoupled_weight_decay"
            )
