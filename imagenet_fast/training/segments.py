"""Where a run has been: the devices that trained it, from which step on, in ``segments.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, TypedDict

import msgspec

from imagenet_fast.base.counted import counted
from imagenet_fast.base.files import read_objects, write_file
from imagenet_fast.base.option import option_text
from imagenet_fast.base.outside import Count
from imagenet_fast.base.paths import to_path
from imagenet_fast.config import Config
from imagenet_fast.training.logs.logger import Row

FILE = "segments.jsonl"
_Devices = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
_TYPES = {"step": Count, "devices": _Devices, "runs_on": str, "began": str}
# What may change when a run resumes, and does not only choose the devices.
_ROUNDING = (
    *("xla", "all_reduce", "all_reduce_group", "fusion", "fusion_bytes", "fusion_segments"),
    *("all_reduce_dtype", "precision", "pipeline_stages", "deterministic", "accumulation_steps"),
)
_PRECISION = ("all_reduce_dtype", "precision")
# With these, TensorFlow draws other random numbers from the same seeds.
_DRAWS = ("xla", "pipeline_stages")


class Segment(TypedDict):
    """A part of a run on the same devices.

    Attributes:
      step: before its first step.
      devices: that carry the run's replicas.
      runs_on: these in words.
      began: the time, in UTC.
    """

    step: int
    devices: int
    runs_on: str
    began: str


class Passed(Segment):
    """A segment with what became of it.

    Attributes:
      until: its last step that counts; a later segment may have repeated others.
      images_per_second: in training; 0: unknown.
    """

    until: int
    images_per_second: float


def read_segments(model_dir: str) -> list[Segment]:
    """Returns the segments of a run, in order; none of runs of earlier versions."""
    found = read_objects(to_path(model_dir, FILE), _TYPES)
    return [Segment(**{name: one[name] for name in _TYPES}) for one in found]  # type: ignore[typeddict-item]


def add_segment(model_dir: str, segment: Segment) -> None:
    """Adds a segment; those that reached no further step than its first are dropped."""
    kept = [one for one in read_segments(model_dir) if one["step"] < segment["step"]]
    text = "".join(f"{json.dumps(one)}\n" for one in (*kept, segment))
    write_file(to_path(model_dir, FILE), text)


def passed_segments(segments: Sequence[Segment], rows: Sequence[Row], step: int) -> list[Passed]:
    """Returns the segments of a run up to a step, with their speed."""
    ends = [*(one["step"] for one in segments[1:]), step]
    passed = []
    for segment, until in zip(segments, ends):
        images = seconds = 0.0
        for row in rows:
            speed = row.get("images_per_second")
            if row["kind"] == "train" and segment["step"] < row["step"] <= until and speed:
                images += row["examples"]
                seconds += row["examples"] / speed
        speed = images / seconds if seconds else 0.0
        passed.append(Passed(**segment, until=until, images_per_second=speed))
    return passed


def lines_of(passed: Sequence[Passed]) -> list[tuple[str, str, str, str]]:
    """Returns each segment's steps, images/s, beginning and devices, as text."""
    return [
        (
            f"{one['step'] + 1:,} to {one['until']:,}" if one["until"] > one["step"] else "none",
            f"{one['images_per_second']:,.0f}" if one["images_per_second"] else "-",
            one["began"][:16].replace("T", " "),
            one["runs_on"],
        )
        for one in passed
    ]


def change_of_hardware(
    config: Config, earlier: Config, last: Segment | None, here: Segment, draws: bool = False
) -> str:
    """Returns what is not as before where a run resumes, to complete "resumes ..."; empty: nothing.

    Args:
      config: of the run, with its replicas.
      earlier: of the run until now.
      last: the segment before; None: it is not known.
      here: the one that begins.
      draws: whether layers of the network draw random numbers.
    """
    (replicas, _), parts = config.replicas, []
    if last is not None and last["runs_on"] != here["runs_on"]:
        today, before = (
            f"{replicas // one['devices']} on {'each of ' * (one['devices'] > 1)}{one['runs_on']}"
            for one in (here, last)
        )
        parts.append(f"on other devices: {counted(replicas, 'replica')}, {today}; before {before}")
    changed = [name for name in _ROUNDING if getattr(config, name) != getattr(earlier, name)]
    if changed:
        parts.append(
            "with "
            + ", ".join(
                f"{name}={option_text(getattr(config, name))} instead of "
                f"{option_text(getattr(earlier, name))}"
                for name in changed
            )
        )
    if not parts:
        return ""
    if set(changed) & set(_PRECISION):
        then = "WARNING: in another precision than until now, so that the end may be another"
    elif draws and set(changed) & set(_DRAWS):
        then = "the same training, up to the order of sums and the random numbers of its layers"
    else:
        then = "the same training, up to the order of sums"
    return f"{'; '.join(parts)}; {then}"
