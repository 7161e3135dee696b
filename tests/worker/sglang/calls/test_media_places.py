"""What is done to a request with media before SGLang gets it: its tokens stay, and each medium has one place."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.specimens.tiny_vision import SPECIAL, TEMPLATE, byte_tokenizer

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model import Medium
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.cpu_support import prepare_transformers
from rolloutmq.worker.engine.protocol import EngineRequest
from rolloutmq.worker.sglang.calls.media import KEPT, has_own_places, keep_tokens, let_go, place_media

START, END, IMAGE, VIDEO = (
    SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")
)


def png(width: int) -> bytes:
    """A square picture, all black; small, however wide it is."""
    out = io.BytesIO()
    Image.new("1", (width, width)).save(out, format="PNG")
    return out.getvalue()


PICTURE = Medium(kind="image", data=png(28))


def processor(**tokens: int | None) -> Any:
    ids = SimpleNamespace(**{f"{kind}_token_id": token for kind, token in tokens.items()})
    return SimpleNamespace(mm_tokens=ids, **{KEPT: True})


def request(ids: list[int], *media: Medium) -> EngineRequest:
    return EngineRequest("r", np.array(ids, np.int32), SamplingParams(), 4, "key", media=media)


_SHAPE = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999, 9999, 9999, 3), }".ljust(117) + b"\n"
LARGE = b"\x93NUMPY\x01\x00" + len(_SHAPE).to_bytes(2, "little") + _SHAPE + b"\x00\x00"
"""What asks for three petabytes."""


def npy(array: np.ndarray) -> Medium:
    out = io.BytesIO()
    np.save(out, array)
    return Medium(kind="video", data=out.getvalue())


@pytest.mark.parametrize("copied", [False, True])
def test_a_tokenizer_gives_back_the_ids_that_it_decoded(copied: bool) -> None:
    prepare_transformers()
    tokenizer, vocabulary = byte_tokenizer(SPECIAL, TEMPLATE)
    other, _ = byte_tokenizer(SPECIAL, TEMPLATE)
    keep_tokens(tokenizer)
    keep_tokens(tokenizer)
    tokenizer = copy.deepcopy(tokenizer) if copied else tokenizer  # SGLang makes copies for its threads
    written = [vocabulary[letter] for letter in "<|image_pad|>"]  # by a user, not a place
    ids = [1, vocabulary["a"], vocabulary["b"], START, IMAGE, END, *written, vocabulary["ab"], 2]
    text = tokenizer.decode(ids)
    assert text.count("<|image_pad|>") == 1
    assert tokenizer([text])["input_ids"] == [tokenizer.encode(text)] == [ids]
    assert other([other.decode(ids)])["input_ids"] != [ids]
    grown = tokenizer([text.replace("<|image_pad|>", "<|image_pad|>" * 3)], padding=True, return_tensors="pt")
    assert grown["input_ids"].tolist() == [[*ids[:5], IMAGE, IMAGE, *ids[5:]]]
    assert grown["attention_mask"].tolist() == [[1] * (len(ids) + 2)]
    assert tokenizer("cab")["input_ids"] == other("cab")["input_ids"]  # what it did not decode


@pytest.mark.parametrize(
    ("ids", "media", "placed"),
    [
        ([1, START, IMAGE, END], 1, [1, START, IMAGE, END]),
        ([START, IMAGE, IMAGE, IMAGE, END, START, IMAGE, END], 2, [START, IMAGE, END, START, IMAGE, END]),
        ([IMAGE, IMAGE], 2, [IMAGE, IMAGE]),  # of a model that writes nothing between them
    ],
)
def test_a_run_of_places_is_one(ids: list[int], media: int, placed: list[int]) -> None:
    found = place_media(request(ids, *[PICTURE] * media), processor(image=IMAGE, video=VIDEO, audio=None))
    assert found == {"input_ids": placed}
    assert place_media(request(ids, *[PICTURE] * media), SimpleNamespace()) == {"input_ids": ids}


@pytest.mark.parametrize(("places", "media"), [(2, 1), (1, 2), (0, 1)])
def test_as_many_places_as_media(places: int, media: int) -> None:
    with pytest.raises(RequestRefused, match=f"media: {media} of kind image for {places} places"):
        place_media(request([START, IMAGE, END] * places, *[PICTURE] * media), processor(image=IMAGE))


@pytest.mark.parametrize(("data", "why"), [(png(30_000), "DecompressionBomb"), (b"\x89PNG\r\n\x1a\n", "Unidentified")])
def test_a_picture_that_cannot_be_decoded_is_refused_by_its_number(data: bytes, why: str) -> None:
    media = PICTURE, Medium(kind="image", data=data)
    with pytest.raises(RequestRefused, match=rf"media\.1: {why}"):
        place_media(request([IMAGE, IMAGE], *media), processor(image=IMAGE))


def test_what_the_model_does_not_take_is_refused() -> None:
    sound = Medium(kind="audio", data=b"RIFF    WAVE")
    with pytest.raises(RequestRefused, match="1 of kind audio: this model takes none"):
        place_media(request([1, 2], sound), processor(image=IMAGE, audio=None))


@pytest.mark.parametrize(
    ("place", "own"), [("<|vision_start|><|image_pad|><|vision_end|>", True), ("(picture)", False)]
)
def test_only_places_that_are_tokens_are_seen_in_what_is_kept(place: str, own: bool) -> None:
    prepare_transformers()
    tokenizer, _ = byte_tokenizer(SPECIAL, TEMPLATE)
    kind = type(tokenizer)
    keep_tokens(tokenizer)
    tokens = SimpleNamespace(image_token=place, video_token=None, audio_token=None)
    assert has_own_places(SimpleNamespace(mm_tokens=tokens), tokenizer) is own
    tokens.image_token = [place]
    assert has_own_places(SimpleNamespace(mm_tokens=tokens), tokenizer) is own
    assert not has_own_places(SimpleNamespace(), tokenizer)  # as SGLang's of LLaVA and Whisper
    let_go(tokenizer)
    assert type(tokenizer) is kind


@pytest.mark.parametrize(
    ("media", "why"),
    [
        ([npy(np.zeros((2, 28, 28, 3), np.float32))], "float32"),
        ([npy(np.zeros((2, 28, 28), np.uint8))], r"\(2, 28, 28\)"),
        ([Medium(kind="video", data=b"\x93NUMPY\x01\x00")], "no array"),
        ([npy(np.array([object()], dtype=object))], "object"),  # would be unpickled
        ([npy(np.asfortranarray(np.zeros((2, 28, 28, 3), np.uint8)))], "C order"),
        ([Medium(kind="video", data=LARGE)], r"2 bytes of frames for the shape \(9999999, 9999, 9999, 3\)"),
        ([npy(np.zeros((2, 28, 28, 3), np.uint8)), PICTURE], "beside files"),
    ],
)
def test_an_array_that_is_no_video_is_refused(media: list[Medium], why: str) -> None:
    made = SimpleNamespace(_processor=SimpleNamespace(video_processor=None), **vars(processor(video=VIDEO)))
    with pytest.raises(RequestRefused, match=why):
        place_media(request([VIDEO], *media), made)
