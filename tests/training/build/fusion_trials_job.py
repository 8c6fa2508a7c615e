"""Each of two workers builds and trains a small model with ``fusion=auto``.

Argument: where to write ``W.json`` of each worker W. The timings of the workers contradict each
other: worker 0 finds the last candidate fastest, worker 1 the first.
"""

import json
import pathlib
import sys

import numpy as np
from small_config import SMALL
from small_network import small_network

from imagenet_fast import build_model, make_strategy, train
from imagenet_fast.distribute.exchange import wait_for_all
from imagenet_fast.distribute.fusion import Fusion
from imagenet_fast.training.build import fusion_trials

# So few bytes that the candidates differ. The strategies of both configurations must be the same.
CONFIG = SMALL.replace(
    strategy="multi_worker",
    batch_size=32,
    fusion="auto",
    fusion_bytes=200,
    duration="2 steps",
    eval_every="2 steps",
    examine=False,
    tensorboard=False,
)


def main():
    out = pathlib.Path(sys.argv[1])
    strategy = make_strategy(CONFIG)
    worker = strategy.cluster_resolver.task_id
    timed = []
    median_seconds = fusion_trials._median_seconds

    def contradicting_seconds(steps):
        timed.append(median_seconds(steps))
        return [float(-n if worker == 0 else n) for n in range(len(steps))]

    fusion_trials._median_seconds = contradicting_seconds
    plain = build_model(CONFIG.replace(fusion="fixed", fusion_bytes=0), model=small_network)
    chosen = build_model(CONFIG, model=small_network)
    changed = [
        own.name
        for own, other in zip(plain.weights, chosen.weights)
        if not np.array_equal(own.numpy(), other.numpy())
    ]
    run = CONFIG.replace(model_dir=str(out / "run"))
    train(run, model=small_network)
    trials = len(timed)
    train(run, model=small_network)  # Nothing is left to train, and nothing is timed again.
    directory = out / f"run_{worker}"
    directory.mkdir()
    fusion_trials.save_fusion(Fusion(0, (worker + 1, 7)), 2 + worker, str(directory))
    loaded = fusion_trials.load_fusion(strategy, str(directory))
    results = {
        "segments": chosen.all_reduce.fusion.segments,
        "bytes": chosen.all_reduce.fusion.bytes,
        "changed": changed,
        "seconds": timed[0],
        "trials": [trials, len(timed)],
        "loaded": loaded.segments,
        "missing": fusion_trials.load_fusion(strategy, str(out)),
    }
    (out / f"{worker}.json").write_text(json.dumps(results))
    wait_for_all(strategy)


if __name__ == "__main__":
    main()
