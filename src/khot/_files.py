"""Atomic writes, and a check before long work that a file can be written."""

import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Raise ValueError unless `write` can write a file there. Nothing is created."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{path.parent} cannot be made: {folder} is not a directory")
    if path.is_dir():
        raise ValueError(f"{path} must be a file; got a directory")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"{path} cannot be written: no permission")
