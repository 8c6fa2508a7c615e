"""Some steps of each optimizer on two devices.

Argument: the path of an .npz file, with all weights after the last step under the optimizer's name.
Each replica holds a part of the gradients; their sum is the gradient.
"""

import sys

import numpy as np
import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.base.keras_2 import KERAS_2
from imagenet_fast.optimizers import LARS, SGD, Muon, PiecewiseLinear

STEPS = 6
SHAPES = [(3, 3, 4, 8), (8,), (8, 5), (5,)]
MASK = [True, False, True, False]
RATES = PiecewiseLinear([0, 2, 4], [0.1, 0.4, 0.05])
SHARED = {
    "weight_decay": 0.05,
    "weight_decay_mask": [1, 0.25, 1, 0],
    "rate_factors": [1, 4, 1, 2],
    "global_clipnorm": 5.0,
}
OPTIMIZERS = {
    "sgd": lambda: SGD(RATES, **SHARED),
    "sgd_of_page": lambda: SGD(RATES, nesterov=True, rate_in_momentum=True, **SHARED),
    "lars": lambda: LARS(RATES, eeta=0.1, trust_mask=MASK, **SHARED),
    "lars_rate_outside": lambda: LARS(RATES, eeta=0.1, rate_in_momentum=False, **SHARED),
    "muon": lambda: Muon(RATES, newton_schulz_dtype="float32", **SHARED),
}
if not KERAS_2:  # which does not accumulate
    ACCUMULATED = {
        **SHARED,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
        # By the norm, the sum and the mean would be clipped to the same.
        "global_clipnorm": None,
        "clipvalue": 1.0,
    }
    OPTIMIZERS["sgd_accumulated"] = lambda: SGD(RATES, **ACCUMULATED)


def problem():
    """Returns weights, and the gradients of each step."""
    generator = np.random.default_rng(0)

    def normal():
        return [generator.normal(size=shape).astype("float32") for shape in SHAPES]

    return normal(), [normal() for _ in range(STEPS)]


def main():
    strategy = make_strategy(Config(strategy="mirrored", logical_cpus=2, batch_size=2))
    weights, gradients = problem()
    results = {}
    for name, make in OPTIMIZERS.items():
        with strategy.scope():
            variables = [tf.Variable(weight) for weight in weights]
            optimizer = make()
            optimizer.build(variables)

        def own_step(whole, optimizer=optimizer, variables=variables):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            # Unequal parts, so that each one counts.
            share = (tf.cast(replica, tf.float32) + 1) / 3
            optimizer.apply_gradients([(share * g, v) for g, v in zip(whole, variables)])

        step = tf.function(lambda whole, own=own_step: strategy.run(own, args=(whole,)))
        for whole in gradients:
            step([tf.constant(g) for g in whole])
        for variable in variables:
            first, second = (copy.numpy() for copy in variable.values)
            np.testing.assert_array_equal(first, second)
        results[name] = np.concatenate([v.numpy().ravel() for v in variables])
    np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
