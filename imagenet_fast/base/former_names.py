"""Flags and options of earlier versions: those renamed, replaced by others, or gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from imagenet_fast.base.notices import warn_once

# The texts of options, by name.
_Texts = Mapping[str, str]
_SWITCH_TEXTS = (("", "true"), ("no", "false"))


class _Removed(NamedTuple):
    """An option that is gone.

    Attributes:
      instead: what to do instead, to complete "... is gone: ...".
      same: the values in a run's ``config.json`` with which it trains on as before; empty: all.
    """

    instead: str
    same: tuple[Any, ...] = ()


class _Replaced(NamedTuple):
    """Options whose meaning others have today.

    Attributes:
      defaults: the values in a run's ``config.json`` if they were not given, by name.
      instead: what to do instead, to complete "... is gone: ...".
      today: returns the options to give today, from all options given at the same place; None:
        not without options of another place.
      unless: other options, in whose presence those of today do not train the same.
    """

    defaults: Mapping[str, Any]
    instead: str
    today: Callable[[_Texts], dict[str, str] | None]
    unless: tuple[str, ...] = ()

    def is_exact(self, given: _Texts) -> bool:
        """Whether today's options train the same, beside the options given at the same place."""
        return all(given.get(name, "0") in ("0", "0.0") for name in self.unless)


RENAMED_FLAGS = {"slow_share": "slow_fraction", "look": "data_page"}
_AS_BY_PILLOW = "leave it out, JPEGs are always decoded as by Pillow"
_REMOVED = {
    "warmup_kind": _Removed(
        "warmups are linear; knots of schedule=piecewise_linear can hold a learning rate",
        same=("gradual",),
    ),
    "batch_table": _Removed(
        "`imagenet-fast recipes --batch_table=NAME --batch_size=N` prints the flags to give"
    ),
    "identity_init": _Removed("airbench's networks always start as the identity"),
    "jpeg_dct": _Removed(_AS_BY_PILLOW, same=("accurate",)),
    "jpeg_scaling": _Removed(
        f"{_AS_BY_PILLOW}; `imagenet-fast prepare --max_side` makes large images smaller",
        same=(False,),
    ),
    "jpeg_upsampling": _Removed(_AS_BY_PILLOW, same=("smooth",)),
    "index_cached_jpegs": _Removed(
        "`imagenet-fast prepare --add_index` writes indexes into the shards", same=(False,)
    ),
}


def _optimizer_epsilon(given: _Texts) -> dict[str, str]:
    of_lars = given.get("optimizer", "lars") == "lars"
    return {"optimizer_epsilon": given["lars_epsilon"]} if of_lars else {}


def _activation(given: _Texts) -> dict[str, str]:
    of_airbench = given.get("model", "airbench").startswith("airbench")
    return {"activation": given["group_activation"]} if of_airbench else {}


def _rand_augment(given: _Texts) -> dict[str, str] | None:
    if "rand_augment_layers" not in given:
        return None
    layers, magnitude = given["rand_augment_layers"], given.get("rand_augment_magnitude", "10")
    return {"rand_augment": "" if layers == "0" else f"{layers},{magnitude}"}


def _raw_pixels(given: _Texts) -> dict[str, str]:
    is_raw = given["normalize_pixels"].lower() in ("false", "0", "f")
    return {"pixel_mean": "0,0,0", "pixel_std": "1,1,1"} if is_raw else {}


_REPLACED = (
    _Replaced({"lars_epsilon": 0.0}, "it is optimizer_epsilon", _optimizer_epsilon),
    _Replaced({"group_activation": "gelu"}, "it is activation", _activation),
    _Replaced(
        {"rand_augment_layers": 0, "rand_augment_magnitude": 10.0},
        "give both as rand_augment, as 2,9",
        _rand_augment,
    ),
    _Replaced(
        {"normalize_pixels": True},
        "pixel_mean=0,0,0 and pixel_std=1,1,1 leave pixels as they are; cutout and random_erasing "
        "then fill with black, and brightness and contrast are of pixels in 0..255",
        _raw_pixels,
        unless=("cutout", "random_erasing", "brightness", "contrast"),
    ),
    _Replaced(
        {"on_damaged_checkpoint": "previous"},
        "a run always resumes from the newest checkpoint that is not damaged",
        lambda given: {},
    ),
)


def advice(name: str) -> str:
    """Returns what to do instead of a former option, or of its ``noNAME``; empty: it is none."""
    texts = {name: removed.instead for name, removed in _REMOVED.items()}
    texts |= {name: former.instead for former in _REPLACED for name in former.defaults}
    return texts.get(name) or texts.get(name.removeprefix("no")) or ""


def with_todays_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a run's options without former ones, replaced by those that mean the same today.

    Warns of each that was given and is replaced.

    Args:
      values: by name, as in ``config.json``.

    Returns:
      The values, as there or as text; and a sentence on each former option without which the run
      would have trained otherwise.
    """
    kept = {name: value for name, value in values.items() if name not in _REMOVED}
    missed = [
        _gone(name, values[name], removed.instead)
        for name, removed in _REMOVED.items()
        if removed.same and name in values and values[name] not in removed.same
    ]
    texts = {name: json.dumps(value).strip('"') for name, value in values.items()}
    for former in _REPLACED:
        own = [name for name in former.defaults if name in values]
        for name in own:
            del kept[name]
        today = former.today(texts) if own else None
        kept.update(today or {})
        given = [name for name in own if values[name] != former.defaults[name]]
        if given and today is not None and former.is_exact(texts):
            warn_once(f"this run's {_renewed({name: texts[name] for name in own}, today)}")
        elif given:
            missed.append(_gone(given[0], values[given[0]], former.instead))
    return kept, missed


def with_todays_names(flags: Sequence[str]) -> list[tuple[int, str]]:
    """Replaces former flags by those that mean the same today, with a notice on each.

    Args:
      flags: arguments, or the lines of a flagfile.

    Returns:
      Each flag or line after its number, from 1. Those of today have the number of the last one
      that they replace. Former flags that cannot be replaced stay.
    """
    named = [_name_and_text(flag) for flag in flags]
    given = dict(named)
    numbered = list(enumerate(flags, start=1))
    for former in _REPLACED:
        own = {name: text for name, text in given.items() if name in former.defaults}
        today = former.today(given) if own and former.is_exact(given) else None
        if today is None:
            continue
        warn_once(_renewed(own, today, "--"))
        last = max(number for number, (name, _) in enumerate(named, start=1) if name in own)
        new = [(last, f"--{name}={text}") for name, text in today.items()]
        before = [(n, flag) for n, flag in numbered if n <= last and named[n - 1][0] not in own]
        numbered = before + new + [(n, flag) for n, flag in numbered if n > last]
    return numbered


def _name_and_text(flag: str) -> tuple[str, str]:
    """Returns the name and the text of a flag; empty: it is none that can be replaced."""
    name, equals, text = flag.strip().partition("=")
    if not name.startswith("-"):
        return "", ""
    name = name.lstrip("-")
    if equals:
        return name, text
    switches = [own for former in _REPLACED for own, v in former.defaults.items() if v is True]
    texts = {prefix + own: (own, text) for own in switches for prefix, text in _SWITCH_TEXTS}
    return texts.get(name, ("", ""))


def _gone(name: str, value: Any, instead: str) -> str:
    return f"{name}={json.dumps(value)} is gone: {instead}"


def _renewed(former: _Texts, today: _Texts, dashes: str = "") -> str:
    before, now = (
        " ".join(f"{dashes}{name}={text}" for name, text in texts.items())
        for texts in (former, today)
    )
    return f"{before} is now {now}" if now else f"{before} has no effect any more"
