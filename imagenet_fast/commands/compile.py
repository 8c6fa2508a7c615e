"""``imagenet-fast compile``."""

from __future__ import annotations

from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import check_results
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names
from imagenet_fast.distribute.quiet import import_tensorflow

# The options that affect a step most, for --help.
_MAIN_OPTIONS = (
    *("data_dir", "num_classes", "image_size"),
    *("model", "batch_norm_batch_size", "batch_size", "accumulation_steps", "optimizer"),
    *("all_reduce", "all_reduce_dtype", "precision"),
)


def main(arguments: list[str]) -> int:
    """Compiles a training step for TPUs or GPUs that this machine lacks, and prints a report."""
    flags = CommandFlags("compile", option_names(), _MAIN_OPTIONS)
    flags.define(
        "topology",
        "v3:2x2",
        "TPU type and chips along each axis, as v3:2x2; or GPU type, hosts and GPUs per host, as "
        "h100:4x8",
    )
    flags.define(
        "find_batch", False, "for GPUs: find the largest batch that fits, starting at --batch_size"
    )
    flags.define(
        "run_on_cpu",
        0,
        "training steps to run on this machine with one virtual device per replica, and to compare "
        "with one device's; for small networks and images; 0: none",
    )
    flags.define("output_dir", "", "directory for compile.json and compile.txt; empty: none")
    flags.parse(arguments)
    if flags["find_batch"] and flags["run_on_cpu"]:
        raise UserError("find_batch and run_on_cpu exclude each other: drop one of them")
    if flags["run_on_cpu"] < 0:
        raise UserError(f"run_on_cpu is {flags['run_on_cpu']}, but must not be negative")
    config = Config.from_changes(flags.changes())
    if flags["output_dir"]:
        check_results(flags["output_dir"])
    if not config.data_dir and not config.num_classes:
        print("No --data_dir: compiled for ImageNet's 1,000 classes.\n")

    import_tensorflow()
    from imagenet_fast.lab.xla_compile.recipe import compile_recipe
    from imagenet_fast.lab.xla_compile.report import table, write

    found = compile_recipe(config, flags["topology"], flags["run_on_cpu"], flags["find_batch"])
    print(table(found))
    if flags["output_dir"]:
        print(*write(found, flags["output_dir"]), sep="\n")
    if found.failure:
        raise UserError(found.failure)
    return 0
