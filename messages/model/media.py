"""Images, videos and audio of a prompt: bytes inside the job, or a URL that the worker may fetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ..errors import InvalidField
from .base import Float, Record
from .chat import ChatMessage, MediaKind

MAX_MEDIUM_BYTES = 16 << 20
"""The size limit of one medium: the most that the codec accepts as one piece of bytes."""
MAX_MEDIA_BYTES = 48 << 20
"""The size limit of all media of a job, so that the job fits into a message."""
MAX_MEDIA = 64
_MAGIC: Mapping[MediaKind, tuple[tuple[int, bytes, str], ...]] = {
    "image": (
        (0, b"\x89PNG\r\n\x1a\n", "image/png"),
        (0, b"\xff\xd8\xff", "image/jpeg"),
        (0, b"GIF8", "image/gif"),
        (8, b"WEBP", "image/webp"),
        (0, b"BM", "image/bmp"),
        (0, b"II*\0", "image/tiff"),
        (0, b"MM\0*", "image/tiff"),
    ),
    "video": (
        (4, b"ftyp", "video/mp4"),
        (0, b"\x1aE\xdf\xa3", "video/webm"),
        (8, b"AVI ", "video/x-msvideo"),
        (0, b"\0\0\x01", "video/mpeg"),
        (0, b"FLV", "video/x-flv"),
        (0, b"\x93NUMPY", "application/x-npy"),
    ),
    "audio": (
        (8, b"WAVE", "audio/wav"),
        (0, b"ID3", "audio/mpeg"),
        (0, b"\xff\xfb", "audio/mpeg"),
        (0, b"\xff\xf3", "audio/mpeg"),
        (0, b"\xff\xf2", "audio/mpeg"),
        (0, b"fLaC", "audio/flac"),
        (0, b"OggS", "audio/ogg"),
        (4, b"ftyp", "audio/mp4"),
    ),
}
"""Offset, magic bytes and MIME type of each known file format."""


class Medium(Record):
    """One image, video or audio.

    Exactly one of data and url is given. There are no paths: files are read where the job is made.

    data: the encoded file (PNG, JPEG, MP4, WAV …). A video may also be its frames, as NumPy's file of an array
    (frames, height, width, 3) of uint8: the model sees exactly these. url: http or https. The worker fetches it, and
    only from hosts that its operator allows. mime: the MIME type, if it is known. fps: of an array, frames a second.
    """

    kind: MediaKind
    data: Annotated[bytes, Field(strict=True, min_length=1, max_length=MAX_MEDIUM_BYTES)] | None = Field(
        default=None, repr=False
    )
    url: Annotated[str, Field(min_length=8, max_length=4096)] | None = None
    mime: str | None = Field(default=None, max_length=64)
    fps: Float = Field(default=24.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.url is None):
            raise ValueError("exactly one of data and url is required")
        if self.url is not None:
            parts = urlsplit(self.url)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ValueError(f"url={self.url[:80]!r}: http://HOST/… or https://HOST/…")
        return self


def mime_of(kind: MediaKind, data: bytes, shown: str) -> str:
    """The MIME type by the file's first bytes. Raises InvalidField, which shows `shown`, for a file not of `kind`.

    Libraries that read media also accept playlists and scripts, and open the files that these name.
    """
    for offset, magic, mime in _MAGIC[kind]:
        if data[offset : offset + len(magic)] == magic:
            return mime
    known = sorted({mime for _, _, mime in _MAGIC[kind]})
    raise InvalidField(kind, shown, f"a file of {', '.join(known)}; it begins with {data[:8]!r}")


def check_media(media: Sequence[Medium], messages: Sequence[ChatMessage] | None, *, before: bool = False) -> None:
    """Raises ValueError unless the media match the places in `messages` and together fit into a job.

    before: there may be places in tokens before the messages, whose media come first.
    """
    if (total := sum(len(medium.data or b"") for medium in media)) > MAX_MEDIA_BYTES:
        raise ValueError(f"media: {total} bytes together, at most {MAX_MEDIA_BYTES}")
    if messages is None:
        return  # a prompt of ids or text has the model's own placeholders, which only the model's processor knows
    places = [kind for message in messages for kind in message.media]
    kinds = [medium.kind for medium in media]
    if places != (kinds[max(0, len(kinds) - len(places)) :] if before else kinds):
        raise ValueError(f"media: {kinds or 'none'} for places of {places or 'none'} in messages")
