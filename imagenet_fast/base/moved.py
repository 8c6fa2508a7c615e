"""Imports of modules that have moved fail with a line that names the new place."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec

# Folders and modules, relative to the package; a folder's modules moved with it.
MOVED = {
    "benchmarks": "lab.benchmarks",
    "cost_model": "lab.planning.cost_model",
    "planning": "lab.planning",
    "xla_compile": "lab.xla_compile",
    "pipeline_parallel.model": "pipeline_parallel.gpipe",
    "pipeline_parallel.looped": "pipeline_parallel.passes",
    "pipeline_parallel.unrolled": "pipeline_parallel.passes",
    "distribute.half_precision": "distribute.collectives",
    "distribute.ranks": "distribute.connect",
    "optimizers.roles": "optimizers",
    "optimizers.scaled_times": "flagfiles",
    "data.pipeline": "data.dataset",
    "data.size_ramp": "data.pixel_options",
    "data.sources": "data.prepare.sources",
    "data.prepare_journal": "data.prepare.journal",
    "data.prepare_plan": "data.prepare.plan",
    "data.data_page": "data.prepare.page",
    "data.data_page_figures": "data.prepare.page_figures",
    "data.jpeg_index": "data.jpeg.index",
    "data.resize_op": "data.jpeg.image_ops",
    "data.jpeg.resize_op": "data.jpeg.image_ops",
    "training.class_weights": "training.build.model",
    "training.build.class_weights": "training.build.model",
    "training.build_network": "training.build.network",
    "training.build_optimizer": "training.build.optimizer",
    "training.checkpoint": "training.checkpoints.checkpoint",
    "training.checkpoint_sizes": "training.checkpoints.sizes",
    "training.damaged_checkpoints": "training.checkpoints.damaged",
    "training.model_dir": "training.checkpoints.model_dir",
    "training.mlperf_log": "training.logs.mlperf",
    "training.evaluations": "training.logs.evaluations",
    "training.logs.loggers": "training.start",
    "training.run_config": "training.checkpoints.config_file",
    "training.run_summary": "training.first_line",
    "training.report.error_analysis": "training.step.error_analysis",
    **{
        f"{folder}.{name}": f"{folder}.{new}.{name}"
        for folder, new, names in (
            ("data", "augmentation", "augment auto_augment crop_boxes image_operations"),
            ("data", "augmentation", "stateless_random"),
            ("data", "prepare", "add_index baseline_jpegs beam_writer duplicates image_limit"),
            ("data", "prepare", "shard_maker shard_writer similar_hashes"),
            ("training", "build", "fine_tune fusion_trials saved_model schedule"),
            ("training", "build", "schedule_change whitening"),
            ("training", "logs", "clock keras_callbacks logger metrics_file profiler progress_bar"),
            ("training", "logs", "recorder tensorboard trackers"),
            ("training", "step", "classifier losses metric_sums micro_batches mix"),
            ("training", "step", "replicated_model selection training_step views"),
        )
        for name in names.split()
    },
}


class _Moved(importlib.abc.MetaPathFinder):
    """Asked last, for modules that nobody found."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package == self._package and module in MOVED:
            # With a name, `from package import module` would replace it by Python's own message.
            raise ModuleNotFoundError(
                f"{name} is {self._package}.{MOVED[module]} now: import it from there"
            )
        return None


def explain_moved_modules(package: str) -> None:
    """Makes imports of the package's moved modules name the new place."""
    sys.meta_path.append(_Moved(package))
