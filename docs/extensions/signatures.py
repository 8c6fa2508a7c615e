"""Signatures and members that autodoc would show otherwise, and has no option for."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util import inspect


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what follows to autodoc's events."""
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _sign(
    app: Sphinx,
    kind: str,
    name: str,
    member: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    if kind == "class" and signature == "(*args, **kwargs)":
        # Of __new__, which layers and models inherit from Keras.
        own = inspect.signature(member.__init__, bound_method=True)
        signature = inspect.stringify_signature(
            own, show_return_annotation=False, unqualified_typehints=True
        )
    if signature:
        # A default that a dataclass makes anew each time, and Sphinx cannot read.
        signature = signature.replace("<factory>", "...")
    return signature, returns


def _skip(app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples: the classes' docstrings describe them."""
    return True if str(member.__doc__).startswith("Alias for field number") else None
