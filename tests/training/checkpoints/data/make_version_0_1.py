"""Writes a run, its export and its model, as version 0.1 on tf_keras: `python SCRIPT FOLDER`."""

import pathlib
import sys

import numpy as np

from imagenet_fast import Config, export, train
from imagenet_fast.training.build.model import build_for_evaluation
from imagenet_fast.training.checkpoints.checkpoint import restore_weights
from imagenet_fast.training.run import make_run

FOLDER = pathlib.Path(sys.argv[1])
config = Config(
    synthetic=True,
    num_classes=3,
    model="resnet9",
    width=1,
    whitening=True,
    whitening_images=8,
    image_size=16,
    train_crop="none",
    batch_size=8,
    duration="3 steps",
    decay_at="2 steps",
    learning_rate=0.1,
    rate_scaling="none",
    warmup="0 epochs",
    ema_decay=0.3,
    lookahead_every=2,
    strategy="one_device",
    tensorboard=False,
    examine=False,
    model_dir=str(FOLDER / "run"),
)
train(config)
export(config, str(FOLDER / "export"))
model = build_for_evaluation(make_run(config))
restore_weights(model, config.model_dir)
model.save(FOLDER / "model.keras")
model.save(FOLDER / "saved")
images = np.arange(2 * 16 * 16 * 3).reshape(2, 16, 16, 3) % 251
print(model.predict(images.astype("uint8"), verbose=0).tolist())
