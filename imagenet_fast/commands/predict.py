"""``imagenet-fast predict``."""

from __future__ import annotations

import json

from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.serving.arguments import check_arguments


def main(arguments: list[str]) -> int:
    """Classifies image files; the status is 2 if one cannot be read."""
    flags = CommandFlags("predict")
    flags.define(
        "saved_model",
        "",
        "directory that `imagenet-fast export` wrote; it is a program, which this command runs: "
        "run one that you do not trust in a container without network",
    )
    flags.define("json", False, "print one JSON object per line")
    files = flags.parse(arguments, positional="FILE")

    check_arguments(flags["saved_model"], files)  # TensorFlow takes seconds to import.
    import_tensorflow()
    from imagenet_fast.serving.predict import predict

    failed = False
    width = max(map(len, files), default=0)
    for answer in predict(flags["saved_model"], files):
        failed |= "error" in answer
        if flags["json"]:
            print(json.dumps(answer))
        elif "error" in answer:
            print(f"{answer['file']:{width}}  error: {answer['error']}")
        else:
            classes = (f"{p['label']} {p['probability']:.1%}" for p in answer["predictions"])
            print(f"{answer['file']:{width}}  {', '.join(classes) or 'no class'}")
    return 2 if failed else 0
