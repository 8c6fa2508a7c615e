"""``imagenet-fast evaluate``."""

from __future__ import annotations

import json

from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow

_OPTIONS = (
    "model_dir",
    "data_dir",
    "data_threads",
    "shard_by",
    "eval_batch_size",
    "eval_crop_fraction",
    "max_pixels",
    "precision",
    "strategy",
    "tpu",
    "gpus",
    "logical_cpus",
    "pipeline_stages",
    "pipeline_servers",
    "pipeline_balance",
)

_SPLITS = ("validation", "test")


def main(arguments: list[str]) -> int:
    """Evaluates the latest checkpoint of a run and prints a table or JSON."""
    flags = CommandFlags("evaluate", _OPTIONS, of_run=True)
    flags.define("split", "validation", "images to evaluate on: validation or test")
    flags.define("json", False, "print JSON")
    flags.parse(arguments)
    if flags["split"] not in _SPLITS:
        raise UserError(
            f"split is {flags['split']!r}, but must be validation or test"
            f"{nearest(flags['split'], _SPLITS)}"
        )

    import_tensorflow()
    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.distribute.workers import is_chief
    from imagenet_fast.training.evaluate import evaluate
    from imagenet_fast.training.model_dir import read_config

    # Evaluation does not use the first two, which may contradict flags; and it may run on another
    # machine than training did.
    here = {"loss_scale": 0.0, "xla": False, "strategy": "auto"}
    here |= {"tpu": "", "gpus": "", "logical_cpus": 0}
    config = read_config(flags["model_dir"]).replace(**{**here, **flags.changes()})
    result = evaluate(config, flags["split"])
    if not is_chief(make_strategy(config)):
        return 0
    if flags["json"]:
        print(json.dumps(result))
        return 0
    print(f"checkpoint  {result['checkpoint']}")
    print(f"top-1       {result['top1']:.2%}")
    print(f"top-5       {result['top5']:.2%}")
    print(f"loss        {result['loss']:.4f}")
    print(f"images      {result['examples']:.0f}")
    if result["skipped"]:
        print(f"unreadable  {result['skipped']:.0f}")
    return 0
