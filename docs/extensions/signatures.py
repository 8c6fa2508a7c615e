"""Sphinx extension: changes to autodoc's signatures and members that it has no option for."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util import inspect


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to Sphinx."""
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
        # That of __new__, which layers and models inherit from Keras; show __init__'s.
        init = inspect.signature(member.__init__, bound_method=True)
        signature = inspect.stringify_signature(
            init, show_return_annotation=False, unqualified_typehints=True
        )
    if signature:
        # A dataclass's default_factory, which Sphinx cannot parse.
        signature = signature.replace("<factory>", "...")
    return signature, returns


def _skip(app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Skips the fields of named tuples, which the classes' docstrings describe."""
    return True if str(member.__doc__).startswith("Alias for field number") else None
