"""``imagenet-fast train``."""

from __future__ import annotations

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.config import Config, option_names
from imagenet_fast.errors import UserError
from imagenet_fast.paths import to_path


def main(arguments: list[str]) -> int:
    """Trains, exports the model if asked to, and prints the result in a line."""
    flags = CommandFlags("train", option_names())
    flags.define(
        "saved_model",
        "",
        "directory to which the trained model is exported at the end, as `imagenet-fast export` "
        "does; it must not exist; empty: none",
    )
    flags.parse(arguments)
    config = Config().replace(**flags.changes())
    import_tensorflow()
    if flags["saved_model"] and to_path(flags["saved_model"]).exists():
        # Not found out when the run has ended.
        raise UserError(
            f"{flags['saved_model']} exists already; remove it, or leave out --saved_model"
        )

    from imagenet_fast.distribute.strategy import is_chief
    from imagenet_fast.serving.export import export
    from imagenet_fast.training.train import train

    summary = train(config)
    if is_chief():
        if flags["saved_model"]:
            export(config, flags["saved_model"])
        accuracy = "" if summary["top1"] is None else f"top-1 {summary['top1']:.2%}, "
        print(
            f"{accuracy}{summary['epochs']:.4g} epochs in {summary['train_seconds']:.1f} s of "
            f"training ({summary['wall_seconds']:.1f} s in all), "
            f"{summary['images_per_second']:.0f} images/s; {config.model_dir}/report.html"
        )
    return 0
