"""Measures this package on one GPU, what matters most first, and writes a table of the results.

    python tools/gpu/measure.py --data_dir=data/fashion_mnist_32 --digits_dir=data/digits \
        --output_dir=benchmarks/gpu/h100 --minutes=14

Each measurement is a process of its own, one after the other: whole runs of seconds, with an empty
and a full cache of compiled code; their steps alone; ResNet-50 beside Keras Applications' and
PyTorch's; two deterministic runs; a GPU's first steps beside a CPU's. A line of results.jsonl is
added for each, and tables.md is made of all lines. What has no time left is done when the same
command is given again. --flags adds flags to all runs, as to try the script on a CPU:

    --flags="--image_size=8 --crop_padding=1 --batch_size=32 --duration='3 steps'"
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_TOOLS = pathlib.Path(__file__).parents[1]
_TRAIN = (sys.executable, "-m", "imagenet_fast", "train")
_STEPS = (sys.executable, str(_TOOLS / "gpu_steps" / "steps_per_call.py"))
_PEERS = (sys.executable, str(pathlib.Path(__file__).with_name("peers.py")))
_REPEATS = 3
# A measurement's: not started with less time left, and ended after the other.
_LEAST_SECONDS, _MOST_SECONDS = 30, 300
_Numbers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A program and what is kept of it.

    Attributes:
      name: its lines', with the number of the repetition after a slash.
      command: what is run.
      read: returns the results from what it printed.
      environment: added to this process' own.
    """

    name: str
    command: Sequence[str]
    read: Callable[[str], _Numbers]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def measurements(given: argparse.Namespace) -> Iterator[Measurement]:
    """Yields all measurements in their order."""
    runs: pathlib.Path = given.output_dir / "runs"
    extra = shlex.split(given.flags)
    # The first run finds it empty.
    cache = {"XDG_CACHE_HOME": str((given.output_dir / "cache").absolute())}

    def trained(name: str, flags: Sequence[str], **environment: str) -> Measurement:
        folder = runs / name.replace("/", "_")
        command = (*_TRAIN, *flags, f"--model_dir={folder}", *extra)
        return Measurement(name, command, lambda _: _of_run(folder), {**cache, **environment})

    yield Measurement(
        "doctor", (sys.executable, "-m", "imagenet_fast", "doctor"), lambda text: {"lines": text}
    )
    recipes = ("airbench_cifar10", "speedrun_cifar10")
    for recipe in recipes:
        for number in range(1, _REPEATS + 1):
            data = (f"--flagfile={recipe}", f"--data_dir={given.data_dir}")
            yield trained(f"{recipe}/{number}", (*data, f"--seed={number}"))
    for recipe in recipes:
        out = runs / f"{recipe}_steps.json"
        data = (f"--flagfile={recipe}", f"--data_dir={given.data_dir}")
        yield Measurement(
            f"{recipe}, steps",
            (*_STEPS, *data, f"--out={out}", *extra),
            functools.partial(_of_file, out),
        )
    for precision, xla in (("float16", True), ("bfloat16", True), ("float32", True)):
        yield trained(f"resnet50 {precision} XLA", _resnet50(precision, xla))
    for peer in ("torch", "torch compile", "keras XLA", "keras"):
        yield Measurement(
            f"resnet50 float16 {peer}", (*_PEERS, *peer.split(), *given.peer_flags), _last_line
        )
    yield trained("resnet50 float16", _resnet50("float16", False))
    digits = ("--flagfile=digits", f"--data_dir={given.digits_dir}", "--deterministic")
    one, other = "digits deterministic/1", "digits deterministic/2"
    yield trained(one, digits)
    yield trained(other, digits)
    yield _compared("digits, again", one, other, runs)
    for steps in (1, 20):
        gpu, cpu = (f"digits {steps} steps on {device}" for device in ("GPU", "CPU"))
        few = (*digits, "--precision=float32", f"--duration={steps} steps")
        yield trained(gpu, few, NVIDIA_TF32_OVERRIDE="0")
        yield trained(cpu, (*few, "--gpus=0"))
        yield _compared(f"digits, GPU and CPU after {steps}", gpu, cpu, runs)


def _resnet50(precision: str, xla: bool) -> list[str]:
    policy = precision if precision == "float32" else f"mixed_{precision}"
    every = [f"--{name}_every=1000 steps" for name in ("eval", "checkpoint")]
    return [
        *("--model=resnet50", "--synthetic", "--num_classes=1000", "--batch_size=256"),
        *(f"--precision={policy}", "--xla" if xla else "--noxla", "--duration=121 steps"),
        *("--log_every=20 steps", "--noexamine", "--notensorboard", *every),
    ]


def _of_run(folder: pathlib.Path) -> _Numbers:
    """Returns the times and accuracy of a run, and its speed without its first and last rows."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    speeds = [row["images_per_second"] for row in rows if row["kind"] == "train"]
    names = ("images_per_second", "train_seconds", "compile_seconds", "top1", "loss", "steps")
    return {**{name: summary.get(name) for name in names}, "rows_images_per_second": speeds[1:-1]}


def _of_file(path: pathlib.Path, _: str) -> _Numbers:
    return json.loads(path.read_text())


def _last_line(text: str) -> _Numbers:
    return json.loads(text.splitlines()[-1])


def _compared(name: str, one: str, other: str, runs: pathlib.Path) -> Measurement:
    folders = [str(runs / run.replace("/", "_")) for run in (one, other)]
    return Measurement(
        name,
        (sys.executable, __file__, "--compare", *folders),
        _last_line,
        {"CUDA_VISIBLE_DEVICES": ""},
    )


def compare(one: str, other: str) -> _Numbers:
    """Compares the float tensors of two runs' last checkpoints: which differ, and by how much."""
    import numpy as np
    import tensorflow as tf

    def tensors(folder: str) -> dict[str, np.ndarray]:
        path = tf.train.latest_checkpoint(f"{folder}/checkpoints")
        reader = tf.train.load_checkpoint(path)
        found = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
        return {
            name: value
            for name, value in found.items()
            if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)
        }

    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    differ = [name for name in first if not np.array_equal(first[name], second[name])]
    squares = [np.square(first[name] - second[name]).sum() for name in differ]
    size = sum(np.square(value).sum() for value in first.values())
    return {
        "tensors": len(first),
        "differ": len(differ),
        "relative": float(np.sqrt(sum(squares) / size)),
    }


def measure(one: Measurement, seconds: float) -> _Numbers:
    """Runs a measurement; returns its line of results.jsonl."""
    start = time.perf_counter()
    line: _Numbers = {"name": one.name}
    try:
        done = subprocess.run(
            one.command,
            env={**os.environ, **one.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {**line, "rc": 124, "seconds": seconds}
    line |= {"rc": done.returncode, "seconds": round(time.perf_counter() - start, 2)}
    if done.returncode:
        return {**line, "error": done.stderr[-1000:]}
    return {**line, **one.read(done.stdout)}


def table(lines: Sequence[_Numbers]) -> str:
    """Returns a Markdown table: the median of each name's lines, and the range of several."""
    groups: dict[str, list[_Numbers]] = collections.defaultdict(list)
    for line in lines:
        if not line["rc"] and line["name"] != "doctor":
            groups[line["name"].partition("/")[0]].append(line)
    rows = ["| | n | images/s | top-1, % | training, s | command to prompt, s | |"]
    rows += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, found in groups.items():
        columns = (
            _summary([_speed(line) for line in found], "{:,.0f}"),
            _summary([100 * line["top1"] for line in found if line.get("top1")], "{:.2f}"),
            _summary([line.get("train_seconds") for line in found], "{:.2f}"),
            _summary([line["seconds"] for line in found], "{:.1f}"),
            ", ".join(
                f"{line['differ']} of {line['tensors']} tensors differ, by {line['relative']:.1e}"
                for line in found
                if "differ" in line
            ),
        )
        rows.append(f"| {name} | {len(found)} | {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"


def _speed(line: _Numbers) -> float | None:
    """Returns the images per second of a line; of calls of steps, those of the fastest."""
    if "times" in line:
        return max(row["images_per_second"] for row in line["times"])
    rows = line.get("rows_images_per_second")
    is_resnet50 = line["name"].startswith("resnet50")
    return statistics.median(rows) if rows and is_resnet50 else line.get("images_per_second")


def _summary(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    median, least, most = (form.format(kind(known)) for kind in (statistics.median, min, max))
    return median if len(known) == 1 else f"{median} ({least} to {most})"


def main(arguments: Sequence[str]) -> int:
    """Measures until the time is over; returns 1 if a measurement failed."""
    parser = argparse.ArgumentParser(
        "measure.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", help="Fashion-MNIST, padded to 32 px, or CIFAR-10")
    parser.add_argument("--digits_dir", help="the digits")
    parser.add_argument("--output_dir", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=14, help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="measure only names that begin with this")
    parser.add_argument("--flags", default="", help="further flags of all runs")
    parser.add_argument("--peer_flags", type=shlex.split, default=[], help="of peers.py")
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.compare:
        print(json.dumps(compare(*given.compare)))
        return 0
    if not (given.data_dir and given.digits_dir and given.output_dir):
        parser.error("give --data_dir, --digits_dir and --output_dir")
    end = time.monotonic() + 60 * given.minutes
    given.output_dir.mkdir(parents=True, exist_ok=True)
    path = given.output_dir / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {line["name"] for line in lines if not line["rc"]}
    failed = 0
    for one in measurements(given):
        left = end - time.monotonic()
        if one.name in done or not one.name.startswith(given.only):
            continue
        if left < _LEAST_SECONDS:
            print(f"{one.name}: no time left", flush=True)
            continue
        line = measure(one, min(left, _MOST_SECONDS))
        lines.append(line)
        failed += line["rc"] != 0
        print(json.dumps(line)[:400], flush=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        (given.output_dir / "tables.md").write_text(table(lines))
    shutil.rmtree(given.output_dir / "cache", ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
