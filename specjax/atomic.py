"""Writes a folder whole or not at all: into a hidden sibling first, then one rename."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# What a run that can be gone on with keeps in a folder that is not finished.
UNFINISHED = "unfinished.json"


def check_destination(destination: str | Path, *, force: bool, marker: str, keep_unfinished: bool = False) -> None:
    """Says early whether `atomic_folder` would refuse. Writes nothing.

    Raises:
        FileExistsError: The destination exists and `force` is false, or it is something that `force` does not replace; or a run that can
            be gone on with would be lost, and `force` is false.
        PermissionError: Its parent cannot be written.
    """
    destination = _real(destination)
    parent = next((folder for folder in destination.parents if folder.exists()), None)
    if parent is None:
        raise PermissionError(f"{destination} cannot be replaced")
    if destination.exists() and not force:
        raise FileExistsError(f"{destination} exists; pass --force (force=True) to replace it")
    if destination.exists() and not destination.is_dir():
        raise FileExistsError(f"{destination} is a file, not a folder that --force could replace")
    if destination.exists() and not (destination / marker).exists() and any(destination.iterdir()):
        raise FileExistsError(f"{destination} holds no {marker}: it is not something that --force would replace; remove it yourself")
    partial = _partial(destination)
    if (partial / UNFINISHED).exists() and not force and not keep_unfinished:
        raise FileExistsError(
            f"{partial} holds an unfinished run ({UNFINISHED}): go on with it, choose another destination, or pass --force (force=True) to "
            "remove it"
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PermissionError(f"{destination} cannot be created: {parent} is not a writable folder")


def check_keeps(destination: str | Path, *needed: str | Path) -> None:
    """Refuses a destination whose replacement would delete what it is made from.

    Args:
        destination: As in `atomic_folder`.
        needed: Files and folders that have to stay.

    Raises:
        FileExistsError: One of them is the destination, or lies in it.
    """
    destination = _real(destination)
    lost = next((path for path in map(_real, needed) if path.is_relative_to(destination)), None)
    if lost is not None:
        raise FileExistsError(f"{destination} cannot be replaced: {'it' if lost == destination else lost} is what is read from")


@contextlib.contextmanager
def atomic_folder(destination: str | Path, *, force: bool = False, marker: str, keep_unfinished: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes the destination's place when the block ends without an error.

    An interruption at any point leaves the earlier folder, or none, never a mixture. What an interrupted run left behind is removed by the
    next one for the same destination, or handed to it; but a run that can be gone on with, which left an `unfinished.json`, is removed by
    `force` alone.

    Args:
        destination: The folder to create; its parents are made. Of a symbolic link the folder that it points to.
        force: Replace a folder that exists, if it is empty or holds `marker`; without `keep_unfinished` an unfinished run too.
        marker: A file that what is written here has, and what is replaced must have.
        keep_unfinished: The block can go on from what an interrupted run left: it gets the folder as it was, and if it fails
            leaves what is in it.

    Yields:
        The folder to write into, beside the destination; empty unless `keep_unfinished`.

    Raises:
        FileExistsError: The destination exists and `force` is false, or it is something that `force` does not replace; or a run that can
            be gone on with would be lost, and `force` is false.
        PermissionError: Its parent cannot be written.
        BlockingIOError: Another process is writing the same destination.
    """
    destination = _real(destination)
    check_destination(destination, force=force, marker=marker, keep_unfinished=keep_unfinished)
    made = [folder for folder in destination.parents if not folder.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(destination)
    replaced = replaced_folder(destination)
    with _locked(partial):
        try:
            if not keep_unfinished:
                _empty(partial)
            if replaced.exists():
                # An earlier run stopped between the two renames below (put the old folder back), or right after them.
                shutil.rmtree(replaced) if destination.exists() else replaced.rename(destination)
                check_destination(destination, force=force, marker=marker, keep_unfinished=keep_unfinished)
            yield partial
            if destination.exists():
                destination.rename(replaced)
            partial.rename(destination)
        except BaseException:
            if replaced.exists() and not destination.exists():
                replaced.rename(destination)
            if not keep_unfinished or not any(partial.iterdir()):
                shutil.rmtree(partial, ignore_errors=True)
            _remove_if_empty(made)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def replaced_folder(destination: Path) -> Path:
    """Where the earlier folder is for the moment between two renames, or until the next run if the process was killed there."""
    return destination.with_name(f".{destination.name}.replaced")


def _partial(destination: Path) -> Path:
    """Where a folder is filled."""
    return destination.with_name(f".{destination.name}.incomplete")


def _real(path: str | Path) -> Path:
    """Absolute, links followed: a link can neither be renamed in a folder's place nor removed as one."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates the folder and holds a lock on it, which the system drops when the process ends, however it ends."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"another process is writing {folder.name} in {folder.parent}") from error
        yield
    finally:
        os.close(descriptor)


def _remove_if_empty(folders: list[Path]) -> None:
    """Those, the innermost first, up to one in which there is something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
