"""How a run is split into calls of ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def segments(
    step: int, total: int, segment: int, changes: Sequence[int] = ()
) -> Iterator[tuple[int, int, int, int]]:
    """Splits what is left of a run into calls of ``fit``, whose epochs are whole segments.

    Usually one call does. A run that resumes in the middle of a segment needs one more to end it,
    and one whose length is no multiple of it another for the rest; and the same at each of the
    steps ``changes``, at which the data set is another one.

    Yields:
      (initial_epoch, epochs, first step, steps_per_epoch) of a call.
    """
    while step < total:
        end = min(change for change in (*changes, total) if step < change <= total)
        epoch, done = divmod(step, segment)
        if done or end - step < segment:
            steps, epochs = min(segment - done, end - step), epoch + 1
        else:
            steps, epochs = segment, epoch + (end - step) // segment
        yield epoch, epochs, step, steps
        step += (epochs - epoch) * steps
