"""``imagenet-fast train``."""

from __future__ import annotations

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.commands.quiet import import_tensorflow
from imagenet_fast.config import Config, option_names


def main(arguments: list[str]) -> int:
    """Trains, and prints the result in a line."""
    flags = CommandFlags("train", option_names())
    flags.parse(arguments)
    config = Config().replace(**flags.changes())

    import_tensorflow()
    from imagenet_fast.distribute.strategy import is_chief
    from imagenet_fast.training.train import train

    summary = train(config)
    if is_chief():
        accuracy = "" if summary["top1"] is None else f"top-1 {summary['top1']:.2%}, "
        print(
            f"{accuracy}{summary['epochs']:.4g} epochs in {summary['train_seconds']:.1f} s of "
            f"training ({summary['wall_seconds']:.1f} s in all), "
            f"{summary['images_per_second']:.0f} images/s; {config.model_dir}/report.html"
        )
    return 0
