"""``imagenet-fast plan``."""

from __future__ import annotations

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


# By name: what makes it, and what it tells.
PLANS = {
    "schedule": (_schedule, "the learning rate from the first step to the last"),
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
