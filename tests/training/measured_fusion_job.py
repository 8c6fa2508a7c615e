"""Each of two workers builds a small model whose gradients are joined by measured times.

Argument: where to write ``W.json`` of each worker W: the segments that were found, and differences
to the same model without a search.
"""

import functools
import json
import pathlib
import sys

import numpy as np
from small_config import SMALL

from imagenet_fast import build_model, make_strategy
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.training import measured_fusion
from imagenet_fast.training.build import build_all_reduce

# With fusion_bytes as a search has them, since a process can have one strategy of workers only.
CONFIG = SMALL.replace(strategy="multi_worker", batch_size=32, fusion_bytes=0)


def main():
    out = pathlib.Path(sys.argv[1])
    strategy = make_strategy(CONFIG)
    worker = strategy.cluster_resolver.task_id
    plain, searched = build_model(CONFIG), build_model(CONFIG.replace(fusion="auto"))
    changed = [
        own.name
        for own, other in zip(plain.weights, searched.weights)
        if not np.array_equal(own.numpy(), other.numpy())
    ]
    with strategy.scope():
        times = measured_fusion.measure(
            plain, functools.partial(build_all_reduce, CONFIG, None), (16, 16, 16, 3)
        )
    # A worker's own file is not what counts.
    directory = out / f"run_{worker}"
    directory.mkdir()
    measured_fusion.keep(Fusion(0, (worker + 1, 7)), 2 + worker, str(directory))
    kept = measured_fusion.kept(strategy, str(directory))
    missing = measured_fusion.kept(strategy, str(out))
    found = {
        "segments": searched.all_reduce.fusion.segments,
        "bytes": searched.all_reduce.fusion.bytes,
        "changed": changed,
        "times": times._asdict(),
        "cuts": times.best(),
        "kept": kept.segments,
        "missing": missing,
    }
    (out / f"{worker}.json").write_text(json.dumps(found))
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
