"""Media of a job: the worker fetches them, so that the engine gets bytes and opens no path and no URL."""

from __future__ import annotations

import time
from collections.abc import Collection

from ...messages.errors import InvalidField, RequestRefused
from ...messages.fetch import fetch
from ...messages.model import MAX_MEDIUM_BYTES, GenerateJob, Medium, check_media, mime_of

FETCH_S = 10.0
"""Seconds for all URLs of a job."""


def must_fetch(job: GenerateJob) -> bool:
    """Whether a medium of it is still a URL."""
    return any(one.url is not None for one in job.media)


def with_media_here(job: GenerateJob, hosts: Collection[str]) -> GenerateJob:
    """The job with its URLs fetched, all within FETCH_S; blocks as long as there is one.

    Raises RequestRefused unless all are on `hosts` and can be had, and everything is such a file as it is said to be.
    """
    deadline = time.monotonic() + FETCH_S
    media: list[Medium] = []
    for place, one in enumerate(job.media):
        if one.url is not None and not hosts:
            raise RequestRefused(f"media.{place}.url={one.url}: this worker fetches none; start it with --media-host")
        try:
            media.append(_here(one, hosts, deadline))
            check_media(media, None)
        except (InvalidField, ValueError) as error:
            raise RequestRefused(f"media.{place}: {error}") from error
    return job.model_copy(update={"media": tuple(media)}) if must_fetch(job) else job


def _here(one: Medium, hosts: Collection[str], deadline: float) -> Medium:
    if one.url is None:
        mime_of(one.kind, one.data or b"", "data")
        return one
    left = max(0.0, deadline - time.monotonic())
    data = fetch(one.url, max_bytes=MAX_MEDIUM_BYTES, hosts=hosts, timeout_s=left)
    return Medium(kind=one.kind, data=data, mime=mime_of(one.kind, data, one.url))
