"""Files elsewhere, at any URL that fsspec reaches."""

from __future__ import annotations

import re
from typing import Any

from .errors import ConfigError

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
"""Schemes of URLs that begin with a bucket or container."""


def open_url(url: str, what: str) -> tuple[Any, str]:
    """The filesystem for a URL, and the place in it. May connect, and block meanwhile.

    what: begins the error's text: "upload to", "journal". Raises ConfigError, which shows no password of the URL.
    """
    place = f"{what} {without_secrets(url)}"
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 – an optional dependency
    except ImportError:
        raise ConfigError(f"{place}: the package fsspec is missing: pip install 'rolloutmq[remote]'") from None
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:  # it names the package: s3:// needs s3fs, and so on
        raise ConfigError(f"{place}: {error}") from None
    except Exception as error:  # each filesystem has errors of its own, and they may quote the URL
        raise ConfigError(f"{place}: fsspec cannot open it ({type(error).__name__})") from None
    return filesystem, str(path)


def destination(url: str) -> tuple[Any, str]:
    """The filesystem for a URL to upload to, and the folder in it. Connects to stores that have buckets, and blocks.

    A bucket is never made: who mistypes one would not find the files. Raises ConfigError, also if there is none.
    """
    filesystem, root = open_url(url, "upload to")
    if url.partition("://")[0] in BUCKETS:
        bucket = root.partition("/")[0]
        try:
            filesystem.info(bucket)
        except Exception as error:  # each filesystem has errors of its own
            raise ConfigError(f"upload to {without_secrets(url)}: {bucket}: {type(error).__name__}: {error}") from error
    return filesystem, root.rstrip("/")


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for a person to read. A path is returned as it is."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{re.sub('^[^/]*@', '', rest).partition('?')[0]}" if separator else url
