"""Published results for comparison: top-1 errors on ImageNet in percent."""

from __future__ import annotations

IMAGES = 1_281_167

# Goyal et al. 2017, Figure 3: ResNet-50, 90 epochs, gradual warmup, linear scaling.
GRADUAL_WARMUP = {
    128: 23.49,
    256: 23.60,
    512: 23.48,
    1024: 23.53,
    2048: 23.49,
    4096: 23.56,
    8192: 23.74,
    16384: 24.79,
    32768: 27.55,
    65536: 33.96,
}
# Their Tables 1 and 2a, at 8192.
NO_WARMUP = {8192: 24.84}
CONSTANT_WARMUP = {8192: 25.88}
SQUARE_ROOT_RATE = {8192: 26.22}
FIXED_RATE = {8192: 41.67}

# You, Gitman and Ginsburg 2017: ResNet-50 with LARS, polynomial decay and more augmentation.
LARS = {256: 24.2, 1024: 24.6, 8192: 24.8, 16384: 25.6, 32768: 27.5}
