"""The configuration of a model that is made in no time, of random images."""

from imagenet_fast import Config

SMALL = Config(
    synthetic=True,
    num_classes=10,
    model="resnet8",
    image_size=16,
    train_crop="none",
    batch_size=32,
    strategy="one_device",
)
