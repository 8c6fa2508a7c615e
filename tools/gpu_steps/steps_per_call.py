"""Times calls of several training steps each, and compares the weights after them bit by bit.

    python tools/gpu_steps/steps_per_call.py --data_dir=data/fashion_mnist_32 --out=steps.json

The calls are those of `train` (--steps_per_call). Needs one device; the default recipe is
airbench_cifar10, whose calls are one XLA program each on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from imagenet_fast.base import environment
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import write_file
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names
from imagenet_fast.distribute.quiet import import_tensorflow


class Steps:
    """A recipe's training steps on one device, from the initial weights each time."""

    def __init__(self, config: Config) -> None:
        from imagenet_fast.data.dataset import distributed_dataset
        from imagenet_fast.distribute.strategy import make_strategy
        from imagenet_fast.lab.xla_compile.lower import variables_of
        from imagenet_fast.training.build.model import build_model
        from imagenet_fast.training.program import Program

        strategy = make_strategy(config)
        if strategy.num_replicas_in_sync > 1:
            raise UserError("the steps run on one device: add --gpus=1")
        model = build_model(config, strategy)
        model.make_slots()
        assert model.total_steps and model.steps_per_epoch  # of a recipe
        self.total: int = model.total_steps
        self.sums = model.metric_sums.variable
        # A dynamic loss scale's variables are not among the optimizer's.
        scale = getattr(model.optimizer, "_loss_scale", None)
        changed = [*variables_of(model), *getattr(scale, "_weights", {}).values()]
        self.variables = list({variable.ref(): variable for variable in changed}.values())
        self.initial = [variable.numpy() for variable in self.variables]
        batches = None if config.data_on_device else distributed_dataset(config, "train")
        self.rows_every = config.log_every.steps(model.steps_per_epoch, config.batch_size)

        @functools.cache
        def program(most: str) -> Program:
            options = config.replace(steps_per_call=most)
            made = Program(model, model.train_step, options, batches, xla=config.xla)
            made.take(0, 1)
            return made

        self._program = program
        start = time.perf_counter()
        program(str(self.total))
        self.first_call_seconds = time.perf_counter() - start

    def run(self, size: int | str, steps: int, *, restart: bool = False) -> tuple[float, float]:
        """Returns the seconds and the CPU seconds of so many steps in calls of ``size``.

        Args:
          size: number of steps, or ``auto``, whose calls also end at rows of the log.
          steps: number of steps in all.
          restart: whether to begin with the first batch again, which starts the input pipeline.
        """
        program = self._program("auto" if size == "auto" else str(self.total))
        size = self.rows_every if size == "auto" else int(size)
        for variable, value in zip(self.variables, self.initial):
            variable.assign(value)
        if restart:
            program.restart()
        self.sums.numpy()  # waits for the device
        start = time.perf_counter(), time.process_time()
        step = 0
        while step < steps:
            step, _ = program.take(step, min(step + size - step % size, steps))
        return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(steps: Steps, config: Config, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the times and comparisons, and prints each as soon as it is known."""
    total: int = given.steps or steps.total
    sizes = list(
        dict.fromkeys(
            size if size == "auto" else min(size, total)
            for size in given.steps_per_call or (1, 10, total)
        )
    )
    results: dict[str, Any] = {"steps": total, "batch_size": config.batch_size}
    results |= {"first_call_seconds": steps.first_call_seconds, "times": [], "comparisons": []}
    # By turns, since other programs may make any part of the measurement slow.
    _, *turns = ([steps.run(size, total) for size in sizes] for _ in range(given.repeats + 1))
    print("steps per call  images/s  ms/step: median (range)     CPU ms/step")
    for size, times in zip(sizes, zip(*turns)):
        seconds, cpu_seconds = (list(kind) for kind in zip(*times))
        speed = total * config.batch_size / statistics.median(seconds)
        row = {"steps_per_call": size, "seconds": seconds, "cpu_seconds": cpu_seconds}
        results["times"].append({**row, "images_per_second": speed})
        each = "  ".join(f"{_milliseconds(kind, total):27}" for kind in (seconds, cpu_seconds))
        print(f"{size:>14} {speed:9,.0f}  {each}", flush=True)

    def after(size: int, count: int) -> list[bytes]:
        steps.run(size, count, restart=True)
        return [variable.numpy().tobytes() for variable in steps.variables]

    n = min(given.compared_steps, total)
    expected = after(1, n)
    for size in dict.fromkeys((1, 2, n)):
        differ = sum(one != other for one, other in zip(expected, after(size, n)))
        results["comparisons"].append({"steps": n, "steps_per_call": size, "differ": differ})
        print(f"{n} steps in calls of 1, and of {size}: {differ} variables differ", flush=True)
    changed = sum(a.tobytes() != b for a, b in zip(steps.initial, expected))
    return {**results, "variables": len(expected), "variables_changed": changed}


def _milliseconds(seconds: Sequence[float], steps: int) -> str:
    """Returns the milliseconds of a step: median and range."""
    median, least, most = (1e3 * kind(seconds) / steps for kind in (statistics.median, min, max))
    return f"{median:.3f} ({least:.3f} to {most:.3f})"


def _size(text: str) -> int | str:
    return text if text == "auto" else int(text)


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
    parser.add_argument(
        "--steps_per_call",
        type=_size,
        nargs="+",
        help="numbers, or auto, which is a program of its own (default: 1, 10 and all)",
    )
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
