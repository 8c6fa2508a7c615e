"""``imagenet-fast predict``."""

from __future__ import annotations

import sys

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError
from imagenet_fast.base.notices import say
from imagenet_fast.commands.flags import CommandFlags
from imagenet_fast.distribute.quiet import import_tensorflow
from imagenet_fast.serving.answer_files import (
    check_arguments,
    output_path,
    write_answers,
    write_file_of_answers,
)


def main(arguments: list[str]) -> int:
    """Classifies images in files and folders; the status is 2 if one cannot be read."""
    flags = CommandFlags("predict")
    flags.define(
        "saved_model",
        "",
        "directory that `imagenet-fast export` wrote; it is a program, which this command runs: "
        "run one that you do not trust in a container without network",
    )
    flags.define("json", False, "print one JSON object per line")
    flags.define("csv", False, "print CSV: file, error, class1, probability1, class2, ...")
    flags.define("output", "", "new file, .csv or .jsonl, to write instead of printing")
    files = flags.parse(arguments, positional="FILE_OR_FOLDER")
    output = flags["output"]
    if sum(map(bool, (flags["json"], flags["csv"], output))) > 1:
        raise UserError("json, csv and output exclude each other: give one of them")

    check_arguments(flags["saved_model"], files)  # TensorFlow takes seconds to import.
    path = output_path(output) if output else None
    import_tensorflow()
    from imagenet_fast.serving.predict import files_in, predict

    files = list(files_in(files))  # their names are aligned
    answers = predict(flags["saved_model"], files)
    if path is not None:
        count, unreadable = write_file_of_answers(path, answers)
    else:
        form = "json" if flags["json"] else "csv" if flags["csv"] else "text"
        width = max(map(len, files), default=0)
        count, unreadable = write_answers(sys.stdout, answers, form, width)
    if path is not None or unreadable:
        written = f"{path}: " if path is not None else ""
        say(f"{written}{counted(count, 'file')}, {unreadable} unreadable")
    return 2 if unreadable else 0
