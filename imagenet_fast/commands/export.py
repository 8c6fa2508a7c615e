"""``imagenet-fast export``."""

from __future__ import annotations

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.errors import UserError


def main(arguments: list[str]) -> int:
    """Exports the latest checkpoint of a run."""
    flags = CommandFlags("export", ("model_dir", "eval_crop_fraction"))
    flags.define("saved_model", "", "directory to write; it must not exist")
    flags.define("top_k", 5, "classes in an answer")
    flags.parse(arguments)
    if not flags["saved_model"]:
        raise UserError("give --saved_model, the directory to write")
    if flags["top_k"] < 1:
        raise UserError(f"top_k is {flags['top_k']}, but must be positive")

    import_tensorflow()
    from imagenet_fast.serving.export import export
    from imagenet_fast.training.checkpoint import read_config

    config = read_config(flags["model_dir"]).replace(**flags.changes())
    print(export(config, flags["saved_model"], flags["top_k"]))
    return 0
