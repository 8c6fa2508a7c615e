"""What a study trains: experiments, made of settings, each to be run with several seeds."""

from __future__ import annotations

import dataclasses
import hashlib

from imagenet_fast.config import Config

PLAIN = "plain"
# Of each setting, unless the command says otherwise.
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell of a table.

    Attributes:
      method: what is compared, as a table calls it: its column.
      config: of its run; the seed is still to be set, and the places of data and results.
      kind: how it is trained: a name that the study's module for training knows.
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
        """A name for all that determines the result, but for the seed, the data and versions.

        Settings of several experiments that are the same training have the same.
        """
        options = {
            name: str(getattr(self.config, name))
            for name in sorted(self.config.differences(Config(), free=False))
        }
        return hashlib.sha256(f"{self.kind} {options}".encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings that are compared: a table.

    Attributes:
      name: for ``--only`` and the mark of its table.
      settings: in the order of the table.
    """

    name: str
    settings: tuple[Setting, ...]
