"""Splits a run into calls of ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def segments(
    step: int, total: int, segment: int, changes: Sequence[int] = ()
) -> Iterator[tuple[int, int, int, int]]:
    """Splits the rest of a run into calls of ``fit``, whose epochs are segments.

    One call usually suffices. A further one completes a segment in which the run resumes, or one
    that the end or a change cuts short.

    Args:
      step: steps done.
      total: steps of the run.
      segment: steps between two evaluations.
      changes: steps at which another data set begins.

    Yields:
      (initial_epoch, epochs, first step, steps_per_epoch) of each call.
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
