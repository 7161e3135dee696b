"""How tokens are drawn, which log-probabilities come back, and what may change logits on the way."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from .base import MAX_TOKENS, Name

TokenId = Annotated[int, Field(ge=0)]
GRAMMARS = ("json_schema", "regex", "ebnf")


class SamplingParams(BaseModel):
    """How tokens are drawn. Names and meanings are SGLang's, where it has them.

    max_new_tokens: most tokens generated for one sample. min_new_tokens: no stop of any kind ends it earlier.
    temperature: 0 is greedy.
    top_k: -1 keeps the whole vocabulary.
    stop_token_ids: end the sample.
    stop: texts that end the sample as soon as the text of its generated tokens contains one.
    stop_regex: regular expressions (Python's syntax) that end it as soon as that text has a match.
    stop_token_sequences: runs of token ids that end it; needs no tokenizer.
    include_stop: whether what ended the sample is a part of the result. False takes it off, with its logprobs: the
        token, or every token that has a part of the matched text; `text` then ends where the match begins.
    ignore_eos: the model's own end-of-sequence tokens do not end it.
    json_schema, regex, ebnf: at most one: the sample's text follows it. A JSON schema is JSON text.
    logit_bias: token id -> added to its logit before sampling.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(default=128, ge=1, le=MAX_TOKENS)
    min_new_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, le=1 << 30)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=64)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(default=(), max_length=32)
    stop_regex: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=32)
    stop_token_sequences: tuple[Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=32
    )
    include_stop: bool = True
    ignore_eos: bool = False
    json_schema: str | None = Field(default=None, min_length=1, max_length=1 << 20)
    regex: str | None = Field(default=None, min_length=1, max_length=1 << 16)
    ebnf: str | None = Field(default=None, min_length=1, max_length=1 << 18)
    logit_bias: dict[TokenId, FiniteFloat] = Field(default_factory=dict, max_length=1024)

    @field_validator("top_k")
    @classmethod
    def _top_k_zero_is_no_set(cls, value: int) -> int:
        if value == 0:
            raise ValueError("-1 for the whole vocabulary, or a positive count")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens}: at most max_new_tokens={self.max_new_tokens}")
        if len(given := [name for name in GRAMMARS if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} together: at most one of {', '.join(GRAMMARS)}")
        return self


class LogprobOptions(BaseModel):
    """Which log-probabilities come back. Off saves 4 bytes a token, nothing in the engine.

    sampled: of each generated token.
    top: the N most likely tokens at each position.
    prompt: of the prompt's own tokens.
    token_ids: of these ids at each position.
    kind: "raw" is of the model's own distribution with logit bias and penalties; "scaled" divides by the temperature
        first. Neither knows of top_k, top_p and min_p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampled: bool = True
    top: int = Field(default=0, ge=0, le=64)
    prompt: bool = False
    token_ids: tuple[TokenId, ...] = Field(default=(), max_length=1024)
    kind: Literal["raw", "scaled"] = "raw"


class LogitProcessor(BaseModel):
    """A logit processor registered on the worker, by name; code never travels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    params: dict[str, Any] = Field(default_factory=dict, max_length=64)
