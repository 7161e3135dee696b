"""Images, videos and audio for a job: from files, URLs, data URLs, PIL, bytes, and OpenAI's messages.

The process that makes the job reads all files. A worker never opens a path, and fetches URLs only from hosts that its
operator allows.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ...messages.errors import InvalidField
from ...messages.fetch import fetch
from ...messages.model import MAX_MEDIUM_BYTES, ChatMessage, GenerateJob, MediaKind, Medium, as_invalid_field, mime_of

Urls = Literal["client", "worker"]
MAX_PATH = 4096
"""The longest text that may name a file."""


def medium(
    kind: MediaKind, source: Any, *, urls: Urls = "client", hosts: Collection[str] | None = None, timeout: float = 10.0
) -> Medium:
    """One medium from bytes, base64 text, a path (str or Path), a file:// , data: or http(s) URL, or a PIL image.

    A text is base64 if all of it is, and its bytes begin like a file of this kind. A text that names a file is a path.
    A video may be an array or tensor of frames, of whole numbers 0 to 255, (frames, height, width, 3) or (frames, 3,
    height, width), and audio an array of one channel's samples, (n,). Either may be the first of a pair: a video's
    second is the metadata that qwen-vl-utils gives, else 24 frames a second are meant; audio's is the rate, else 16,000
    a second. Both stay exactly as they are (audio as float32).
    urls: who fetches http(s). "worker" needs workers that allow the host by --media-host.
    hosts: the hosts that the client may fetch from, private ones too. None allows every public one.
    timeout: seconds for one fetch. Raises InvalidField for a source that cannot be read, is larger than 16 MiB, or is
    not a file of this kind. May block.
    """
    if isinstance(source, Medium):
        return source
    fields: dict[str, Any] = {}
    if isinstance(source, str) and _scheme(source) in {"http", "https"}:
        if urls == "worker":
            try:
                return Medium(kind=kind, url=source)
            except ValidationError as error:
                raise as_invalid_field(error) from None
        data = fetch(source, max_bytes=MAX_MEDIUM_BYTES, timeout_s=timeout, hosts=hosts)
    elif (found := _of_array(kind, source)) is not None:
        fields, data = found
    else:
        data = _bytes_of(kind, source)
    shown = str(source)[:80] if isinstance(source, str | Path) else type(source).__name__
    return _checked(kind, data, shown, fields)


def _bytes_of(kind: MediaKind, source: Any) -> bytes:
    """The bytes of a source that needs no fetch."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and _scheme(source) == "data":
        return _data_url(source)
    if isinstance(source, str) and (data := _base64(kind, source)) is not None:
        return data
    if isinstance(source, str | Path):
        path = unquote(urlsplit(source).path) if isinstance(source, str) and _scheme(source) == "file" else source
        return _read(Path(path))
    if kind == "image" and callable(getattr(source, "save", None)):
        encoded = io.BytesIO()
        try:
            (source.convert("RGB") if getattr(source, "mode", None) == "CMYK" else source).save(encoded, format="PNG")
        except (OSError, ValueError, SystemError) as error:
            raise InvalidField(kind, source, f"an image that PNG can hold: {error}") from error
        return encoded.getvalue()
    allowed = "bytes, a path, base64 text, a data: or http(s) URL, or (for images) an image of PIL"
    raise InvalidField(kind, source, allowed)


def _of_array(kind: MediaKind, source: Any) -> tuple[dict[str, Any], bytes] | None:
    """Fields of a Medium and a file, of frames or samples; None for another source."""
    given, about = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if kind == "image" or not hasattr(given, "shape"):
        return None
    allowed = "frames of whole numbers 0 to 255" if kind == "video" else "samples of one channel, or (samples, rate)"
    try:
        array = np.asarray(given)
        if kind == "audio":
            return {}, _wav(array.astype("<f4"), 16_000 if about is None else int(about))
        about = {name: value for name, value in dict(about or {}).items() if value is not None}
        whole = array.astype(np.uint8)
        if not np.array_equal(whole, array):
            raise ValueError("other numbers")
        whole = whole if whole.shape[-1] == 3 else np.moveaxis(whole, 1, -1)
        if whole.ndim != 4 or whole.shape[-1] != 3:
            raise ValueError(f"shape {array.shape}")
        fps = float(about.get("fps", 24.0))
        if {"frames_indices", "total_num_frames"} <= about.keys():
            fps *= len(about["frames_indices"]) / about["total_num_frames"]  # only these frames are here
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise InvalidField(kind, type(given).__name__, f"{allowed}: {error}") from error
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(whole))
    return {"fps": fps}, out.getvalue()


def _wav(samples: npt.NDArray[np.float32], rate: int) -> bytes:
    """A WAV file of (n,) float32 samples, which the standard library cannot write."""
    if samples.ndim != 1 or not samples.size or not np.isfinite(samples).all():
        raise ValueError(f"shape {samples.shape}, of finite numbers")
    if not 0 < rate < 1 << 29:
        raise ValueError(f"a rate of {rate}")
    size = samples.nbytes
    form = b"WAVE", b"fmt ", 16, 3, 1, rate, rate * 4, 4, 32
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + size, *form, b"data", size) + samples.tobytes()


def _base64(kind: MediaKind, text: str) -> bytes | None:
    """The bytes of a medium that is written as base64 text; None for another text, such as a path."""
    try:
        mime_of(kind, base64.b64decode(text[:64], validate=True), "")  # before the whole text is decoded
    except (ValueError, InvalidField):
        return None
    return None if len(text) <= MAX_PATH and Path(text).is_file() else _decoded(text, text[:80])


def _scheme(source: str) -> str:
    try:
        return urlsplit(source).scheme if ":" in source[:16] else ""
    except ValueError as error:
        raise InvalidField("url", source[:80], f"a path or a URL: {error}") from error


def from_openai(
    messages: Sequence[Mapping[str, Any] | ChatMessage],
    *,
    files: Path | None = None,
    urls: Urls = "client",
    hosts: Collection[str] | None = None,
    timeout: float = 10.0,
) -> tuple[tuple[ChatMessage, ...], tuple[Medium, ...]]:
    """OpenAI's messages in a job's form: the messages with places for media, and the media in their order.

    Parts may be text, image_url, video_url, audio_url, input_audio, and {"type": "image", "image": a source that
    `medium` accepts}, the same for video and audio.
    files: the folder whose files the messages may name. None allows no path, because others often write messages.
    urls, hosts, timeout: as for `medium`. Raises InvalidField, which names the part. May block.
    """
    found: list[Medium] = []
    chat: list[ChatMessage] = []
    for place, message in enumerate(messages):
        if isinstance(message, ChatMessage):  # has no media: its places could only be for those given beside it
            chat.append(message)
            continue
        fields = dict(message)
        if isinstance(content := fields.get("content"), list | tuple):
            parts = []
            for number, part in enumerate(content):
                where = f"messages.{place}.content.{number}"
                kind, source, written = _part(where, part)
                if kind is None:
                    parts.append({"type": "text", "text": source})
                    continue
                if written:
                    inline = _base64(kind, source)
                    source = _allowed(where, source, files) if inline is None else inline
                try:
                    found.append(medium(kind, source, urls=urls, hosts=hosts, timeout=timeout))
                except InvalidField as error:
                    raise InvalidField(f"{where}.{error.field}", error.value, error.allowed) from error
                parts.append({"type": kind})
            fields["content"] = parts
        chat.append(_message(place, fields))
    return tuple(chat), tuple(found)


def chat_job(messages: Sequence[Mapping[str, Any]], *, files: Path | None = None, **fields: Any) -> GenerateJob:
    """A GenerateJob of OpenAI messages and the media in them. fields: the job's other fields. Raises InvalidField."""
    chat, media = from_openai(messages, files=files)
    return GenerateJob.build(**fields | {"messages": chat} | ({"media": media} if media else {}))


def _message(place: int, fields: dict[str, Any]) -> ChatMessage:
    try:
        return ChatMessage(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        invalid = as_invalid_field(error)
        raise InvalidField(f"messages.{place}.{invalid.field}", invalid.value, invalid.allowed) from None


def _part(where: str, part: Any) -> tuple[MediaKind | None, Any, bool]:
    """The part's kind (None for text), its source, and whether the source is text that the message's author wrote."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return None, part["text"], False
    for name in ("image", "video", "audio"):
        if kind == f"{name}_url":
            given = part.get(kind)
            url = given.get("url") if isinstance(given, Mapping) else given
            if isinstance(url, str):
                return name, url, True
        if kind == name and name in part:
            return name, part[name], isinstance(part[name], str)
    if kind == "input_audio" and isinstance(given := part.get(kind), Mapping) and isinstance(given.get("data"), str):
        return "audio", f"data:audio/{given.get('format', 'wav')};base64,{given['data']}", True
    raise InvalidField(where, part, "a part of type text, image_url, video_url, audio_url or input_audio")


def _allowed(where: str, url: Any, files: Path | None) -> Any:
    """The URL, or the path that it names if `files` allows that path. Raises InvalidField."""
    scheme = _scheme(url)
    if scheme in {"data", "http", "https"}:
        return url
    if files is None:
        raise InvalidField(where, url, "no path: say with `files` where paths may lead")
    path = (files / (unquote(urlsplit(url).path) if scheme == "file" else url)).resolve()
    if not path.is_relative_to(files.resolve()):
        raise InvalidField(where, url, f"a path in {files}")
    return path


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MEDIUM_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InvalidField("path", str(path), f"a file that can be read: {error}") from error
    if len(data) > MAX_MEDIUM_BYTES:
        raise InvalidField("path", str(path), f"at most {MAX_MEDIUM_BYTES} bytes")
    return data


def _data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidField("url", url[:80], "data:<type>;base64,<data>")
    return _decoded(data, url[:80])


def _decoded(data: str, shown: str) -> bytes:
    if len(data) > MAX_MEDIUM_BYTES * 4 // 3 + 4:
        raise InvalidField("url", shown, f"at most {MAX_MEDIUM_BYTES} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidField("url", shown, f"base64: {error}") from error


def _checked(kind: MediaKind, data: bytes, shown: str, fields: Mapping[str, Any]) -> Medium:
    if not 0 < len(data) <= MAX_MEDIUM_BYTES:
        raise InvalidField(kind, shown, f"1 to {MAX_MEDIUM_BYTES} bytes, not {len(data)}")
    try:
        return Medium(kind=kind, data=data, mime=mime_of(kind, data, shown), **fields)
    except ValidationError as error:
        raise as_invalid_field(error) from None
