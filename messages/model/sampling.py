"""Sampling parameters, log-probability options and logit processors of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from re import _parser  # type: ignore[attr-defined]  # nothing else says what an expression can match
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, WrapValidator, field_validator, model_validator

from .base import MAX_TOKENS, Float, Int, Items, Name, PlainObject, Record

TokenId = Annotated[Int, Field(ge=0)]
GRAMMARS = ("json_schema", "regex", "ebnf")
MAX_BIAS = 10_000.0
"""This is more than any logit. A bias close to infinity would turn every probability into NaN."""
Bias = Annotated[Float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]

MAX_RANGES = 1 << 21
"""Characters in all ranges of all expressions. Python's compiler looks at each of them, twice where case is ignored."""


def _in_ranges(parsed: Any) -> int:
    """The number of characters in all ranges of a parsed expression."""
    if not isinstance(parsed, _parser.SubPattern | list | tuple):
        return 0
    if isinstance(parsed, tuple) and len(parsed) == 2 and parsed[0] is _parser.RANGE:
        return int(parsed[1][1] - parsed[1][0] + 1)
    return sum(map(_in_ranges, parsed))


_AS_SENT: TypeAdapter[dict[int, float]] = TypeAdapter(
    dict[Annotated[int, Field(strict=True, ge=0)], Annotated[float, Field(strict=True, ge=-MAX_BIAS, le=MAX_BIAS)]]
)


def _biases(value: Any, each: Callable[[Any], dict[int, float]]) -> dict[int, float]:
    """As pydantic alone checks it, if it is what senders send: looking at each item in Python takes five times as long,
    accepts numpy's numbers, too, and says what is wrong."""
    try:
        return _AS_SENT.validate_python(value)
    except ValidationError:
        return each(value)


class SamplingParams(Record):
    """How tokens are sampled. Names and meanings are SGLang's, where it has them.

    max_new_tokens: the most tokens generated for one sample. min_new_tokens: no stop ends the sample earlier.
    temperature: 0 is greedy.
    top_k: -1 keeps the whole vocabulary.
    stop_token_ids: each of these tokens ends the sample.
    stop: texts. The sample ends as soon as the text of its generated tokens contains one.
    stop_regex: regular expressions in Python's syntax, without references and lookahead. The sample ends as soon as
        its text has a match. docs/generation.md says which of several stops wins.
    stop_token_sequences: each of these runs of token ids ends the sample. They need no tokenizer.
    include_stop: whether the result contains the stop that ended the sample. False removes it with its logprobs: the
        token, or every token that has a part of the matched text. `text` then ends where the match begins. "token"
        does that to matched texts and runs of tokens, and keeps a single token: the model's own end, `stop_token_ids`.
    ignore_eos: the model's own end-of-sequence tokens do not end the sample.
    json_schema, regex, ebnf: at most one of them. The whole text of the sample follows it. A JSON schema is JSON text.
    logit_bias: token id -> number that is added to its logit before sampling. -10,000 excludes the token, as long as
        there is another one.
    """

    OTHER_WORDS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("n", "seed", "logprobs", "lora", "stream", "logit_processors"), "a field of the job, beside `sampling`"
    )

    max_new_tokens: Int = Field(default=128, ge=1, le=MAX_TOKENS)
    min_new_tokens: Int = Field(default=0, ge=0, le=MAX_TOKENS)
    temperature: Float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: Float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: Int = Field(default=-1, ge=-1, le=1 << 30)
    min_p: Float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: Float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: Float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: Float = Field(default=1.0, ge=0.01, le=2.0)  # logits are divided by it, and stay finite
    stop_token_ids: Items[TokenId] = Field(default=(), max_length=64)
    stop: Items[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default=(), max_length=32)
    stop_regex: Items[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default=(), max_length=32)
    stop_token_sequences: Items[Annotated[Items[TokenId], Field(min_length=1, max_length=256)]] = Field(
        default=(), max_length=32
    )
    include_stop: bool | Literal["token"] = True
    ignore_eos: bool = False
    json_schema: str | None = Field(default=None, min_length=1, max_length=1 << 20)
    regex: str | None = Field(default=None, min_length=1, max_length=1 << 16)
    ebnf: str | None = Field(default=None, min_length=1, max_length=1 << 18)
    logit_bias: Annotated[dict[TokenId, Bias], WrapValidator(_biases)] = Field(default_factory=dict, max_length=1024)

    @field_validator("top_k")
    @classmethod
    def _top_k_zero_is_no_set(cls, value: int) -> int:
        if value == 0:
            raise ValueError("-1 for the whole vocabulary, or a positive count")
        return value

    @field_validator("stop_regex")
    @classmethod
    def _stop_regex_is_one(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        left = MAX_RANGES
        for expression in value:
            try:
                # This does not run the expression: for some that takes forever, even on an empty text.
                parsed = _parser.parse(expression)
                if (left := left - _in_ranges(parsed)) < 0:
                    raise ValueError(f"ranges of more than {MAX_RANGES} characters in all expressions together")
                re.compile(expression)
                empty = parsed.getwidth()[0] == 0
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{expression!r} is not a regular expression: {error}") from None
            if empty:
                raise ValueError(f"{expression!r} matches the empty text: it would end every sample at once")
        return value

    @field_validator("json_schema")
    @classmethod
    def _json_schema_is_one(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a JSON schema is an object or a boolean, got {type(schema).__name__}")
        return value

    @field_validator(*GRAMMARS)
    @classmethod
    def _no_grammar_has_nul(cls, value: str | None) -> str | None:
        if value is not None and ("\0" in value or "\\u0000" in value):
            raise ValueError("NUL characters are not allowed in a grammar")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens}: at most max_new_tokens={self.max_new_tokens}")
        if len(given := [name for name in GRAMMARS if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} together: at most one of {', '.join(GRAMMARS)}")
        return self


class LogprobOptions(Record):
    """Which log-probabilities the results contain.

    sampled: one for each generated token. False saves 4 bytes per token, and nothing in the engine.
    top: those of the N most likely tokens at each position.
    prompt: those of the prompt's own tokens.
    token_ids: those of these ids at each position.
    kind: "raw" is taken from the model's own distribution with logit bias and penalties. "scaled" divides the logits by
        the temperature first. top_k, top_p and min_p change neither.
    """

    sampled: bool = True
    top: Int = Field(default=0, ge=0, le=64)
    prompt: bool = False
    token_ids: Items[TokenId] = Field(default=(), max_length=1024)
    kind: Literal["raw", "scaled"] = "raw"

    def sizes(self, generated: int, prompt: int) -> list[tuple[str, int, int]]:
        """(option, bytes for each token, tokens) of the arrays of a sample and its prompt, both counted in tokens."""
        rows = generated + (prompt if self.prompt else 0)
        return [("logprobs.top", 8 * self.top, rows), ("logprobs.token_ids", 4 * len(self.token_ids), rows)]


class LogitProcessor(Record):
    """A logit processor by the name under which the worker has it. Code never travels."""

    name: Name
    params: PlainObject = Field(default_factory=dict, max_length=64)
