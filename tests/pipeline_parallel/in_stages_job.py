"""Models whose weights are made on four CPU devices.

Argument: the path of a JSON file to write, with the devices' numbers by block, and whether all
weights are those of the plain model, by the name of the case.
"""

import functools
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from imagenet_fast import models
from imagenet_fast.base.errors import UserError
from imagenet_fast.layers import Dropout
from imagenet_fast.pipeline_parallel.in_stages import build_in_stages
from imagenet_fast.pipeline_parallel.pipeline import Pipeline

CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(CPU, [tf.config.LogicalDeviceConfiguration()] * 4)
DEVICES = [device.name for device in tf.config.list_logical_devices("CPU")]


def unnamed():
    layers = [keras.layers.Dense(80, "relu"), Dropout(0.5), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input([60]), *layers, keras.layers.Dense(2)])


def number_of(device):
    return int(device.rpartition(":")[2])


def case(make, balance, policy):
    """What there is to tell of a model."""
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(5)
    plain = make()
    drawn = np.random.rand()
    keras.utils.set_random_seed(5)
    model, blocks, balance = build_in_stages(make, DEVICES, balance)
    Pipeline(blocks, DEVICES, balance=balance).check_placement()
    return {
        "balance": balance,
        "devices": [
            sorted({number_of(variable.device) for variable in block.variables}) for block in blocks
        ],
        "equal": all(map(np.array_equal, model.get_weights(), plain.get_weights())),
        "weights": len(plain.get_weights()),
        "random numbers": drawn == np.random.rand(),
        "dtypes": sorted({variable.dtype.name for variable in model.trainable_variables}),
    }


def misplaced():
    """What is told of blocks that have been built elsewhere."""
    blocks = [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")]
    with tf.device(DEVICES[1]):
        keras.Sequential([keras.Input([4]), *blocks])
    try:
        Pipeline(blocks, DEVICES[1:3]).check_placement()
    except UserError as error:
        return str(error)
    return ""


def main():
    resnet = functools.partial(models.build, "resnet8", 3, (32, 32, 3))
    amoebanet = functools.partial(
        models.build, "amoebanet_d", 3, (32, 32, 3), normal_cells=3, cell_filters=8
    )
    found = {
        "resnet": case(resnet, None, "float32"),
        "amoebanet": case(amoebanet, [1, 2, 3, 5], "float32"),
        "half": case(resnet, lambda blocks: [1, 1, 1, len(blocks) - 3], "mixed_bfloat16"),
        "unnamed": case(unnamed, None, "float32"),
        "misplaced": misplaced(),
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
