"""``imagenet-fast plan``."""

from __future__ import annotations

import math
import os
from typing import Any

from imagenet_fast.base.errors import UserError, nearest, require_choice
from imagenet_fast.base.files import write_results
from imagenet_fast.base.option import parse
from imagenet_fast.base.paths import to_path
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names, parse_option
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.lab.planning.cost_model.accelerators import ACCELERATORS

# Flags of the hardware.
_HARDWARE = ("accelerator", "chips", "network_gbits", "host_images")


def main(arguments: list[str]) -> int:
    """Prints the plan named by a flag without a value; by default, that of the run."""
    # Not absl flags, because --schedule=cosine is an option of Config.
    asked = [name for name in PLANS if f"--{name}" in arguments]
    if not arguments:
        print(f"usage: imagenet-fast plan [--NAME] [--flag=value ...]\n\n{_about()}")
        return 0
    if len(asked) > 1:
        raise UserError(f"plan one thing at a time, not {' and '.join(f'--{n}' for n in asked)}")
    if asked:
        plan, _ = PLANS[asked[0]]
        plan([argument for argument in arguments if argument != f"--{asked[0]}"])
    else:
        _run(arguments)
    return 0


# The options that affect a pipeline most, for --help.
_PIPELINE_OPTIONS = (
    *("data_dir", "num_classes", "image_size"),
    *("model", "normal_cells", "cell_filters"),
    *("batch_size", "accumulation_steps", "optimizer"),
    *("pipeline_stages", "pipeline_balance", "pipeline_schedule"),
    *("pipeline_stages_per_device", "rematerialize", "precision"),
)


# The options that affect a run's time most, for --help.
_RUN_OPTIONS = (
    *("data_dir", "num_classes", "image_size"),
    *("model", "batch_norm_batch_size"),
    *("batch_size", "accumulation_steps", "duration", "optimizer"),
    *("all_reduce", "all_reduce_dtype", "fusion_bytes", "fusion_segments", "precision"),
)


def _run(arguments: list[str]) -> None:
    flags = CommandFlags("plan", option_names(), _RUN_OPTIONS, about=_about())
    flags.define("accelerator", "", f"type of chip: {', '.join(ACCELERATORS)}")
    flags.define("chips", 1, "number of chips of the type that accelerator names")
    flags.define("network_gbits", 100.0, "network bandwidth of each GPU host, in Gbit/s")
    flags.define("host_images", 0.0, "images/s of a host's input pipeline; 0: no limit")
    flags.define("jitter", 0.0, "standard deviation of a device's step time, as a fraction of it")
    flags.define("slow_fraction", 0.0, "fraction of permanently slow devices")
    flags.define("slow_factor", 1.0, "step time of slow devices relative to the others'")
    flags.define("failure_hours", 0.0, "mean hours between failures of a device; 0: no failures")
    flags.define("restart_seconds", 300.0, "seconds from a failure until training resumes")
    flags.define("checkpoint_seconds", 0.0, "seconds for which a checkpoint pauses training")
    flags.define(
        "compiled",
        "",
        "compile.json of the same step, from imagenet-fast compile --output_dir, for its memory; "
        "empty: estimate the memory",
    )
    flags.define("compare", "", "a flag and values to compare, as chips=256,512,1024")
    flags.define(
        "output_dir",
        "",
        "directory for plan.txt, plan.json and plan.svg, with a folder for each compared value; "
        "empty: none",
    )
    flags.parse(arguments)
    name, values = _compared(flags["compare"])
    if not flags["accelerator"] and name != "accelerator":
        others = ", ".join(f"--{own}" for own in PLANS)
        raise UserError(
            f"choose what to plan: a run, by --accelerator=NAME and --chips=N, or one of {others}"
        )
    config = Config.from_changes(flags.changes())
    config = _with_images(config, "1,281,167 images")
    hardware = {flag: flags[flag] for flag in _HARDWARE}

    import_tensorflow()
    from imagenet_fast.lab.planning.compiled_memory import read_compiled_memory
    from imagenet_fast.lab.planning.cost_model.reliability import Conditions
    from imagenet_fast.lab.planning.run import Hardware, comparison, plan_run

    if flags["failure_hours"] < 0:
        raise UserError(f"failure_hours is {flags['failure_hours']:g}, but must not be negative")
    conditions = Conditions(
        jitter=flags["jitter"],
        slow_fraction=flags["slow_fraction"],
        slow_factor=flags["slow_factor"],
        hours_between_failures=flags["failure_hours"] or math.inf,
        restart_seconds=flags["restart_seconds"],
        checkpoint_seconds=flags["checkpoint_seconds"],
    )
    plans = []
    for value in values or (None,):
        changed, on = config, dict(hardware)
        if value is not None and name in hardware:
            on[name] = parse(name, type(hardware[name]), value)
        elif value is not None:
            changed = config.replace(**{name: parse_option(name, value)})
        chips = Hardware(**on, conditions=conditions)
        compiled = flags["compiled"]
        memory = read_compiled_memory(compiled, changed, chips) if compiled else None
        plans.append(plan_run(changed, chips, memory))
    print(comparison(plans, values) if values else plans[0].table())
    if flags["output_dir"]:
        places = [to_path(flags["output_dir"], f"{name}={value}") for value in values]
        for plan, place in zip(plans, places or [flags["output_dir"]]):
            _write(plan, place)


def _write(plan: Any, directory: str | os.PathLike[str]) -> None:
    """Writes a plan's files, if there is a directory, and prints their paths."""
    if directory:
        print(*write_results(directory, plan.files()), sep="\n")


def _compared(text: str) -> tuple[str, list[str]]:
    """Returns the flag to compare and its values; no values if there is nothing to compare.

    Raises:
      UserError: if the flag does not exist, or has no values.
    """
    if not text:
        return "", []
    name, _, values = text.partition("=")
    known = [*_HARDWARE, *option_names()]
    if name not in known:
        raise UserError(f"compare: there is no flag {name!r}{nearest(name, known)}")
    if not values:
        raise UserError(f"compare={text}: give values, as in --compare={name}=1,2")
    return name, values.split(",")


def _with_images(config: Config, of_imagenet: str) -> Config:
    """Returns the configuration, with synthetic images of ImageNet's size if it has no data."""
    if config.data_dir or config.synthetic:
        return config
    if config.data_on_device:
        raise UserError(
            "data_on_device needs data, because it is for small data sets: give --data_dir, or "
            "--nodata_on_device to plan for ImageNet"
        )
    if of_imagenet:
        print(f"No --data_dir: planned for ImageNet's {of_imagenet}.\n")
    return config.replace(synthetic=True, num_classes=config.num_classes or 1000)


def _schedule(arguments: list[str]) -> None:
    flags = CommandFlags("plan --schedule", option_names())
    flags.define("output_dir", "", "directory for schedule.csv and schedule.svg; empty: none")
    flags.parse(arguments)
    config = Config.from_changes(flags.changes())
    config.warn_of_unused_warmup(flags.given())
    config = _with_images(config, "1,281,167 images")

    import_tensorflow()
    from imagenet_fast.lab.planning.schedule import plan_schedule

    plan = plan_schedule(config)
    print(plan.table())
    _write(plan, flags["output_dir"])


def _pipeline(arguments: list[str]) -> None:
    flags = CommandFlags("plan --pipeline", option_names(), _PIPELINE_OPTIONS)
    flags.define(
        "costs",
        "flops",
        "block costs for balancing stages; flops: counted; measured: seconds on this machine's "
        "first GPU, or its CPU",
    )
    flags.define("device_memory_gb", 0.0, "memory limit of each device, in GiB; 0: none")
    flags.define(
        "output_dir", "", "directory for pipeline.csv, pipeline.json and pipeline.svg; empty: none"
    )
    flags.parse(arguments)
    costs, memory = flags["costs"], flags["device_memory_gb"]
    require_choice("costs", costs, ("flops", "measured"))
    if memory < 0:
        raise UserError(f"device_memory_gb is {memory:g}, but must not be negative")
    config = Config.from_changes(flags.changes())
    config = _with_images(config, "" if config.num_classes else "1,000 classes")

    import_tensorflow()
    from imagenet_fast.lab.planning.pipeline import plan_pipeline

    plan = plan_pipeline(config, costs, memory * 2**30 or math.inf)
    print(plan.table())
    _write(plan, flags["output_dir"])


def _validate(arguments: list[str]) -> None:
    flags = CommandFlags("plan --validate", ())
    flags.define(
        "output_dir",
        "",
        "directory for validation.txt, validation.json and validation.svg; empty: none",
    )
    flags.parse(arguments)

    import_tensorflow()
    from imagenet_fast.lab.planning.validation.predictions import validate

    validation = validate()
    print(validation.table())
    _write(validation, flags["output_dir"])


# The function and the help of each plan.
PLANS = {
    "schedule": (_schedule, "the learning rate from the first step to the last"),
    "validate": (_validate, "the cost model's predictions of published training times"),
    "pipeline": (_pipeline, "the stages of a pipeline, their memory and idle time"),
}


def _about() -> str:
    lines = [f"  --{name:10} {text}" for name, (_, text) in PLANS.items()]
    return "\n".join(
        [
            "Estimates a training run without running it. With --accelerator and --chips: the time",
            "of a step and of the whole run, and their bottlenecks. Other plans:",
            "",
            *lines,
            "",
            "imagenet-fast plan --NAME --help lists the flags of these.",
        ]
    )
