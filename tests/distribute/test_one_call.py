"""What is done to all replicas' variables is one call of TensorFlow's, however many these are.

Stands in for a TPU slice, on which each operation outside of functions is a message to the host of
its device. That ``TPUStrategy`` would make one for each replica and variable is decided by
``TPUExtended._update`` (tpu_strategy.py: a loop over ``packed_var.devices``, to which
``TPUOnWritePolicy.assign`` of tpu_values.py comes by ``DistributedVariable._update_cross_replica``
of values.py) and by ``values_util.assign_on_each_device``, ``get_on_write_restore_ops`` and
``get_on_read_restore_ops``. ``MirroredStrategy``, which can run here, has the same loops
(``MirroredExtended._update``, mirrored_strategy.py) and the same three functions.
"""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from imagenet_fast.distribute.one_call import assign_everywhere

JOB = pathlib.Path(__file__).with_name("one_call_job.py")


def counts(run_python, *arguments):
    """{action: {(replicas, blocks): {what: how many}}}."""
    found = {}
    for line in run_python([JOB, *arguments]).stdout.splitlines():
        row = json.loads(line)
        place = row.pop("replicas"), row.pop("blocks")
        found.setdefault(row.pop("action"), {})[place] = row
    return found


@pytest.mark.long
def test_as_many_calls_for_more_replicas_and_more_variables(run_python):
    """Swapping, averaging, restarting, evaluation, saving and resuming."""
    found = counts(run_python, 2, 3)
    assert len(found) == 9
    for action, rows in found.items():
        operations = {place: row["operations"] for place, row in rows.items()}
        assert operations[2, 1] == operations[3, 1], (action, operations)
        if action not in ("save a checkpoint", "resume"):  # which name each variable to the file
            assert operations[2, 1] == operations[2, 3], (action, operations)
        assert {row["assignments"] for row in rows.values()} <= {0, 1}, action  # 1: save_counter
    # TensorFlow's iterators: 6 for each replica, whatever the variables.
    iterator = {place: row["iterator"] for place, row in found["evaluate"].items()}
    assert iterator[3, 1] - iterator[2, 1] == 6
    assert iterator[2, 3] == iterator[2, 1]


@pytest.mark.long
def test_a_swap_by_replica_is_seen(run_python):
    rows = counts(run_python, 2, "--by_replica")["evaluate"]
    assert rows[2, 1]["assignments"] > 50
    assert rows[2, 3]["assignments"] > 2 * rows[2, 1]["assignments"]


def test_values_of_another_shape():
    variable = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="are incompatible"):
        assign_everywhere([variable], [[1.0]])
    np.testing.assert_array_equal(variable, [1.0, 2.0])
