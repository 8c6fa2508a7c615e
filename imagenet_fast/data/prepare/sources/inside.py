"""Which files are in a folder of data once links are followed."""

from __future__ import annotations

import os
from pathlib import Path


class Inside:
    """Tells files in some folders from those that a path or a link reaches from there."""

    def __init__(self, *folders: Path) -> None:
        """Initializes it for some folders, which need not exist."""
        self._folders = tuple(folder.resolve() for folder in folders)
        self._by_parent: dict[Path, bool] = {}

    def __contains__(self, file: Path) -> bool:
        """Whether a file, which exists, is in one of the folders; thread-safe."""
        if file.is_symlink():
            return self._contains(file)
        parent = file.parent
        if parent not in self._by_parent:  # to resolve each file would take long
            self._by_parent[parent] = self._contains(parent)
        return self._by_parent[parent]

    def _contains(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(folder) for folder in self._folders)
