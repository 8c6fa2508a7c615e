"""Joins what `run.py` measured with what was predicted, and writes the tables in docs/compile.md.

    python tools/gpu_steps/report.py --steps=runs/gpu_steps --results=results/results.json

writes benchmarks/gpu_steps/steps.json; without arguments, only the tables from that file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from imagenet_fast.base.files import write_file

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "gpu_steps" / "steps.json"
PAGE = ROOT / "docs" / "compile.md"
_BEGIN, _END = "<!-- gpu steps -->", "<!-- end of gpu steps -->"
_GIB = 2**30
_SHORT = {"mixed_float16": "float16"}


def main(arguments: Sequence[str]) -> int:
    """Writes the file and the tables."""
    parser = argparse.ArgumentParser(
        "report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=pathlib.Path, help="folder of export.py")
    parser.add_argument("--results", type=pathlib.Path, help="file of run.py")
    given = parser.parse_args(arguments)
    if given.steps:
        exported = json.loads((given.steps / "steps.json").read_text())
        measured = json.loads(given.results.read_text())
        write_file(FILE, json.dumps(_joined(exported, measured), indent=1) + "\n")
    before, rest = PAGE.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    text = tables(json.loads(FILE.read_text())["steps"])
    write_file(PAGE, f"{before}{_BEGIN}\n{text}\n{_END}{after}")
    return 0


def _joined(exported: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of each step beside its predictions."""
    from steps import STEPS

    from imagenet_fast.planning.run import Hardware, plan_run

    steps = {}
    for name, config in STEPS.items():
        step = exported["steps"][name]
        planned = plan_run(config.replace(strategy="one_device", xla=True), Hardware("h100", 1))
        steps[name] = {
            "images": step["images"],
            "image_size": step["image_size"],
            "options": step["options"],
            "predicted": {**step["predicted"], "seconds": planned.time.total},
            "measured": measured[name],
            # Of a small step, by precision.
            "compared": {
                key.rpartition("small_")[2]: value
                for key, value in measured.items()
                if key.startswith(f"{name}_small_")
            },
        }
    return {"compiler": exported["packages"], "steps": steps}


def tables(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tables in Markdown: time and memory, and the comparison with a processor."""
    sizes = (lambda step: f"{step['images']:,} of {step['image_size']} px"), _milliseconds, _planned
    speeds = _images_per_second, _teraflops, _memory, _predicted_memory
    measured = {name: [cell(step) for cell in (*sizes, *speeds)] for name, step in steps.items()}
    compared = {
        f"{name.removesuffix('_float16')}, {_SHORT.get(precision, precision)}": [
            f"{found['difference']:.1e}",
            f"{found['perturbed']:.1e}",
        ]
        for name, step in steps.items()
        for precision, found in step["compared"].items()
    }
    heading = ("images", "ms", "planned", "images/s", "TFLOP/s", "GiB", "GiB without a GPU")
    return "\n\n".join(
        (
            _markdown(heading, measured),
            _markdown(("GPU", "processor, weights changed by 1e-7"), compared),
        )
    )


def _markdown(heading: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [("step", *heading), ("---",) * (1 + len(heading))]
    lines += [
        (f"`{name.replace(', ', '`, ', 1)}" + "`" * (", " not in name), *cells)
        for name, cells in rows.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(step: Mapping[str, Any]) -> float:
    return step["measured"]["seconds"]["median"]


def _milliseconds(step: Mapping[str, Any]) -> str:
    return f"{1e3 * _seconds(step):.2f}"


def _planned(step: Mapping[str, Any]) -> str:
    planned = step["predicted"]["seconds"]
    return f"{1e3 * planned:.2f} ({planned / _seconds(step) - 1:+.0%})"


def _images_per_second(step: Mapping[str, Any]) -> str:
    return f"{step['images'] / _seconds(step):,.0f}"


def _teraflops(step: Mapping[str, Any]) -> str:
    return f"{step['predicted']['flops'] / _seconds(step) / 1e12:.0f}"


def _memory(step: Mapping[str, Any]) -> str:
    memory = step["measured"]["memory"]
    return f"{(sum(memory.values()) - 2 * memory['shared']) / _GIB:.3f}"


def _predicted_memory(step: Mapping[str, Any]) -> str:
    return f"{step['predicted']['peak'] / _GIB:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
