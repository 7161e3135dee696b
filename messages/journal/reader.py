"""Reads a journal: lazily, in the order of time, by job, client, group, version or kind."""

from __future__ import annotations

import heapq
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path

from ..errors import ConfigError, InvalidField, MessageError
from ..remote import without_secrets
from .entry import EVENTS, Entry, Event
from .remote import RemotePath, place_of
from .segment import MERGED, SUFFIX, SegmentReader

log = logging.getLogger(__name__)
Problem = Callable[[str], None]


def read(
    folder: Path | str,
    *,
    job: str | Collection[str] | None = None,
    client: str | None = None,
    group: str | None = None,
    version: int | None = None,
    events: Event | Collection[Event] | None = None,
    since: float = -math.inf,
    until: float = math.inf,
    on_problem: Problem = log.warning,
) -> Iterator[Entry]:
    """The entries of a journal, as far as they fit all that is given.

    Entries of one writer come in the order in which it wrote them; those of several are merged by their times. Memory
    is bounded by a block of each writer. With `job` only those blocks are read that have it.

    job: an id, or several. version: results of which it sampled any token, and its announcement. since, until: seconds
    since 1970, inclusive. on_problem: gets a line for each missing segment, torn end, damaged block, and newer version;
    by default they are logged. Reading goes on behind each.
    folder: a folder, or a URL of one that fsspec reaches, of which only the blocks that are needed are fetched.
    Raises ConfigError if there is no such folder, InvalidField.
    """
    place, kinds = place_of(folder), _several(events)
    for kind in kinds or ():
        if kind not in EVENTS:
            raise InvalidField("events", kind, f"some of {', '.join(EVENTS)}")
    if not place.is_dir():
        raise ConfigError(f"journal {without_secrets(str(folder))!r}: there is no such folder")
    if isinstance(place, Path) and not os.access(place, os.R_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"journal {without_secrets(str(folder))!r}: this user may not read the folder")
    jobs = _several(job)

    def fits(entry: Entry) -> bool:
        return (
            since <= entry.at <= until
            and (jobs is None or entry.job_id in jobs)
            and (client is None or entry.client_id == client)
            and (group is None or entry.group_id == group)
            and (version is None or version in entry.versions)
            and (kinds is None or entry.event in kinds)
        )

    def of_writer(segments: list[Path | RemotePath]) -> Iterator[Entry]:
        for path in segments:
            yield from filter(fits, entries_of(path, on_problem, jobs, since, until))

    return heapq.merge(*map(of_writer, _writers(place, on_problem).values()), key=lambda entry: entry.at)


def _writers(folder: Path | RemotePath, on_problem: Problem) -> dict[str, list[Path | RemotePath]]:
    """The segments of each writer, in order."""
    found: dict[str, list[tuple[int, str, Path | RemotePath]]] = {}
    paths: list[Path | RemotePath] = list(folder.glob(f"*{SUFFIX}"))
    replaced = {name for path in paths for name in replaced_by(path)}
    for path in paths:
        parts = path.name.removesuffix(SUFFIX).split("-")
        if path.name in replaced:
            continue
        if len(parts) == 3 and parts[2].isdecimal():
            found.setdefault(parts[1], []).append((int(parts[2]), path.name, path))
        else:
            on_problem(f"{path}: not the name of a segment")
    for writer, segments in found.items():
        # The oldest ones may have been deleted on purpose, but not those in between.
        segments.sort(key=lambda it: it[:2])
        gaps = [(one + 1, other - 1) for (one, *_), (other, *_) in pairwise(segments) if other > one + 1]
        if gaps:
            missing = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in gaps)
            on_problem(f"{folder}: of writer {writer} segments are missing: {missing}")
    return {writer: [path for *_, path in segments] for writer, segments in found.items()}


def replaced_by(path: Path | RemotePath) -> tuple[str, ...]:
    """Names of the segments that were merged into this one. None, if it cannot be read: they are read then."""
    if f"-{MERGED}" not in path.name:
        return ()
    try:
        segment = SegmentReader(path, lambda _: None)
    except (OSError, MessageError):
        return ()
    segment.close()
    return tuple(name for name in segment.header.replaces if name != path.name)


def entries_of(
    path: Path | RemotePath,
    on_problem: Problem,
    jobs: frozenset[str] | None = None,
    since: float = -math.inf,
    until: float = math.inf,
) -> Iterator[Entry]:
    """What is in a segment; of these jobs and times, and perhaps more. Whatever is wrong with it is a problem."""
    try:
        reader = SegmentReader(path, on_problem)
    except (OSError, MessageError) as error:
        on_problem(f"{path}: {error}")
        return
    try:
        yield from reader.entries(jobs, since, until)
    except OSError as error:  # of the disk or the network
        on_problem(f"{path}: {error}; the rest of it is left out")
    finally:
        reader.close()


def _several(given: str | Collection[str] | None) -> frozenset[str] | None:
    if given is None:
        return None
    return frozenset({given} if isinstance(given, str) else given)
