"""How a run is split into calls of ``fit``."""

from imagenet_fast.training.segments import segments


def test_segments_cover_each_step_once():
    for total in range(26):
        for segment in range(1, max(total, 1) + 1):
            for start in range(total + 1):
                check_stretches(start, total, segment)


def check_stretches(start, total, segment):
    step, evaluations, calls = start, [], 0
    for initial_epoch, epochs, first_step, steps in segments(start, total, segment):
        assert first_step == step
        assert 0 <= initial_epoch < epochs
        assert initial_epoch == step // segment
        assert steps > 0
        for _ in range(initial_epoch, epochs):
            step += steps
            evaluations.append(step)
        calls += 1
    assert step == total
    # Evaluations are where an uninterrupted run has them.
    due = [at for at in range(1, total + 1) if at > start and (at % segment == 0 or at == total)]
    assert evaluations == due
    assert calls <= 3


def test_a_whole_run_is_one_call_of_fit():
    assert list(segments(0, 450, 5)) == [(0, 90, 0, 5)]
    assert list(segments(0, 25, 10)) == [(0, 2, 0, 10), (2, 3, 20, 5)]
    assert list(segments(3, 25, 10)) == [(0, 1, 3, 7), (1, 2, 10, 10), (2, 3, 20, 5)]
    assert list(segments(25, 25, 10)) == []


def test_calls_of_fit_end_where_the_data_changes():
    calls = list(segments(0, 30, 10, [4, 20, 40]))
    assert calls == [(0, 1, 0, 4), (0, 1, 4, 6), (1, 2, 10, 10), (2, 3, 20, 10)]
    assert list(segments(7, 30, 10, [4, 20])) == [(0, 1, 7, 3), (1, 2, 10, 10), (2, 3, 20, 10)]
