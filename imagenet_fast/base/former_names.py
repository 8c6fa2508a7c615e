"""Flags and options of earlier versions: those renamed, and those that are gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class _Removed(NamedTuple):
    """An option that is gone.

    Attributes:
      instead: what to do instead, to complete "... is gone: ...".
      same: the values in a run's ``config.json`` with which it trains on as before; empty: all.
    """

    instead: str
    same: tuple[Any, ...] = ()


RENAMED_FLAGS = {"slow_share": "slow_fraction", "look": "data_page"}
_REMOVED = {
    "warmup_kind": _Removed(
        "warmups are linear; knots of schedule=piecewise_linear can hold a learning rate",
        same=("gradual",),
    ),
    "batch_table": _Removed(
        "`imagenet-fast recipes --batch_table=NAME --batch_size=N` prints the flags to give"
    ),
    "identity_init": _Removed("airbench's networks always start as the identity"),
    "index_cached_jpegs": _Removed(
        "`imagenet-fast prepare --add_index` writes indexes into the shards", same=(False,)
    ),
}


def advice(name: str) -> str:
    """Returns what to do instead of a removed option, or of its ``noNAME``; empty: it is none."""
    removed = _REMOVED.get(name) or _REMOVED.get(name.removeprefix("no"))
    return removed.instead if removed else ""


def without_removed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Splits a run's options from those of them that are gone.

    Args:
      values: by name, as in ``config.json``.

    Returns:
      The other values; and a sentence on each removed option without which the run would have
      trained otherwise.
    """
    kept = {name: value for name, value in values.items() if name not in _REMOVED}
    missed = [
        f"{name}={json.dumps(values[name])} is gone: {removed.instead}"
        for name, removed in _REMOVED.items()
        if removed.same and name in values and values[name] not in removed.same
    ]
    return kept, missed
