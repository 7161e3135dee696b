"""Merges the small segments that writers have left into large ones, and leaves out what is not wanted any more.

    .merging/             the segment that is being written; its lock says that somebody merges
    …-merged5f3a9c21-…    a merged segment; its header names those that it replaces

A merged segment is written aside, flushed to disk, and gets its name by one rename. From then on readers leave out what
it replaces. Before, they do not see it. So each entry is read once, whenever the merging is cut off. What was replaced
is deleted by a later run, because a reader that began earlier may still be on its way to it.
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError, InvalidField, MessageError
from .entry import Entry
from .locks import is_held
from .reader import entries_of, replaced_by
from .segment import MERGED, SUFFIX, TORN, Header, Packed, SegmentReader, SegmentWriter

BLOCK_BYTES = 512 << 10
MOST_SEGMENTS = 256
"""So many are merged into one: as many files may be open."""
_ASIDE = ".merging"
_NAME = re.compile(rf"[0-9]{{14}}-[^-]+-[0-9]{{6,18}}{re.escape(SUFFIX)}")
"""Of segments as `Header.name` makes it. Merged ones get theirs from it."""

Change = Callable[[Entry], Entry | None]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Merged:
    """What a run did. merged: segments that were merged, into: how many. deleted: segments that were replaced earlier,
    or had only entries that are too old. dropped: entries that were left out. left: segments that are not touched, with
    the reason."""

    merged: int = 0
    into: int = 0
    deleted: int = 0
    dropped: int = 0
    left: dict[str, str] = field(default_factory=dict)


def merge(
    folder: Path | str,
    *,
    segment_bytes: int = 256 << 20,
    since: float = -math.inf,
    change: Change = lambda entry: entry,
    grace_s: float = 3600.0,
    progress: Progress = lambda _done, _total: None,
) -> Merged:
    """Merge the segments of a journal. Blocks. It may be cut off anywhere, and called again.

    A segment that is written to, has damage, or comes from a newer version stays as it is, with all later ones of the
    same writer, and with damage also the earlier ones.

    segment_bytes: how large a merged segment becomes, about. since: older entries are dropped as soon as all of their
    segment are older, or it is merged. change: returns what is kept of an entry, or None; merged segments above half of
    `segment_bytes` are not read again. grace_s: seconds until what was replaced is deleted, and for which a segment
    without an end has to be untouched; no reader may take longer, or it misses entries. progress: called with the
    segments merged so far, and all that will be.
    Raises ConfigError if there is no such folder or somebody else merges it, InvalidField, and OSError.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ConfigError(f"journal {str(folder)!r}: there is no such folder")
    if segment_bytes < 1 or not grace_s >= 0:
        raise InvalidField("segment_bytes, grace_s", (segment_bytes, grace_s), "at least 1, and at least 0")
    with _alone(place) as aside:
        run = _Run(place, aside, segment_bytes, since, change, grace_s)
        run.delete_replaced()
        batches = run.batches()
        total, done = sum(map(len, batches)), 0
        for batch in batches:
            run.merge(batch)
            done += len(batch)
            progress(done, total)
        if grace_s == 0:
            run.delete_replaced()
    return run.told


@contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """The folder to write in, emptied. Nobody else merges meanwhile."""
    aside = folder / _ASIDE
    aside.mkdir(exist_ok=True)
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"journal {str(folder)!r}: its segments are being merged already") from None
        for path in aside.iterdir():
            path.unlink()
        yield aside
    finally:
        os.close(lock)


@dataclass(slots=True)
class _Run:
    """One run. waiting: names of segments that were replaced, and not so long ago that they may be deleted. damaged:
    writers of segments with damage."""

    folder: Path
    aside: Path
    segment_bytes: int
    since: float
    change: Change
    grace_s: float
    told: Merged = field(default_factory=Merged)
    waiting: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)

    def delete_replaced(self) -> None:
        """Delete what was replaced long enough ago."""
        self.waiting.clear()
        for path in self.folder.glob(f"*{SUFFIX}"):
            left = [self.folder / name for name in replaced_by(path) if (self.folder / name).exists()]
            # ctime is the time of the rename. mtime is that of the entries, for whoever deletes by age.
            if left and time.time() - path.stat().st_ctime < self.grace_s:
                self.waiting.update(one.name for one in left)
                continue
            for one in left:
                one.unlink()
                self.told.deleted += 1

    def batches(self) -> list[list[Path]]:
        """The segments that become one, for each merged segment."""
        writers: dict[str, list[tuple[int, Path]]] = {}
        for path in self.folder.glob(f"*{SUFFIX}"):
            parts = path.name.removesuffix(SUFFIX).split("-")
            if not _NAME.fullmatch(path.name):
                self.told.left[path.name] = "not the name of a segment"
            elif path.name not in self.waiting:
                writers.setdefault(parts[1], []).append((int(parts[2]), path))
        ready: list[tuple[str, Path]] = []
        for segments in writers.values():
            newest = ""
            for path in self._usable(segments):
                newest = max(newest, path.name)  # in the writer's order, also if its clock went back
                ready.append((newest, path))
        found: list[list[Path]] = []
        size = 0
        for _, path in sorted(ready):
            if not found or size >= self.segment_bytes or len(found[-1]) == MOST_SEGMENTS:
                found.append([])
                size = 0
            found[-1].append(path)
            size += path.stat().st_size
        return [batch for batch in found if len(batch) > 1]

    def _usable(self, segments: list[tuple[int, Path]]) -> Iterator[Path]:
        """Of one writer's segments those that can be merged. Deletes those that are too old."""
        for _, path in sorted(segments):
            why, last = self._look(path)
            if not why and last < self.since:
                path.unlink()
                self.told.deleted += 1
                continue
            if not why and f"-{MERGED}" in path.name and path.stat().st_size > self.segment_bytes // 2:
                why = "it is large enough"
            if why:
                self.told.left[path.name] = why
                return  # readers tell of segments that are missing between others
            yield path

    def _look(self, path: Path) -> tuple[str, float]:
        """Why a segment cannot be merged, "" if it can, and the time of its last entry, inf where that is not known."""
        if self.waiting.intersection(replaced_by(path)):
            return "what it replaces is not deleted yet", math.inf
        problems: list[str] = []
        try:
            reader = SegmentReader(path, problems.append)
        except (OSError, MessageError) as error:
            return str(error), math.inf
        reader.close()
        if problems:
            return problems[0], math.inf
        if reader.index is None and time.time() - path.stat().st_mtime < self.grace_s:
            return "it was written to a moment ago", math.inf
        last = float(reader.index.lasts.max()) if reader.index is not None and reader.index.lasts.size else math.inf
        return "" if is_held(path) is False else "its writer is there", last

    def merge(self, batch: list[Path]) -> None:
        """Merge segments into one, without those that turn out to be damaged, and later ones of the same writers."""
        while len(whole := [path for path in batch if _writer(path) not in self.damaged]) > 1:
            damage: dict[Path, str] = {}
            if self._merged(whole, damage):
                return
            self.told.left.update({path.name: why for path, why in damage.items()})
            self.damaged.update(map(_writer, damage))

    def _merged(self, batch: list[Path], damage: dict[Path, str]) -> bool:
        """Merge segments into one. False, without having changed anything, if one has damage."""
        writers: dict[str, list[Path]] = {}
        for path in batch:
            writers.setdefault(_writer(path), []).append(path)
        at = max(int(path.name.split("-")[0]) for path in batch) / 1000
        header = Header(f"{MERGED}{secrets.token_hex(4)}", 0, at, tuple(path.name for path in batch))
        with ExitStack() as stack:
            sources = [stack.enter_context(closing(_entries(paths, damage))) for paths in writers.values()]
            segment = SegmentWriter(self.aside, header)
            stack.callback(segment.close, complete=False)
            dropped = self._write(segment, heapq.merge(*sources, key=lambda entry: entry.at), damage)
            if damage:
                segment.path.unlink()
                return False
            segment.close()
        self.told.dropped += dropped
        if not segment.blocks:
            for path in (segment.path, *batch):
                path.unlink()
            self.told.deleted += len(batch)
            return True
        newest = max(path.stat().st_mtime for path in batch)
        os.utime(segment.path, (newest, newest))
        os.rename(segment.path, self.folder / header.name)
        _sync(self.folder)
        self.told.merged += len(batch)
        self.told.into += 1
        return True

    def _write(self, segment: SegmentWriter, entries: Iterable[Entry], damage: dict[Path, str]) -> int:
        """Write what is wanted, until there is damage. Returns how many entries were left out."""
        block: list[Packed] = []
        size = dropped = 0
        for entry in entries:
            if damage:
                break
            kept = self.change(entry) if entry.at >= self.since else None
            if kept is None:
                dropped += 1
                continue
            block.append(Packed.of([kept.pack()]))
            size += len(block[-1].data)
            if size >= BLOCK_BYTES:
                segment.block(block)
                block, size = [], 0
        if block:
            segment.block(block)
        return dropped


def _writer(path: Path) -> str:
    return path.name.split("-")[1]


def _entries(paths: list[Path], damage: dict[Path, str]) -> Generator[Entry]:
    """The entries of one writer's segments, in order; damage: gets what cannot be read, by segment."""
    for path in paths:

        def problem(text: str, path: Path = path) -> None:
            if not text.endswith(TORN):  # the writer died: there is nothing more in it
                damage.setdefault(path, text)

        yield from entries_of(path, problem)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
