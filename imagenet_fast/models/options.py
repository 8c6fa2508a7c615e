"""The options of the network, and the names of those that there are."""

from __future__ import annotations

import dataclasses

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.option import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Beside, Check, option
from imagenet_fast.base.shared_options import SharedOptions

MODEL_NAMES: tuple[str, ...] = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet8",
    "resnet14",
    "resnet20",
    "resnet32",
    "resnet56",
    "alexnet_bn",
    "resnet9",
    "airbench94",
    "airbench95",
    "airbench96",
    "amoebanet_b",
    "amoebanet_d",
)

# Which models have an option that others lack, as `models.option_names` tells of their functions.
_IMAGENET_RESNETS = Beside("model", MODEL_NAMES[:5])
_RESNETS = Beside("model", MODEL_NAMES[:10])
_ALEXNET = Beside("model", ("alexnet_bn",))
_RESNET9 = Beside("model", ("resnet9",))
_AIRBENCH = Beside("model", ("airbench94", "airbench95", "airbench96"))
_FOR_CIFAR = Beside("model", ("resnet9", *_AIRBENCH.values))
_AMOEBANETS = Beside("model", ("amoebanet_b", "amoebanet_d"))


@dataclasses.dataclass(frozen=True)
class ModelOptions(SharedOptions):
    """The network, and the weights with which it begins."""

    model: str = option("resnet50", "network", group="model", choices=MODEL_NAMES)
    width: int = option(
        0,
        "channels of the first convolution of resnet9 and of the first group of airbench94 to "
        "airbench96, with which those of the others grow; 0: as published, 64, or 128 of "
        "airbench95 and airbench96",
        group="model",
        check=NOT_NEGATIVE,
        beside=_FOR_CIFAR,
    )
    pool_order: str = option(
        "conv_bn_relu_pool",
        "where resnet9 pools; conv_bn_relu_pool; conv_bn_pool_relu: the same function for less "
        "work; conv_pool_bn_relu: another one for less again",
        group="model",
        choices=("conv_bn_relu_pool", "conv_bn_pool_relu", "conv_pool_bn_relu"),
        beside=_RESNET9,
    )
    activation: str = option(
        "relu",
        "of resnet9: relu or celu",
        group="model",
        choices=("relu", "celu"),
        beside=_RESNET9,
    )
    celu_alpha: float = option(
        0.075,
        "limit of celu at minus infinity, without its sign",
        group="model",
        check=POSITIVE,
        beside=Beside("activation", ("celu",)),
    )
    logits_scale: float = option(
        0.0,
        "what the logits of resnet9 and airbench94 to airbench96 are multiplied by; 0: as "
        "published, 1/8 and 1/9",
        group="model",
        check=NOT_NEGATIVE,
        beside=_FOR_CIFAR,
    )
    whitening: bool = option(
        False,
        "begin resnet9 with filters of 3x3 that whiten the patches of training images, and stay "
        "as they are",
        group="model",
        beside=_RESNET9,
    )
    identity_init: bool = option(
        True,
        "start as many filters of each convolution of airbench94 to airbench96 as it has inputs "
        "at the identity",
        group="model",
        beside=_AIRBENCH,
    )
    normal_cells: int = option(
        18,
        "normal cells of amoebanet_b and amoebanet_d, L in GPipe's (L, D): a third of them before "
        "each of two reductions and after",
        group="model",
        check=Check(lambda value: value > 0 and value % 3 == 0, "be a positive multiple of 3"),
        beside=_AMOEBANETS,
    )
    cell_filters: int = option(
        208,
        "channels of each operation in the first cells of amoebanet_b and amoebanet_d, D in "
        "GPipe's (L, D); each reduction doubles them",
        group="model",
        check=Check(lambda value: value > 0 and value % 8 == 0, "be a positive multiple of 8"),
        beside=_AMOEBANETS,
    )
    whitening_images: int = option(
        10_000,
        "number of training images, the first ones, from which whitening filters are made",
        group="model",
        check=POSITIVE,
        beside=_FOR_CIFAR,
    )
    initial_weights: str = option(
        "",
        "what the weights begin as: the model_dir of a run, a SavedModel of `export`, or a file "
        "of Keras applications' weights (.h5); the classification head starts anew, unless the "
        "classes are the same as those of the run; empty: random",
        group="model",
    )
    freeze_through: str = option(
        "",
        "with initial_weights: the first layers, through this one or those whose names begin so "
        "(stem, stage3; pool2 of AlexNet), stay as they are; empty: all are trained",
        group="model",
    )
    stem: str = option(
        "imagenet",
        "first layers of resnet18 to resnet152; imagenet: a 7x7 convolution and a pool, each of "
        "stride 2; small: a 3x3 convolution, for images of about 32 pixels",
        group="model",
        choices=("imagenet", "small"),
        beside=_IMAGENET_RESNETS,
    )
    stride_on_1x1: bool = option(
        False,
        "put a bottleneck's stride in its first convolution, as ResNet v1, not in its 3x3, as v1.5",
        group="model",
        beside=_IMAGENET_RESNETS,
    )
    zero_gamma: bool = option(
        True,
        "start the last batch norm of each residual block at gamma 0",
        group="model",
        beside=_RESNETS,
    )
    batch_norm_momentum: float = option(
        0.9,
        "fraction of the old moving average that a step keeps",
        group="model",
        check=BELOW_ONE,
    )
    batch_norm_epsilon: float = option(
        1e-5,
        "added to the variance in batch norm",
        group="model",
        check=POSITIVE,
    )
    batch_norm_scale: bool = option(
        True,
        "train gamma in batch norm of resnet9; else it is 1",
        group="model",
        beside=_RESNET9,
    )
    batch_norm_batch_size: int = option(
        0,
        "images over which batch norm takes its statistics: so many neighbouring replicas work "
        "together, or each takes several for parts of its images (ghost batch norm); 0: one for "
        "each replica",
        group="model",
        check=NOT_NEGATIVE,
    )
    dropout: float = option(
        0.5,
        "fraction of AlexNet's fully connected units dropped",
        group="model",
        check=BELOW_ONE,
        beside=_ALEXNET,
    )
    batch_norm_after_pool5: bool = option(
        True,
        "AlexNet's fifth batch norm, after its last pool (Jia et al. 2018)",
        group="model",
        beside=_ALEXNET,
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self.freeze_through and not self.initial_weights:
            raise UserError(
                "freeze_through would leave layers at their random weights: give --initial_weights"
            )
