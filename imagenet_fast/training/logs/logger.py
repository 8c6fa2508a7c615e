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

    def flush(self) -> None:
        """A checkpoint is about to be saved: a run that resumes from it keeps what was written."""

    def close(self) -> None:
        """The run ends, perhaps by an error."""
