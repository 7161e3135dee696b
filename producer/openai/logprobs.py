"""Log-probabilities in OpenAI's form, with each token's text and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from typing import Any

from ...messages.model import RolloutResult

Decode = Callable[[Sequence[int]], str]
TokenBytes = Callable[[int], bytes]
IMPOSSIBLE = -30_000.0
"""What stands for a log-probability that is no finite number: of a token that a grammar or mask excludes.

It is less than any that logit biases of -10,000 and 10,000 can make, fits a half-precision float, so that sums and
differences stay finite, and is not the -9999.0 by which OpenAI's clients know "not among the likeliest"."""
_UNKNOWN = "\ufffd"
"""What tokenizers show for bytes that are no whole character."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
"""The characters by which byte-level tokenizers (GPT-2's and its successors) write bytes in their vocabularies."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Consecutive tokens. top: the likeliest (id, logprob) pairs at each position, if the request asked for them.

    All log-probabilities are finite.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None = None

    @classmethod
    def of(cls, token_ids: Any, logprobs: Any, arrays: Any) -> Tokens:
        """From the arrays of a RolloutResult or a Delta."""
        ids = token_ids.tolist()
        top = None
        if "top_ids" in arrays:
            rows = zip(arrays["top_ids"].tolist(), arrays["top_logprobs"].tolist(), strict=True)
            top = [list(zip(names, _finite(values), strict=True)) for names, values in rows]
        return cls(ids, _finite(logprobs.tolist()) if logprobs is not None else [0.0] * len(ids), top)


def _finite(values: list[float]) -> list[float]:
    return [value if isfinite(value) else IMPOSSIBLE for value in values]


def chat_logprobs(
    tokens: Tokens, decode: Decode | None, token_bytes: TokenBytes | None = None, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """{"content": [{"token", "token_id", "logprob", "bytes", "top_logprobs"}]}, one entry for each token.

    bytes: None without `decode`, and for a token with a part of a character, if there is no `token_bytes`.
    ids_as_tokens: `token` is "token_id:<id>". It is so without `decode`, too.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _text(token, decode)
        shown = _text(token, None) if ids_as_tokens else text
        # With ids as tokens, as vLLM: of the text that is shown. ART takes parts of characters for broken text.
        raw = _bytes(token, text, token_bytes, ids_as_tokens) if decode is not None else None
        return {"token": shown, "token_id": token, "logprob": logprob, "bytes": raw}

    content = []
    for place, (token, logprob) in enumerate(zip(tokens.ids, tokens.logprobs, strict=True)):
        top = tokens.top[place] if tokens.top is not None else []
        content.append(entry(token, logprob) | {"top_logprobs": [entry(*one) for one in top]})
    return {"content": content}


def completion_logprobs(
    tokens: Tokens, decode: Decode | None, offset: int = 0, ids_as_tokens: bool = False
) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}. offset: characters of text before these tokens.

    top_logprobs: the sampled token, always, and the likeliest ones, if the request asked for them.
    """
    texts = [_text(token, decode) for token in tokens.ids]
    offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
    shown = None if ids_as_tokens else decode
    rows = tokens.top if tokens.top is not None else [[]] * len(texts)
    sampled = zip(tokens.ids, tokens.logprobs, strict=True)
    return {
        "tokens": [_text(token, None) for token in tokens.ids] if ids_as_tokens else texts,
        "token_logprobs": tokens.logprobs,
        "top_logprobs": [_by_text(dict([one, *row]).items(), shown) for one, row in zip(sampled, rows, strict=True)],
        "text_offset": offsets,
    }


def prompt_logprobs(sample: RolloutResult) -> list[dict[str, Any] | None] | None:
    """The prompt's log-probabilities as vLLM shows them, by position: token id, as text -> {"logprob", "rank"}.

    rank: among those that are shown. None for the first token; nothing at all if the job did not ask for them.
    """
    own, prompt = sample.arrays.get("prompt_logprobs"), sample.prompt_ids
    if own is None or prompt is None:
        return None
    rows: list[dict[str, Any] | None] = [None]
    ids, tops = sample.arrays.get("prompt_top_ids"), sample.arrays.get("prompt_top_logprobs")
    for place in range(1, prompt.size):
        row: dict[int, float] = {}
        if ids is not None and tops is not None:
            row = dict(zip(ids[place].tolist(), _finite(tops[place].tolist()), strict=True))
        (row[int(prompt[place])],) = _finite([float(own[place])])
        ranked = enumerate(sorted(row, key=row.__getitem__, reverse=True), 1)
        rows.append({str(it): {"logprob": row[it], "rank": rank, "decoded_token": None} for rank, it in ranked})
    return rows


def _by_text(row: Iterable[tuple[int, float]], decode: Decode | None) -> dict[str, float]:
    """Text -> logprob. Of several tokens with one text, the first has the text, and the others have their ids."""
    found: dict[str, float] = {}
    for token, value in row:
        text = _text(token, decode)
        found[text if text not in found else _text(token, None)] = value
    return found


@lru_cache(1 << 17)
def _text(token: int, decode: Decode | None) -> str:
    return decode([token]) if decode is not None else f"token_id:{token}"


def _bytes(token: int, text: str, token_bytes: TokenBytes | None, as_shown: bool) -> list[int] | None:
    if as_shown or _UNKNOWN not in text:
        return list(text.encode())
    return list(token_bytes(token)) if token_bytes is not None else None


def bytes_reader(tokenizer: Any) -> TokenBytes | None:
    """A function that gives a token's own bytes, also if they are only a part of a character.

    tokenizer: one of transformers or tokenizers. It writes bytes in its vocabulary as byte-level BPE does, or as
        <0xE2>. Of an object that does not name its tokens the answer is None.
    """
    token_of = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(tokenizer, "id_to_token", None)
    if not callable(token_of):
        return None

    def token_bytes(token: int) -> bytes:
        written = str(token_of(token))
        if single := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(single[1], 16)])
        try:
            return bytes(_BYTE_OF[char] for char in written)
        except KeyError:  # it is no byte-level token
            return written.encode()

    return token_bytes
