"""``imagenet-fast plan``."""

from __future__ import annotations

import math

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.config import Config, option_names
from imagenet_fast.errors import UserError


def main(arguments: list[str]) -> int:
    """Prints the plan that is asked for: a flag without a value, as ``--schedule``."""
    # Not among absl's flags: --schedule=cosine is an option of Config.
    asked = [name for name in PLANS if f"--{name}" in arguments]
    if not asked and (not arguments or {"--help", "-h", "--helpfull"} & set(arguments)):
        print(_help())
        return 0
    if len(asked) != 1:
        raise UserError(f"say what to plan: one of {', '.join(f'--{name}' for name in PLANS)}")
    plan, _ = PLANS[asked[0]]
    plan([argument for argument in arguments if argument != f"--{asked[0]}"])
    return 0


# What a pipeline depends on most.
_PIPELINE_OPTIONS = (
    *("data_dir", "num_classes", "image_size"),
    *("model", "normal_cells", "cell_filters"),
    *("batch_size", "accumulation_steps", "optimizer"),
    *("pipeline_stages", "pipeline_balance", "pipeline_schedule", "rematerialize", "precision"),
)


def _schedule(arguments: list[str]) -> None:
    flags = CommandFlags("plan --schedule", option_names())
    flags.define("output_dir", "", "where to write schedule.csv and schedule.svg; empty: nowhere")
    flags.parse(arguments)
    config = Config().replace(**flags.changes())
    if not config.data_dir and not config.synthetic:
        print("No --data_dir: planned for ImageNet's 1,281,167 images.\n")
        config = config.replace(synthetic=True, num_classes=config.num_classes or 1000)

    import_tensorflow()
    from imagenet_fast.training.schedule_plan import plan_schedule, write

    plan = plan_schedule(config)
    print(plan.table())
    if flags["output_dir"]:
        for path in write(plan, flags["output_dir"]):
            print(path)


def _pipeline(arguments: list[str]) -> None:
    flags = CommandFlags("plan --pipeline", option_names(), _PIPELINE_OPTIONS)
    flags.define(
        "costs",
        "flops",
        "by which stages are balanced; flops: counted; measured: seconds of each block on this "
        "machine's first GPU, or its CPU",
    )
    flags.define("device_memory_gb", 0.0, "GiB that each device has for what is listed; 0: enough")
    flags.define(
        "output_dir",
        "",
        "where to write pipeline.csv, pipeline.json and pipeline.svg; empty: nowhere",
    )
    flags.parse(arguments)
    costs, memory = flags["costs"], flags["device_memory_gb"]
    if costs not in ("flops", "measured"):
        raise UserError(f"costs={costs!r} does not exist; choose from flops, measured")
    if memory < 0:
        raise UserError(f"device_memory_gb is {memory:g}, but must not be negative")
    config = Config().replace(**flags.changes())
    if not config.data_dir and not config.num_classes:
        print("No --data_dir: planned for ImageNet's 1,000 classes.\n")
    if not config.data_dir:
        config = config.replace(synthetic=True, num_classes=config.num_classes or 1000)

    import_tensorflow()
    from imagenet_fast.training.pipeline_plan import plan_pipeline, write

    plan = plan_pipeline(config, costs, memory * 2**30 or math.inf)
    print(plan.table())
    if flags["output_dir"]:
        for path in write(plan, flags["output_dir"]):
            print(path)


def _validate(arguments: list[str]) -> None:
    flags = CommandFlags("plan --validate", ())
    flags.define(
        "output_dir",
        "",
        "where to write validation.txt, validation.json and validation.svg; empty: nowhere",
    )
    flags.parse(arguments)

    import_tensorflow()
    from imagenet_fast.training.validation import validate, write

    validation = validate()
    print(validation.table())
    if flags["output_dir"]:
        for path in write(validation, flags["output_dir"]):
            print(path)


# By name: what makes it, and what it tells.
PLANS = {
    "schedule": (_schedule, "the learning rate from the first step to the last"),
    "validate": (_validate, "what the cost model says of published training times"),
    "pipeline": (_pipeline, "the stages of a pipeline, their memory and how long they wait"),
}


def _help() -> str:
    lines = [f"  --{name:10} {text}" for name, (_, text) in PLANS.items()]
    return "\n".join(
        [
            "usage: imagenet-fast plan --NAME [--flagfile=FILE] [--flag=value ...]",
            "",
            "Tells what a training run would do, without doing it:",
            "",
            *lines,
            "",
            "imagenet-fast plan --NAME --help lists a plan's flags.",
        ]
    )
