"""``imagenet-fast train``."""

from __future__ import annotations

from collections.abc import Collection

from imagenet_fast.base.durations import Duration
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.files import new_path
from imagenet_fast.base.notices import say
from imagenet_fast.base.option import option_text
from imagenet_fast.base.paths import to_path
from imagenet_fast.base.worker_process import module_command
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.config import Config, option_names, run_in
from imagenet_fast.distribute.cluster import Cluster
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.models.options import MODEL_NAMES
from imagenet_fast.training.checkpoints.config_file import as_begun
from imagenet_fast.training.compile_cache import cache_flags
from imagenet_fast.training.options import metric_text

_MOST_MINUTES = 60 * 24 * 7
# The options that most runs without a recipe set, for --help.
_MAIN_OPTIONS = (
    *("data_dir", "synthetic", "image_size", "cache"),
    *("model", "initial_weights", "freeze_through"),
    *("batch_size", "accumulation_steps", "duration", "optimizer", "weight_decay"),
    *("label_smoothing", "seed"),
    *("learning_rate", "learning_rate_batch", "rate_scaling", "warmup", "schedule", "decay_at"),
    *("strategy", "precision", "xla"),
    *("model_dir", "eval_every", "checkpoint_every", "stop_at_accuracy", "early_stopping"),
)


def main(arguments: list[str]) -> int:
    """Trains, exports the model if requested, and prints the result in a line."""
    flags = CommandFlags("train", option_names(), _MAIN_OPTIONS)
    flags.define(
        "saved_model",
        "",
        "new directory to which the trained model is exported, as by `imagenet-fast export`, with "
        "keep_best that of the best evaluation; empty: none",
    )
    flags.define(
        "wait_for_hardware",
        "",
        "minutes to wait for workers that are not there, at the start or because their machine was "
        "lost, before training without them; they are taken back at the next checkpoint. model_dir "
        "must be one that all workers see. Empty: all workers are needed",
    )
    flags.parse(arguments)
    wait = _minutes(flags["wait_for_hardware"])
    config = Config.from_changes(flags.changes(run_in(flags["model_dir"])))
    # Checked here, too, because TensorFlow takes seconds to import.
    if not config.model_dir:
        raise UserError("no directory for the results: give --model_dir")
    if flags["saved_model"]:
        # Before training, not at its end.
        if to_path(flags["saved_model"]).absolute() == to_path(config.model_dir).absolute():
            raise UserError("saved_model must be another directory than model_dir, the run's")
        new_path(flags["saved_model"], "leave out --saved_model")
    config.warn_of_unused_warmup(flags.given())
    config = as_begun(config)
    _say_of_default_batch_norms(config, flags.given())
    if wait is not None:
        cluster = Cluster.from_environment()
        if cluster is not None and len(cluster.workers) > 1:
            return _supervise(cluster, config.model_dir, wait, arguments)
        say("--wait_for_hardware has no effect: the run has one process")
    import_tensorflow(cache_flags(config))

    from imagenet_fast.distribute.strategy import make_strategy
    from imagenet_fast.distribute.workers import is_chief
    from imagenet_fast.serving.export import export
    from imagenet_fast.training.checkpoints.model_dir import checkpoint_of, kept_step
    from imagenet_fast.training.train import train

    try:
        summary = train(config)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_how_to_resume(config)) from None
    if is_chief(make_strategy(config)):
        if flags["saved_model"]:
            best = config.keep_best and kept_step(config.model_dir) is not None
            which = "best" if best else "last"
            path = checkpoint_of(config.model_dir, which)
            say(f"exporting {path} to {flags['saved_model']}")
            print(export(config, flags["saved_model"], checkpoint=which))
        length = Duration(float(f"{summary['epochs']:.4g}"), "epochs")
        main = "map" if "map" in summary else "top1"
        accuracy = "" if summary[main] is None else f"{metric_text(summary, main)}, "
        print(
            f"{accuracy}{length} in {summary['train_seconds']:.1f} s of "
            f"training ({summary['wall_seconds']:.1f} s in all), "
            f"{summary['images_per_second']:.0f} images/s; {config.model_dir}/report.html"
        )
    return 0


def _minutes(text: str) -> float | None:
    """Returns the value of ``--wait_for_hardware``; None: none.

    Raises:
      UserError: if it is no number of minutes.
    """
    if not text:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes <= _MOST_MINUTES:
        raise UserError(
            f"wait_for_hardware={text} must be a number of minutes, at most {_MOST_MINUTES:,}"
        )
    return minutes


def _supervise(cluster: Cluster, model_dir: str, minutes: float, arguments: list[str]) -> int:
    """Trains in a process that is started again with the workers that are left; its status."""
    from imagenet_fast.distribute.supervisor import Patience, Supervisor
    from imagenet_fast.training.checkpoints.model_dir import CHECKPOINTS, recorded_step

    checkpoints = to_path(model_dir, CHECKPOINTS)

    def newest_step() -> int:
        step = recorded_step(checkpoints)
        return -1 if step is None else step

    command = [*module_command("imagenet_fast"), "train", *arguments, "--wait_for_hardware="]
    folder = to_path(model_dir, "workers")
    return Supervisor(cluster, folder, command, newest_step, Patience(60 * minutes)).run()


def _say_of_default_batch_norms(config: Config, given: Collection[str]) -> None:
    """Says if an option is given that cannot change a network which is not this package's."""
    for name in ("batch_norm_momentum", "batch_norm_epsilon"):
        value = getattr(config, name)
        if name in given and value == getattr(Config, name) and config.model not in MODEL_NAMES:
            say(
                f"--{name}={value:g} is the default, with which the layers of {config.model} keep "
                f"their own; --{name}={value * 1.001:.6g} sets it"
            )


def _how_to_resume(config: Config) -> str:
    """Returns what the message of an interrupted run says of its checkpoints."""
    from imagenet_fast.training.checkpoints.model_dir import CHECKPOINTS, latest_checkpoint

    last = latest_checkpoint(to_path(config.model_dir, CHECKPOINTS))
    if last is None:
        every = option_text(config.checkpoint_every)
        return f" before the first checkpoint (checkpoint_every={every}); start again"
    return f"; resume from the last checkpoint, {last},"
