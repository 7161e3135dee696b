"""Media of a request: as many places as media, token ids that SGLang's processors keep, and frames of videos."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....messages.errors import RequestRefused, shortly
from ....messages.model import Medium
from ...engine import EngineRequest

KINDS = ("image", "video", "audio")
KEPT = "rolloutmq_kept"
"""Marks a processor of SGLang's whose prompts' tokens are kept."""
NUMPY = b"\x93NUMPY"
_FIRST = 0x40000
"""Unicode has no characters in planes 4 to 13, so the character _FIRST + i can stand for token i."""
_STAND_INS = re.compile(f"([{chr(_FIRST)}-\U000dffff]+)")


class _Kept:
    """Goes before a tokenizer's own class: what `decode` has made, encoding turns into the same ids again."""

    _written: frozenset[int]

    def decode(self: Any, token_ids: Any, *_args: Any, **_kwargs: Any) -> str:
        ids = [int(token) for token in token_ids]
        return "".join(self.convert_ids_to_tokens(i) if i in self._written else chr(_FIRST + i) for i in ids)

    def encode(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(text, str) or not _STAND_INS.search(text):
            return super().encode(text, *args, **kwargs)  # type: ignore[misc]
        ids: list[int] = []
        for piece in filter(None, _STAND_INS.split(text)):
            ours = ord(piece[0]) >= _FIRST
            ids += [ord(c) - _FIRST for c in piece] if ours else self.encode(piece, add_special_tokens=False)
        return ids

    def __call__(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or len(texts) != 1 or not _STAND_INS.search(str(texts[0])):
            return super().__call__(text, *args, **kwargs)  # type: ignore[misc]
        from transformers import BatchEncoding  # noqa: PLC0415 – loaded with the tokenizer

        ids = self.encode(texts[0])
        fields = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        return BatchEncoding(fields, tensor_type=kwargs.get("return_tensors"))


def keep_tokens(tokenizer: Any) -> None:
    """Make a tokenizer of transformers give back the ids that it has decoded; changes this object only.

    SGLang's processors decode a prompt, put media into the text and encode it anew. Sampled ids are often not those
    that their text is encoded to, so the model would see other tokens than it had sampled. And text that only looks
    like a place for media would become one.
    """
    if not isinstance(tokenizer, _Kept):
        tokenizer._written = frozenset(tokenizer.get_added_vocab().values())
        tokenizer.__class__ = type("Kept", (_Kept, type(tokenizer)), {})


def let_go(tokenizer: Any) -> None:
    """Undo `keep_tokens`."""
    _, tokenizer.__class__ = type(tokenizer).__bases__


def has_own_places(processor: Any, tokenizer: Any) -> bool:
    """Whether each place for media of SGLang's processor is a token of its own, so that a kept prompt shows it.

    Some models write it as a text, of tokens that other texts have, too. Some processors do not say what they write.
    tokenizer: one that keeps its tokens.
    """
    if (told := getattr(processor, "mm_tokens", None)) is None:
        return False
    given = [getattr(told, f"{kind}_token", None) or [] for kind in KINDS]
    texts = [text for one in given for text in ([one] if isinstance(one, str) else one)]
    return all(
        token in tokenizer._written for text in texts for token in tokenizer.encode(text, add_special_tokens=False)
    )


def place_media(request: EngineRequest, processor: Any) -> dict[str, Any]:
    """Return what differs for a request with media among the arguments that `generate_arguments` makes. Slow.

    processor: SGLang's. Raises RequestRefused unless the prompt has as many places as there are media.
    """
    ids: list[int] = request.token_ids.tolist()
    _check_pictures(request.media)
    if any(one.data is not None and one.data.startswith(NUMPY) for one in request.media):
        ids, frames = _with_frames(ids, request.media, processor)
        # SGLang tells videos apart by their frames alone, and would give one the cached prefix of the other.
        key = "/".join([request.cache_key, *(str(one.fps) for one in request.media)])
        return {"input_ids": ids, "video_data": [frames], "extra_key": key}
    return {"input_ids": _placed(ids, request.media, processor)}


def _check_pictures(media: Sequence[Medium]) -> None:
    """Raises RequestRefused for a picture that PIL would not decode, such as one of far more pixels than bytes.

    SGLang takes that for an error of its own, and its worker for one of the engine.
    """
    for number, one in enumerate(media):
        if one.kind == "image" and one.data is not None:
            from PIL import Image  # noqa: PLC0415 – only where media come

            try:
                Image.open(io.BytesIO(one.data)).close()
            except Exception as error:  # each format has errors of its own
                raise RequestRefused(f"media.{number}: {type(error).__name__}: {shortly(str(error))}") from error


def _placed(placed: list[int], media: Sequence[Medium], processor: Any) -> list[int]:
    """Return the ids with one token of its kind's placeholder for each medium. A run of them may stand for one."""
    if not getattr(processor, KEPT, False):
        return placed  # only SGLang's processor knows the places
    for kind in KINDS:
        token, count = getattr(processor.mm_tokens, f"{kind}_token_id", None), sum(one.kind == kind for one in media)
        if token is None and count:
            raise RequestRefused(f"media: {count} of kind {kind}: this model takes none")
        if token is not None and placed.count(token) != count:
            runs = [[token] if found == token else list(run) for found, run in groupby(placed)]
            placed = [one for run in runs for one in run]
        if (places := placed.count(token) if token is not None else 0) != count:
            raise RequestRefused(f"media: {count} of kind {kind} for {places} places (token {token}) in the prompt")
    return placed


def _with_frames(ids: list[int], media: Sequence[Medium], processor: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the ids with all tokens of each video, and the videos in SGLang's form.

    SGLang would count an array's frames as 24 a second. So the model's own processor makes its features here.
    """
    if not all(one.data is not None and one.data.startswith(NUMPY) for one in media):
        raise RequestRefused("media: arrays of frames cannot be beside files; give the video as a file")
    reader, token = processor._processor.video_processor, processor.mm_tokens.video_token_id
    videos = [_frames(number, one.data or b"") for number, one in enumerate(media)]
    about = [
        {"fps": one.fps, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        for one, frames in zip(media, videos, strict=True)
    ]
    found = reader(videos=videos, video_metadata=about, do_sample_frames=False, return_tensors="pt")
    counts = [int(grid.prod()) // reader.merge_size**2 for grid in found["video_grid_thw"]]
    if ids.count(token) == len(counts) and processor.model_type.startswith("qwen2"):
        left = iter(counts)
        ids = [one for found in ids for one in [found] * (next(left) if found == token else 1)]
    if ids.count(token) != sum(counts):
        raise RequestRefused(f"media: {ids.count(token)} tokens in the prompt for videos of {counts} tokens")
    return ids, {
        "format": "processor_output",
        "pixel_values_videos": found["pixel_values_videos"],
        "video_grid_thw": found["video_grid_thw"],
        "second_per_grid_ts": [reader.temporal_patch_size / one.fps for one in media],
    }


def _frames(number: int, data: bytes) -> npt.NDArray[np.uint8]:
    try:
        file, header = io.BytesIO(data), cast("Any", np.lib.format)
        if header.read_magic(file) != (1, 0):
            raise ValueError("another version of the format than 1.0")
        # Not np.load: it takes the memory that the header asks for before it looks at what is there.
        shape, by_columns, dtype = header.read_array_header_1_0(file)
    except (ValueError, EOFError, OSError) as error:
        raise RequestRefused(f"media.{number}: no array of NumPy: {error}") from error
    if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8 or by_columns or not all(shape):
        raise RequestRefused(f"media.{number}: {dtype} {shape}, not uint8 (frames, height, width, 3) in C order")
    if math.prod(shape) != (size := len(data) - file.tell()):
        raise RequestRefused(f"media.{number}: {size} bytes of frames for the shape {shape}")
    return np.frombuffer(data, np.uint8, offset=file.tell()).reshape(shape)
