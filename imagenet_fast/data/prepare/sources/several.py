"""Labels of images that have several, in the columns of a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from imagenet_fast.base.counted import counted
from imagenet_fast.base.errors import UserError, nearest
from imagenet_fast.data.prepare.sources.files import first_names

_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_ALL = "*"
# As Python or JSON writes lists of text.
_IN_BRACKETS = re.compile(r"""\s*\[\s*(['"].*['"])?\s*\]\s*""", re.DOTALL)
# Python's int() refuses text of more than some thousand digits.
_WHOLE_NUMBER = re.compile(r"-?\d{1,100}")
_SHOWN = 100  # characters of a value in a message


@dataclasses.dataclass(frozen=True)
class SeveralLabels:
    """How a table gives several labels of an image; without either, an image has one.

    Attributes:
      separator: between the names in the column of the labels.
      columns: names of columns with 0 or 1, separated by commas, or ``*``: all that are not used
        otherwise. Each is a class.
      allow_unlabelled: whether an image may have no label.
      column: that of the labels, if it is given.
    """

    separator: str | None = None
    columns: str | None = None
    allow_unlabelled: bool = False
    column: str | None = None

    def __post_init__(self) -> None:
        """Checks that at most one layout is given."""
        if self.separator and self.columns:
            raise UserError(
                "label_separator is for one column with names, label_columns for columns with 0 "
                "or 1: give one of them"
            )
        if self.column and self.columns:
            raise UserError(
                "label_column is for one column with labels, label_columns for columns with 0 or "
                "1: give one of them"
            )

    def classes(self, place: Any, known: Sequence[str], used: Collection[str | None]) -> list[str]:
        """Returns the columns, of all ``known``, that are classes and not ``used`` otherwise.

        Raises:
          UserError: there is no such column, or one is given twice or used otherwise.
        """
        if not self.columns:
            return []
        if self.columns.strip() == _ALL:
            found = [name for name in known if name not in used]
        else:
            by_name = {name.strip(): name for name in known}
            found = [by_name.get(name.strip(), name.strip()) for name in self.columns.split(",")]
        for name in found:
            if name not in known:
                raise UserError(
                    f"{place}: label_columns names {name!r}, but has only "
                    f"{', '.join(map(repr, known))}{nearest(name, known)}"
                )
            if name in used or found.count(name) > 1:
                raise UserError(f"{place}: label_columns: {name!r} is used twice")
        if not found:
            raise UserError(f"{place}: label_columns={self.columns}: there is no such column")
        return found

    def names(self, place: str, value: Any) -> tuple[str, ...]:
        """Returns the names in a value of the column of labels: a text or a list of texts.

        They are as written: one may be there several times.

        Raises:
          UserError: it is something else.
        """
        if isinstance(value, str) and self.separator:
            if _IN_BRACKETS.fullmatch(value):
                raise UserError(
                    f"{place} is {value!r:.{_SHOWN}}, a list in brackets, but must be only the "
                    f"names, with {self.separator!r} between them; or write lists to JSON Lines"
                )
            value = value.split(self.separator)
        elif isinstance(value, int) and not isinstance(value, bool) and self.separator:
            value = [value]
        if value is None and (self.separator or self.allow_unlabelled):
            value = []
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{place} is {value!r:.{_SHOWN}}, but must be a list of names")
        names = []
        for part in value:
            name = str(part).strip()
            if isinstance(part, bool) or not isinstance(part, (str, int)):
                raise UserError(f"{place} has {part!r:.{_SHOWN}}, but must have names")
            if name.splitlines() not in ([], [name]):
                raise UserError(f"{place} has {name!r:.{_SHOWN}}, which is not one line of text")
            if name:
                names.append(name)
        return tuple(names)

    def flagged(
        self, place: str, columns: Sequence[str], values: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Returns the columns that have 1 in a row.

        Raises:
          UserError: one has something else than 0 or 1.
        """
        return tuple(name for name in columns if _flag(f"{place}: {name}", values.get(name)))

    def check_labelled(
        self, place: Any, images: int, unlabelled: Sequence[str], *, multi_label: bool = True
    ) -> None:
        """Checks images without a label, of which ``unlabelled`` has the names.

        Raises:
          UserError: there are some, which is not allowed, or cannot be.
        """
        if self.allow_unlabelled and not multi_label:
            raise UserError(
                f"{place}: has one label an image, so that allow_unlabelled has no effect: give "
                "label_separator or label_columns, too, or remove it"
            )
        if unlabelled and not self.allow_unlabelled:
            raise UserError(
                f"{place}: {len(unlabelled)} of {counted(images, 'image')} without a label "
                f"({'; '.join(unlabelled[:3])}): remove them, or give --allow_unlabelled if they "
                "show none of the classes"
            )


def check_no_flags(place: Any, labels: Sequence[Sequence[str]]) -> None:
    """Checks that lists of labels are not values of 0 or 1 for each class.

    Raises:
      UserError: all have only 0 and 1, as many of them in each, and one more than once.
    """
    lengths, names = set(map(len, labels)), set().union(*labels)
    repeated = any(len(set(own)) < len(own) for own in labels)
    if len(lengths) == 1 and names <= {"0", "1"} and repeated:
        raise UserError(
            f"{place}: the labels of each image are {min(lengths)} values of 0 or 1, but must be "
            "the names or numbers of its classes; or give a column for each class, and "
            "label_columns"
        )


def warnings_of_unused(classes: Sequence[str], labels: Collection[str]) -> Iterator[str]:
    """Warns of classes of which no training image has the label."""
    unused = [repr(name.strip()) for name in classes if name not in labels]
    if unused:
        yield (
            f"no training image has {counted(len(unused), 'class', 'classes')} "
            f"({first_names(unused)}), which cannot be learnt so: add images, or leave it out"
        )


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Returns names of classes in numerical order, if all are integers, or else alphabetically."""
    if all(_WHOLE_NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _flag(place: str, value: Any) -> bool:
    flag = _FLAGS.get(str(value).strip().lower())
    if flag is None:
        raise UserError(f"{place} is {value!r:.{_SHOWN}}, but must be 0 or 1")
    return flag
