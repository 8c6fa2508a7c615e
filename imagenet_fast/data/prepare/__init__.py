"""Writing data: from images of any source to shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from imagenet_fast.base.lazy import lazy_attributes

if TYPE_CHECKING:
    from imagenet_fast.data.prepare.job import prepare
    from imagenet_fast.data.prepare.sources import open_source

__all__ = ["open_source", "prepare"]

__getattr__ = lazy_attributes(__name__, {"job": ["prepare"], "sources": ["open_source"]})
