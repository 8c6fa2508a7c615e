"""Times calls of several training steps each, and compares the weights after them bit by bit.

    python tools/gpu_steps/steps_per_call.py --data_dir=data/fashion_mnist_32 --out=steps.json

A call is one XLA program: a loop around the package's training step, so that the host starts one
program for several steps. The package's own program, of one step, is timed and compared, too. Needs
one device and a recipe with --data_on_device and --xla; the default is airbench_cifar10.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names
from imagenet_fast.distribute.quiet import import_tensorflow


class Steps:
    """A recipe's training steps as two programs, ``loop`` and ``one step``, on one device."""

    def __init__(self, config: Config) -> None:
        import tensorflow as tf

        from imagenet_fast.distribute.strategy import make_strategy
        from imagenet_fast.training.build import build_model
        from imagenet_fast.xla_compile.lower import variables_of

        if not (config.data_on_device and config.xla):
            raise UserError("the recipe must have --data_on_device and --xla")
        strategy = make_strategy(config)
        if strategy.num_replicas_in_sync > 1:
            raise UserError("the steps run on one device: add --gpus=1")
        model = build_model(config, strategy)
        model.make_slots()
        self.total = model.total_steps
        self.sums = model.metric_sums.variable
        # A dynamic loss scale's variables are not among the optimizer's.
        scale = getattr(model.optimizer, "_loss_scale", None)
        changed = [*variables_of(model), *getattr(scale, "_weights", {}).values()]
        self.variables = list({variable.ref(): variable for variable in changed}.values())
        self.initial = [variable.numpy() for variable in self.variables]

        @tf.function(jit_compile=True, autograph=False)
        def loop(first: tf.Tensor, steps: tf.Tensor) -> Any:
            def step(done: tf.Tensor) -> tf.Tensor:
                model._take_step({"step": first + done})
                return done + 1

            none = tf.constant(0, tf.int64)
            return tf.while_loop(lambda done: done < steps, step, [none], parallel_iterations=1)

        def one_step(first: tf.Tensor, steps: tf.Tensor) -> Any:
            return model._step({"step": first})

        @tf.function(autograph=False)
        def call(program: str, *numbers: tf.Tensor) -> Any:
            return strategy.run({"loop": loop, "one step": one_step}[program], numbers)

        self._call = lambda program, *numbers: call(program, *map(tf.constant, numbers))

    def run(self, program: str, calls: Sequence[int]) -> float:
        """Returns the seconds of calls of these numbers of steps, from the initial weights."""
        for variable, value in zip(self.variables, self.initial):
            variable.assign(value)
        self.sums.numpy()  # waits for the device
        start = time.perf_counter()
        for first, steps in zip(np.cumsum([0, *calls]), np.int64(calls)):
            self._call(program, first, steps)
        self.sums.numpy()
        return time.perf_counter() - start


def measure(steps: Steps, config: Config, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the times and comparisons, and prints each as soon as it is known."""
    total = given.steps or steps.total
    sizes = dict.fromkeys(min(size, total) for size in given.steps_per_call or (1, 10, total))
    results: dict[str, Any] = {"steps": total, "batch_size": config.batch_size}
    results |= {"first_call_seconds": {}, "times": [], "comparisons": []}
    print("program   steps per call  images/s  ms/step  seconds: median (range)")
    for program, size in [*(("loop", size) for size in sizes), ("one step", 1)]:
        if program not in results["first_call_seconds"]:
            results["first_call_seconds"][program] = steps.run(program, [1])
        calls = [min(size, total - first) for first in range(0, total, size)]
        _, *seconds = (steps.run(program, calls) for _ in range(given.repeats + 1))
        median = statistics.median(seconds)
        speed = total * config.batch_size / median
        row = {"program": program, "steps_per_call": size, "calls": len(calls)}
        results["times"].append({**row, "seconds": seconds, "images_per_second": speed})
        print(
            f"{program:8} {size:15} {speed:9,.0f} {1e3 * median / total:8.3f}  "
            f"{median:.4f} ({min(seconds):.4f} to {max(seconds):.4f})",
            flush=True,
        )

    def after(program: str, calls: Sequence[int]) -> list[bytes]:
        steps.run(program, calls)
        return [variable.numpy().tobytes() for variable in steps.variables]

    n = min(given.compared_steps, total)
    ones, twos = [1] * n, [2] * (n // 2) + [1] * (n % 2)
    expected = after("loop", ones)
    for program, calls in (("loop", ones), ("loop", twos), ("loop", [n]), ("one step", ones)):
        differ = sum(one != other for one, other in zip(expected, after(program, calls)))
        results["comparisons"].append({"program": program, "calls": calls, "differ": differ})
        print(f"{n} calls of loop, and {program} {calls}: {differ} variables differ", flush=True)
    changed = sum(a.tobytes() != b for a, b in zip(steps.initial, expected))
    return {**results, "variables": len(expected), "variables_changed": changed}


def main(arguments: Sequence[str]) -> int:
    """Measures the recipe of a command line; returns 0, or 2 after a user error."""
    parser = argparse.ArgumentParser(
        "steps_per_call.py",
        description=__doc__,
        epilog="All other flags are those of `imagenet-fast train --helpfull`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, help="of a measurement (default: the recipe's)")
    parser.add_argument("--steps_per_call", type=int, nargs="+", help="(default: 1, 10 and all)")
    parser.add_argument("--repeats", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--compared_steps", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of the results")
    given, rest = parser.parse_known_args(arguments)
    try:
        if not any("flagfile=" in argument for argument in rest):
            rest.insert(0, "--flagfile=airbench_cifar10")
        flags = CommandFlags("train", option_names())
        flags.parse(rest)
        config = Config().replace(**flags.changes())
        import_tensorflow()
        results = measure(Steps(config), config, given)
    except UserError as error:
        print(f"steps_per_call.py: error: {error}", file=sys.stderr)
        return 2
    if given.out:
        write_file(given.out, json.dumps({**results, **environment.provenance()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
