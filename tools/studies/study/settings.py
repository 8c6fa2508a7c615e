"""Experiments of a study: settings that are each trained with several seeds."""

from __future__ import annotations

import dataclasses
import hashlib

from imagenet_fast.config import Config

PLAIN = "plain"
# The default number of runs of each setting.
SEEDS = 3
# They do not change the weights of a run, but its times and what is measured of it.
_EVALUATION = {
    *("checkpoint_every", "eval_every", "eval_image_size"),
    *("test_time_augmentation", "tta_fraction"),
}
# These, which may change when a run resumes, too.
_HARDWARE = {
    *("strategy", "logical_cpus", "precision", "xla", "deterministic"),
    *("fusion", "fusion_bytes", "fusion_segments"),
    *("all_reduce", "all_reduce_group", "all_reduce_dtype"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell of a table.

    Attributes:
      method: the column of the table.
      config: of the run, without seed and directories.
      kind: a way to train that the study's training module defines.
    """

    method: str
    config: Config
    kind: str = PLAIN

    @property
    def batch(self) -> int:
        """Images in a weight update."""
        return self.config.batch_size

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the result except seed, data and versions.

        Equal settings of several experiments have the same fingerprint, and are trained once.
        """
        changed = {*self.config.differences(Config(), all_options=False)}
        changed |= (_EVALUATION | _HARDWARE) & {*self.config.differences(Config())}
        options = {name: str(getattr(self.config, name)) for name in sorted(changed)}
        return hashlib.sha256(f"{self.kind} {options}".encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings that are compared in one table.

    Attributes:
      name: in ``--only`` and in the marks of its table.
      settings: in the order of the table.
    """

    name: str
    settings: tuple[Setting, ...]
