"""Keras layers of the published recipes, for any Keras model."""

from imagenet_fast.layers.batch_normalization import BatchNormalization
from imagenet_fast.layers.blur_pool import BlurPool
from imagenet_fast.layers.dropout import Dropout
from imagenet_fast.layers.ghost_batch_normalization import GhostBatchNormalization
from imagenet_fast.layers.grouped_batch_normalization import GroupedBatchNormalization
from imagenet_fast.layers.patch_whitening import PatchWhitening
from imagenet_fast.layers.pixel_normalization import PixelNormalization

__all__ = [
    "BatchNormalization",
    "BlurPool",
    "Dropout",
    "GhostBatchNormalization",
    "GroupedBatchNormalization",
    "PatchWhitening",
    "PixelNormalization",
]
