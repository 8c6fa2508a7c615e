"""A step of an optimizer of Addons on two replicas; the argument is its name.

Prints as JSON what each replica has then of a variable that is decayed, and of one that is not.
"""

import json
import sys

import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.optimizers.by_name import make_optimizer
from imagenet_fast.optimizers.schedules import StepDecay


def main():
    strategy = make_strategy(Config(strategy="mirrored", logical_cpus=2, batch_size=2))
    with strategy.scope():
        variables = [tf.Variable([2.0], name=f"a/{name}") for name in ("kernel", "bias")]
        optimizer = make_optimizer(
            sys.argv[1],
            StepDecay(0.25, [], 0.1),
            momentum=0.8,
            weight_decay=0.5,
            undecayed=variables[1:],
            clip_norm=None,
        )

    def step():
        optimizer.apply_gradients([(tf.constant([0.0]), variable) for variable in variables])

    strategy.run(tf.function(step))
    copies = [strategy.experimental_local_results(variable) for variable in variables]
    print(json.dumps([[float(copy.numpy()[0]) for copy in own] for own in copies]))


if __name__ == "__main__":
    main()
