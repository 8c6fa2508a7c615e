"""50 steps of LARS on variables shaped as ResNet-50's, on the strategy that the arguments name.

Arguments: ``strategy``, ``logical_cpus``, and the path of an .npz file, which the chief writes.
Each replica holds a part of the gradients; their sum is the gradient.
"""

import sys

import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.workers import is_chief
from imagenet_fast.models import build
from imagenet_fast.optimizers import LARS, variable_roles
from imagenet_fast.optimizers.roles import Role

STEPS = 50
RATE, DECAY = 8.0, 1e-4


def problem():
    """Returns weights, the gradients of each step, and which variables are weights."""
    model = build("resnet50", 1000, (224, 224, 3))
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    assert len(shapes) == 161
    # A sixteenth of each side, so that NumPy's steps stay short.
    shapes = [tuple(max(1, side // 16) if side > 16 else side for side in s) for s in shapes]
    mask = [role is Role.WEIGHT for role in variable_roles(model)]
    generator = np.random.default_rng(0)

    def normal():
        return [generator.normal(size=shape).astype("float32") for shape in shapes]

    return normal(), [normal() for _ in range(STEPS)], mask


def main():
    kind, logical_cpus, out = sys.argv[1:]
    strategy = make_strategy(Config(strategy=kind, logical_cpus=int(logical_cpus), batch_size=8))
    weights, gradients, mask = problem()
    with strategy.scope():
        variables = [tf.Variable(weight) for weight in weights]
        optimizer = LARS(RATE, weight_decay=DECAY, weight_decay_mask=mask, trust_mask=mask)
        optimizer.build(variables)
    replicas = strategy.num_replicas_in_sync

    def own_step(whole):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # Unequal parts, so that each one counts.
        share = 2 * (tf.cast(replica, tf.float32) + 1) / (replicas * (replicas + 1))
        optimizer.apply_gradients([(share * g, v) for g, v in zip(whole, variables)])

    @tf.function
    def step(whole):
        strategy.run(own_step, args=(whole,))

    for whole in gradients:
        step([tf.constant(g) for g in whole])
    if is_chief(strategy):
        np.savez(out, *[variable.numpy() for variable in variables])


if __name__ == "__main__":
    main()
