"""What all clouds have in common: one look at the metadata service after the other, until there is a notice."""

from __future__ import annotations

import asyncio
import logging
from importlib.util import find_spec
from typing import Literal, Protocol

from ...messages.errors import ConfigError
from .aws import AwsNotices
from .azure import AzureNotices
from .gcp import GcpNotices
from .metadata import Metadata

log = logging.getLogger(__name__)
Cloud = Literal["aws", "gcp", "azure"]
MOST_LOGGED = 16
"""Different troubles that are logged; each one once."""


class Notices(Protocol):
    """Where one cloud says that this machine will be taken away. pause_s: seconds between two looks."""

    pause_s: float

    async def look(self, metadata: Metadata) -> str:
        """What the notice says, or "" if there is none. Any exception is trouble with the metadata service."""
        ...


def notices_of(cloud: Cloud) -> Notices:
    """The notices of a cloud. Raises ConfigError without aiohttp, with which they are read."""
    if find_spec("aiohttp") is None:
        raise ConfigError(f"spot={cloud!r} needs aiohttp, which SGLang brings: pip install aiohttp")
    kinds: dict[Cloud, type[Notices]] = {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}
    return kinds[cloud]()


async def wait_for_notice(notices: Notices, endpoint: str | None = None) -> str:
    """Return what the notice says as soon as there is one.

    endpoint: URL of the metadata service; None is that of all three clouds. A service that is away, slow, or says what
    nobody understands is asked again after `pause_s`, and each trouble is logged once.
    """
    seen: set[str] = set()
    async with Metadata(endpoint) as metadata:
        while True:
            try:
                if said := await notices.look(metadata):
                    return said
            except Exception as error:  # whatever it answers, the worker goes on
                if (text := f"{type(error).__name__}: {error}"[:300]) not in seen and len(seen) < MOST_LOGGED:
                    seen.add(text)
                    log.warning("no notice of a pre-emption can be read, asking again: %s", text)
            await asyncio.sleep(notices.pause_s)
