"""What the cheaper ways to decode JPEGs do to accuracy, on Fashion-MNIST.

    python tools/studies/jpeg_decoding/jpegs.py --output_dir=data/fashion_jpegs
    python tools/studies/jpeg_decoding --data_dir=data/fashion_jpegs

trains what the log lacks; when it was interrupted, the same command goes on. Then, or with --report
at once, it makes the table of docs/input_pipeline.md and a picture from the log.
"""

from __future__ import annotations

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from study import command

from jpeg_decoding.experiments import EXPERIMENTS
from jpeg_decoding.report import write_report

if __name__ == "__main__":
    sys.exit(
        command.main(
            sys.argv[1:],
            name="jpeg_decoding",
            description=__doc__,
            experiments=EXPERIMENTS,
            training="jpeg_decoding.training",
            report=write_report,
        )
    )
