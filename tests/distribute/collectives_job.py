"""Each of four workers sums and exchanges with some of the others.

Arguments: the path of a JSON file without its end; each worker writes one.
"""

import json
import pathlib
import sys

import tensorflow as tf

from imagenet_fast import Config, make_strategy
from imagenet_fast.distribute.collectives import Communicator, this_replica
from imagenet_fast.distribute.groups import columns, consecutive

STREAMS = ["first", "second", "third"]


def own_part():
    """Streams are used in different orders, which must not matter."""
    replica = this_replica()
    rows = consecutive(4, 2)
    own, row, column, alone = (
        Communicator(members, replica, timeout_seconds=60)
        for members in (range(4), rows.of(replica), columns(rows).of(replica), [replica])
    )
    value = tf.constant([0.0, 1.0, 2.0, 3.0]) + 10.0 * replica
    results = {}
    for stream in STREAMS if replica % 2 else STREAMS[::-1]:
        results[stream] = own.all_reduce(value, stream)
    for name, group in (("row", row), ("column", column), ("alone", alone)):
        results[f"{name}_sum"] = group.all_reduce(value, name)
        results[f"{name}_part"] = group.reduce_scatter(value, name)
        results[f"{name}_all"] = group.all_gather(value, name)
        results[f"{name}_first"] = group.broadcast(value, name)
    results["bfloat16"] = tf.cast(row.all_reduce(tf.cast(value, tf.bfloat16), "row"), tf.float32)
    results["replica"] = tf.constant(replica)
    return results


def main():
    strategy = make_strategy(Config(strategy="multi_worker", batch_size=4))
    run = tf.function(lambda: strategy.run(own_part), autograph=False)
    run()
    results = {name: tensor.numpy().tolist() for name, tensor in run().items()}
    pathlib.Path(f"{sys.argv[1]}{results['replica']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
