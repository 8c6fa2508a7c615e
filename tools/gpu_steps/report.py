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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "studies"))
from study import page
from study.tables import markdown

from imagenet_fast.base.files import write_file

FILE = page.DOCS.parent / "benchmarks" / "gpu_steps" / "steps.json"
PAGE = "compile.md"
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
    steps = json.loads(FILE.read_text())["steps"]
    page.rewrite(PAGE, lambda text: filled_page(text, steps), page.DOCS)
    return 0


def _joined(exported: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of each step beside its predictions."""
    from steps import STEPS

    from imagenet_fast.lab.planning.run import Hardware, plan_run

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


def filled_page(text: str, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page with its tables: time and memory, and the comparison with a processor."""
    measured, compared = [], []
    for name, step in steps.items():
        measured.append([f"`{name}`", *_measured(step)])
        network = name.removesuffix("_float16")
        for precision, found in step["compared"].items():
            differences = (f"{found[key]:.1e}" for key in ("difference", "perturbed"))
            compared.append([f"`{network}`, {_SHORT.get(precision, precision)}", *differences])
    heading = ["images", "ms", "planned", "images/s", "TFLOP/s", "GiB", "GiB without a GPU"]
    parts = {
        "gpu steps": markdown(["step", *heading], measured),
        "gpu differences": markdown(
            ["step", "GPU", "processor, weights changed by 1e-7"], compared
        ),
    }
    return page.fill(text, parts)


def _measured(step: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a step's time and memory."""
    found, predicted = step["measured"], step["predicted"]
    seconds, planned = found["seconds"]["median"], predicted["seconds"]
    # Outputs that share memory with arguments count once.
    memory = sum(found["memory"].values()) - 2 * found["memory"]["shared"]
    return [
        f"{step['images']:,} of {step['image_size']} px",
        f"{1e3 * seconds:.2f}",
        f"{1e3 * planned:.2f} ({planned / seconds - 1:+.0%})",
        f"{step['images'] / seconds:,.0f}",
        f"{predicted['flops'] / seconds / 1e12:.0f}",
        f"{memory / _GIB:.3f}",
        f"{predicted['peak'] / _GIB:.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
