"""The base class of what follows a run."""

from __future__ import annotations

from typing import Any

# A row of ``metrics.jsonl``; ``Recorder`` (recorder.py) lists its values.
Row = dict[str, Any]


class Logger:
    """Is called at the events of a run; these methods do nothing.

    Steps are weight updates since the beginning of the run. Several are taken in a call: a logger
    that wants to be called at a certain step makes it an event of the run's loop.
    """

    def before_images(self) -> None:
        """The model is made, and no image has been read for training."""

    def before_training(self) -> None:
        """The first step of this process comes next; not called if nothing is left to train."""

    def before_steps(self, step: int) -> None:
        """The next call begins after ``step`` steps."""

    def after_steps(self, step: int) -> None:
        """A call has ended, and its steps are done."""

    def before_evaluation(self, step: int) -> None:
        """An evaluation begins."""

    def before_evaluation_steps(self, step: int) -> None:
        """The next call of an evaluation begins after ``step`` of its steps."""

    def after_evaluation_steps(self, step: int) -> None:
        """A call of an evaluation has ended, and ``step`` of its steps are done."""

    def after_evaluation(self) -> None:
        """An evaluation has ended; its row comes next."""

    def write(self, row: Row) -> None:
        """There is a row of ``metrics.jsonl``: ``kind`` is ``train`` or ``validation``."""

    def after_epoch(self) -> None:
        """The steps between two evaluations have ended, and the evaluation, if there is one."""

    def after_training(self) -> None:
        """The last step of this process is done and saved; not called after an error."""

    def finish(self, success: bool) -> None:
        """The run ends without an error; ``success``: at its target, or at its last step."""

    def flush(self) -> None:
        """A checkpoint is about to be saved: a run that resumes from it keeps what was written."""

    def close(self) -> None:
        """The run ends, perhaps by an error."""
