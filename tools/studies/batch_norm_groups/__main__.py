"""A study of batch norm over groups of replicas, on Fashion-MNIST.

    python tools/studies/batch_norm_groups --data_dir=data/fashion_mnist --jobs=2

trains what the log lacks; when it was interrupted, the same command goes on. Then, or with --report
at once, it makes the table and the picture of docs/batch_norm_groups.md from the log.
"""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from study import command

from batch_norm_groups.experiments import EXPERIMENTS
from batch_norm_groups.report import write_report

if __name__ == "__main__":
    sys.exit(
        command.main(
            sys.argv[1:],
            name="batch_norm_groups",
            description=__doc__,
            experiments=EXPERIMENTS,
            training="study.training",
            report=write_report,
        )
    )
