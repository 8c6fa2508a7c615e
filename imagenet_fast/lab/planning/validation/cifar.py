"""Published training times of small networks on CIFAR-10."""

from __future__ import annotations

from imagenet_fast.lab.planning.validation.results import (
    CIFAR,
    DataParallel,
    Options,
    PublishedResult,
)

_IMAGES: Options = {"image_size": 32, "num_classes": 10, "precision": "mixed_float16"}

_PAGE = "Page 2019"
_RESNET9: Options = {**_IMAGES, "model": "resnet9"}
_POOL_FIRST = {"pool_order": "conv_pool_bn_relu"}
_CELU = {**_POOL_FIRST, "activation": "celu"}
PAGE_ROWS = tuple(
    PublishedResult(
        f"ResNet-9, {name}",
        _PAGE,
        "PyTorch, V100, ResNet-9",
        DataParallel({**_RESNET9, **options}, "v100", 1, 512),
        value,
        "seconds",
        epochs,
        CIFAR,
        fits=fits,
    )
    for name, options, epochs, value, fits in (
        # The baseline itself takes 75 s, some of which it waits for images from the CPU.
        ("preprocessing on the GPU", {}, 24, 70, True),
        ("pooling before batch norm", _POOL_FIRST, 25, 64, False),
        ("label smoothing", _POOL_FIRST, 23, 59, False),
        ("CELU", _CELU, 20, 52, False),
        ("all but whitening", {**_CELU, "batch_norm_scale": False}, 17, 43, False),
        ("all tricks", {**_CELU, "batch_norm_scale": False, "whitening": True}, 10, 26, False),
    )
)

# Evaluation and preparing images on the GPU are included in all times, compilation in none.
_JORDAN = "Jordan 2024-2025, cifar10-airbench, README and scripts"
_HIVERGE = "Hiverge 2025, cifar10-speedrun, README"
_EAGER, _COMPILED = "PyTorch, A100", "PyTorch, A100, compiled"
_MUON: Options = {"optimizer": "muon", "muon_steps": 3}
_WHY = (
    "PyTorch's GELU is one operation, TensorFlow's several; the wider networks reach 43 and 45% of "
    "peak by the published FLOPs, the constant is of ResNet-50"
)
# The model trains on half of each batch, which a proxy selects.
_SELECTED: Options = {
    "select_by_loss": 0.5,
    "proxy_model": "airbench96_proxy",
    "proxy_every": 4,
}
AIRBENCH_ROWS = tuple(
    PublishedResult(
        f"{model}{title}",
        source,
        stack,
        DataParallel({**_IMAGES, "model": model, **options}, chip, 1, batch),
        value,
        "seconds",
        epochs,
        CIFAR,
        fits=fits,
        why=_WHY if stack == _EAGER else "",
    )
    for model, title, source, stack, chip, options, batch, epochs, value, fits in (
        ("airbench94", "", _JORDAN, _EAGER, "a100-80gb", {}, 1024, 9.9, 3.83, False),
        ("airbench95", "", _JORDAN, _EAGER, "a100-80gb", {}, 1024, 15, 10.4, False),
        ("airbench96", "", _JORDAN, _EAGER, "a100-80gb", {}, 1024, 37, 34.7, False),
        ("airbench94", ", compiled", _JORDAN, _COMPILED, "a100", {}, 1024, 9.9, 3.09, True),
        ("airbench94", ", Muon", _JORDAN, _COMPILED, "a100", _MUON, 2000, 8, 2.59, False),
        ("airbench96", ", proxy", _JORDAN, _COMPILED, "a100", _SELECTED, 1024, 45, 27.3, False),
        ("airbench94", ", speedrun", _HIVERGE, _COMPILED, "a100", _MUON, 1536, 7.59, 2.015, False),
    )
)
