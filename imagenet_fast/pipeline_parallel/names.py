"""Names that options may have; importing it does not start TensorFlow."""

REMATERIALIZE = ("always", "except_last", "never")
PIPELINE_SCHEDULES = ("unrolled", "while", "1f1b")
