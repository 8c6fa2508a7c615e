"""A study of large batches on Fashion-MNIST, beside the papers' on ImageNet.

    python tools/studies/large_batch --data_dir=data/fashion_mnist --jobs=2

trains what the log lacks; when it was interrupted, the same command goes on. Then, or with --report
at once, it makes the tables and pictures of docs/large_batch.md from the log.
"""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from study import command

from large_batch.experiments import EXPERIMENTS
from large_batch.report import write_report

if __name__ == "__main__":
    sys.exit(
        command.main(
            sys.argv[1:],
            name="large_batch",
            description=__doc__,
            experiments=EXPERIMENTS,
            training="large_batch.training",
            report=write_report,
        )
    )
