"""Keras layers of the published recipes, for any tf_keras model."""

from imagenet_fast.layers.blur_pool import BlurPool
from imagenet_fast.layers.dropout import Dropout
from imagenet_fast.layers.ghost_batch_normalization import GhostBatchNormalization
from imagenet_fast.layers.grouped_batch_normalization import GroupedBatchNormalization
from imagenet_fast.layers.patch_whitening import PatchWhitening
from imagenet_fast.layers.pixel_normalization import PixelNormalization

__all__ = [
    "BlurPool",
    "Dropout",
    "GhostBatchNormalization",
    "GroupedBatchNormalization",
    "PatchWhitening",
    "PixelNormalization",
]
