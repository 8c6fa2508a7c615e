"""Options of the network, and the names of all networks."""

from __future__ import annotations

import dataclasses
import functools
import re

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.base.option import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Check, OnlyIf, option
from imagenet_fast.base.shared_options import SharedOptions

_IMAGENET_RESNET_NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_CIFAR_RESNET_NAMES = ("resnet8", "resnet14", "resnet20", "resnet32", "resnet56")
MODEL_NAMES: tuple[str, ...] = (
    *_IMAGENET_RESNET_NAMES,
    *_CIFAR_RESNET_NAMES,
    "alexnet_bn",
    "resnet9",
    "airbench94",
    "airbench95",
    "airbench96",
    "airbench96_proxy",
    "amoebanet_b",
    "amoebanet_d",
)

# The value of ``model`` for a network given in Python that no name can find.
CUSTOM = "custom"
_BY_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OF_LIBRARY = re.compile(r"(keras|keras_hub):(.+)")


def is_custom(model: str) -> bool:
    """Whether ``model`` is the user's own network: ``custom``, or ``module:function``."""
    by_name = _BY_NAME.fullmatch(model) is not None and not library_of(model)
    return model == CUSTOM or by_name


def library_of(model: str) -> tuple[str, str] | None:
    """Returns the library and the name of ``keras:NAME`` or ``keras_hub:PRESET``; None: neither."""
    match = _OF_LIBRARY.fullmatch(model)
    return (match[1], match[2]) if match else None


# Of Keras Applications' networks, the size of the images on which they were trained, if not 224.
_SIZES = {
    **dict.fromkeys(("InceptionResNetV2", "InceptionV3", "Xception"), 299),
    "NASNetLarge": 331,
    **{f"EfficientNetB{i + 1}": size for i, size in enumerate((240, 260, 300, 380, 456, 528, 600))},
    **{f"EfficientNetV2{name}": size for name, size in (("B1", 240), ("B2", 260), ("B3", 300))},
    **dict.fromkeys(("EfficientNetV2S",), 384),
    **dict.fromkeys(("EfficientNetV2M", "EfficientNetV2L"), 480),
}


def own_image_size(model: str) -> int | None:
    """Returns the size of the images on which a network of Keras Applications was trained.

    None: it is none of theirs.
    """
    library, name = library_of(model) or ("", "")
    return _SIZES.get(name, 224) if library == "keras" else None


class _LibraryNames(tuple):
    """Stands for all networks of other libraries."""

    def __contains__(self, model: object) -> bool:
        return library_of(str(model)) is not None


_option = functools.partial(option, group="model")
_OF_LIBRARIES = OnlyIf("model", _LibraryNames(("keras:NAME", "keras_hub:PRESET")))
# Users' functions make their own weights.
_NAMED = OnlyIf("model", MODEL_NAMES, alternative=_OF_LIBRARIES)
# Models with options that others lack; a test compares with `models.option_names`.
_IMAGENET_RESNETS = OnlyIf("model", _IMAGENET_RESNET_NAMES)
_RESNETS = OnlyIf("model", _IMAGENET_RESNET_NAMES + _CIFAR_RESNET_NAMES)
_ALEXNET = OnlyIf("model", ("alexnet_bn",))
_RESNET9 = OnlyIf("model", ("resnet9",))
_AIRBENCH = OnlyIf("model", ("airbench94", "airbench95", "airbench96", "airbench96_proxy"))
_FOR_CIFAR = OnlyIf("model", ("resnet9", *_AIRBENCH.values))
_WITH_WIDTH = OnlyIf("model", (*_IMAGENET_RESNET_NAMES, *_FOR_CIFAR.values))
_AMOEBANETS = OnlyIf("model", ("amoebanet_b", "amoebanet_d"))
# Of the networks that have several, the published one first.
ACTIVATIONS = {
    **dict.fromkeys(_RESNET9.values, ("relu", "celu")),
    **dict.fromkeys(_AIRBENCH.values, ("gelu", "silu")),
}


def check_activation(model: str, activation: str) -> None:
    """Checks that a network has an activation, or that it is ``auto``, the published one.

    Raises:
      UserError: if it has others.
    """
    if activation != "auto":
        _check_choice(model, "activation", activation, ACTIVATIONS.get(model, ()))


def check_choices(model: str, **values: str) -> None:
    """Checks that arguments of a network are among the choices of the options of their names.

    Raises:
      UserError: if one is not.
    """
    for name, value in values.items():
        _check_choice(model, name, value, CHOICES[name])


def _check_choice(model: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(
            f"{model}: there is no {name} {value!r}{nearest(value, choices)}; use one of "
            f"{', '.join(choices)}"
        )


@dataclasses.dataclass(frozen=True)
class ModelOptions(SharedOptions):
    """The network and its initial weights."""

    model: str = _option(
        "resnet50",
        "network; keras:NAME, one of Keras Applications, such as keras:ConvNeXtTiny; "
        "keras_hub:PRESET, one of KerasHub by preset or its folder; or module:function, a Python "
        "function that makes your own",
        choices=MODEL_NAMES,
        check=Check(
            lambda value: is_custom(value) or library_of(value) is not None,
            "be module:function, keras:NAME or keras_hub:PRESET",
        ),
        in_evaluation=True,
    )
    width: int = _option(
        0,
        "channels of the first convolution of resnet9 and resnet18 to resnet152, and of the first "
        "group of airbench94 to airbench96, to which all others are in proportion; 0: as "
        "published, 64, 32 for airbench96_proxy, or 128 for airbench95 and airbench96",
        check=NOT_NEGATIVE,
        only_if=_WITH_WIDTH,
        in_evaluation=True,
    )
    pool_order: str = _option(
        "conv_bn_relu_pool",
        "position of resnet9's pools; conv_bn_relu_pool; conv_bn_pool_relu: the same function at "
        "lower cost; conv_pool_bn_relu: another function, cheaper still",
        choices=("conv_bn_relu_pool", "conv_bn_pool_relu", "conv_pool_bn_relu"),
        only_if=_RESNET9,
        in_evaluation=True,
    )
    activation: str = _option(
        "auto",
        "activation; of resnet9: relu or celu; of airbench94 to airbench96, except after the "
        "whitening layer: gelu or silu; auto: as published, relu and gelu",
        choices=("auto", "relu", "celu", "gelu", "silu"),
        only_if=_FOR_CIFAR,
        in_evaluation=True,
    )
    celu_alpha: float = _option(
        0.075,
        "minus the minimum of celu",
        check=POSITIVE,
        only_if=(_RESNET9, OnlyIf("activation", ("celu",))),
        in_evaluation=True,
    )
    logits_scale: float = _option(
        0.0,
        "factor of the logits of resnet9 and airbench94 to airbench96; 0: published, 1/8 and 1/9",
        check=NOT_NEGATIVE,
        only_if=_FOR_CIFAR,
        in_evaluation=True,
    )
    whitening: bool = _option(
        False,
        "start resnet9 with fixed 3x3 filters that whiten patches of training images",
        only_if=_RESNET9,
        in_evaluation=True,
    )
    normal_cells: int = _option(
        18,
        "normal cells of amoebanet_b and amoebanet_d, L in GPipe's (L, D), in three stages",
        check=Check(lambda value: value in range(3, 151, 3), "be a multiple of 3 in [3, 150]"),
        only_if=_AMOEBANETS,
        in_evaluation=True,
    )
    cell_filters: int = _option(
        208,
        "channels of each operation in the first cells of amoebanet_b and amoebanet_d, D in "
        "GPipe's (L, D); each reduction doubles them",
        check=Check(lambda value: value > 0 and value % 8 == 0, "be a positive multiple of 8"),
        only_if=_AMOEBANETS,
        in_evaluation=True,
    )
    whitening_images: int = _option(
        10_000,
        "number of the first training images from which whitening filters are computed",
        check=POSITIVE,
        only_if=(_FOR_CIFAR, OnlyIf("whitening", alternative=_AIRBENCH)),
    )
    proxy_model: str = _option(
        "",
        "with select_by_loss: a smaller network, such as airbench96_proxy, whose loss selects the "
        "images, trained on the same images with the same options; on one device; empty: the "
        "network itself selects",
        check=Check(lambda value: value in ("", *MODEL_NAMES), "be a network of this package"),
        only_if=OnlyIf("select_by_loss"),
    )
    proxy_width: int = _option(
        0,
        "width of proxy_model; 0: as published",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("proxy_model", _WITH_WIDTH.values),
    )
    initial_weights: str = _option(
        "",
        "pretrained weights: the model_dir of a run, a SavedModel of `export` or tf_keras, a file "
        "of `model.save` (.keras), or one of Keras applications' weights (.h5, and .weights.h5 for "
        "keras:NAME); the classification head is new unless the classes are the same, which only "
        "runs and exports name; empty: random weights",
        only_if=_NAMED,
    )
    pretrained: bool = _option(
        False,
        "start keras:NAME and keras_hub:PRESET with their library's pretrained weights, from its "
        "cache, downloaded if they are not there, or from the preset's folder",
        only_if=_OF_LIBRARIES,
        in_files_of_runs=False,
    )
    normalization: str = _option(
        "auto",
        "normalization of pixels; auto: for keras:NAME and keras_hub:PRESET their library's, which "
        "pretrained weights need, for others pixel_mean and pixel_std; pixel_mean: these for all",
        choices=("auto", "pixel_mean"),
        only_if=_OF_LIBRARIES,
        in_evaluation=True,
    )
    freeze_through: str = _option(
        "",
        "with initial_weights or pretrained: freeze the first layers through this one, or through "
        "the last whose name has this prefix (stem, stage3; pool2 of AlexNet); a number: the first "
        "blocks, as layer_decay counts them; all_but_head; empty: train all",
    )
    stem: str = _option(
        "imagenet",
        "first layers of resnet18 to resnet152; imagenet: a 7x7 convolution and a pool, each of "
        "stride 2; small: a 3x3 convolution, for images of about 32 pixels",
        choices=("imagenet", "small"),
        only_if=_IMAGENET_RESNETS,
        in_evaluation=True,
    )
    stride_on_1x1: bool = _option(
        False,
        "put a bottleneck's stride in its first convolution (ResNet v1), not in its 3x3 (v1.5)",
        only_if=_IMAGENET_RESNETS,
        in_evaluation=True,
    )
    blur_pool: str = _option(
        "none",
        "blur before subsampling in resnet18 to resnet152, against aliasing (Zhang 2019); none; "
        "convolutions: before convolutions of stride 2, except the first, as in ffcv-imagenet; "
        "convolutions_and_pools: in the stem's pool, too, as in composer",
        choices=("none", "convolutions", "convolutions_and_pools"),
        only_if=_IMAGENET_RESNETS,
        in_evaluation=True,
    )
    padding: str = _option(
        "symmetric",
        "padding of 3x3 convolutions of stride 2 and the stem's pool in resnet18 to resnet152; "
        "symmetric: equal on all sides; same: as Keras' padding=same, of even sizes only at the "
        "bottom and right; same_pool: so for the pool, symmetric for convolutions",
        choices=("symmetric", "same_pool", "same"),
        only_if=_IMAGENET_RESNETS,
        in_evaluation=True,
    )
    zero_gamma: bool = _option(
        True,
        "start the last batch norm of each residual block at gamma 0",
        only_if=_RESNETS,
    )
    conv_init: str = _option(
        "he_fan_out",
        "initial weights of convolutions in resnet8 to resnet152; he_fan_out: N(0, 2 / fan-out), "
        "as in torchvision; he_fan_in: N(0, 2 / fan-in), as in MXNet; he_normal and lecun_normal: "
        "Keras' truncated normals of variance 2 / fan-in and 1 / fan-in",
        choices=("he_fan_out", "he_fan_in", "he_normal", "lecun_normal"),
        only_if=_RESNETS,
    )
    gamma_init: str = _option(
        "ones",
        "initial gamma of batch norm in resnet8 to resnet152, except for zero_gamma's; ones; "
        "uniform: random in [0, 1), as in composer",
        choices=("ones", "uniform"),
        only_if=_RESNETS,
    )
    batch_norm_momentum: float = _option(
        0.9,
        "decay factor of batch norm's moving averages; your own model keeps that of its layers, "
        "unless this is another value than the default",
        check=BELOW_ONE,
    )
    batch_norm_epsilon: float = _option(
        1e-5,
        "added to the variance in batch norm; your own model keeps that of its layers, unless this "
        "is another value than the default",
        check=POSITIVE,
        in_evaluation=True,
    )
    batch_norm_scale: bool = _option(
        True,
        "train gamma of batch norm in resnet9; otherwise it is 1",
        only_if=_RESNET9,
        in_evaluation=True,
    )
    batch_norm_batch_size: int = _option(
        0,
        "images per set of batch-norm statistics, of several neighbouring replicas or of parts of "
        "a replica's batch (ghost batch norm; image n is in part n modulo their number); 0: a "
        "replica's batch",
        check=NOT_NEGATIVE,
        only_if=OnlyIf("model", MODEL_NAMES, alternative=OnlyIf("fused_batch_norm", (True,))),
    )
    fused_batch_norm: bool = _option(
        True,
        "replace the batch norms of your own model by those of this package, which have the same "
        "weights and results, are faster on TensorFlow, and follow batch_norm_batch_size",
        only_if=OnlyIf("model", MODEL_NAMES, unless=True),
    )
    dropout: float = _option(
        0.5,
        "dropout of AlexNet's hidden dense layers",
        check=BELOW_ONE,
        only_if=_ALEXNET,
    )
    batch_norm_after_pool5: bool = _option(
        True,
        "use AlexNet's fifth batch norm, after its last pool (Jia et al. 2018)",
        only_if=_ALEXNET,
        in_evaluation=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Options that name the published one are those of the same run.
        if self.activation in ACTIVATIONS.get(self.model, ())[:1]:
            object.__setattr__(self, "activation", "auto")

    def _check_together(self) -> None:
        super()._check_together()
        check_activation(self.model, self.activation)
        if self.pretrained and self.initial_weights:
            raise UserError("pretrained and initial_weights are both weights: leave out one")
        if self.freeze_through and not (self.initial_weights or self.pretrained):
            raise UserError(
                "freeze_through would freeze random weights: give --initial_weights or --pretrained"
            )


CHOICES: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["choices"] for field in dataclasses.fields(ModelOptions)
}
