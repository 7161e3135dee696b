"""The bytes of tokens, for the kinds of tokenizers there are: together they are what the tokenizer itself decodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.stops.pieces import Windowed, pieces_of

TEXTS = ("Hello there", "a b", " 5€ ", "😀x", "naïve\n\ttext", "日本")


def made(kind: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    if kind == "byte level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: place for place, token in enumerate([*alphabet, "th", "the"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abHelothr5x", "▁th"]
        tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    from rolloutmq.worker.cpu_support import prepare_transformers  # noqa: PLC0415

    prepare_transformers()
    return made(request.param)


@given(st.lists(st.sampled_from(TEXTS), max_size=5).map("<|im_end|>".join))
def test_all_pieces_are_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    piece = pieces_of(tokenizer)()
    assert b"".join(map(piece, ids)).decode() == text
    if "th" in tokenizer.get_vocab():  # byte level: what a window of tokens says does not change with those after it
        windowed = Windowed(lambda some: tokenizer.decode(some, skip_special_tokens=False))
        assert b"".join(map(windowed, ids)).decode() == text


def test_ids_beyond_the_vocabulary_add_nothing(tokenizer: Any) -> None:
    assert pieces_of(tokenizer)()(len(tokenizer) + 5) == b""


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"json_schema": "{"}, "json_schema\n.*not JSON"),
        ({"json_schema": "[1]"}, "json_schema\n.*an object or a boolean, got list"),
        ({"regex": "a\0"}, "regex\n.*NUL"),
        ({"stop_regex": ("a", "(")}, "stop_regex\n.*'\\(' is not a regular expression"),
        ({"stop_regex": ("a*",)}, "stop_regex\n.*'a\\*' matches the empty text"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf together"),
        ({"logit_bias": {7: 1e308}}, "logit_bias.7\n.*less than or equal to 10000"),
        ({"logit_bias": {7: float("nan")}}, "logit_bias.7\n.*finite number"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty\n.*greater than or equal to 0.01"),
    ],
)
def test_what_can_be_seen_at_submission_is_refused_there(bad: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SamplingParams.model_validate(bad)
    assert SamplingParams(json_schema="true", stop_regex=("a+",)).json_schema == "true"
