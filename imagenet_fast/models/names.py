"""The names of the models, to be read without importing TensorFlow."""

from __future__ import annotations

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
