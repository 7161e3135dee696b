"""The server of a replica: verl's requests as jobs of the pool. verl runs it as a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...messages.dialects import job_fields
from ...messages.errors import FeatureUnavailable, InvalidField, JobFailed
from ...messages.model import MediaKind, Medium
from ..calls import LastWorkers
from ..client import RolloutClient
from ..data import medium
from .settings import PoolSettings

BOTH = ("max_new_tokens", "max_tokens")
_BASE = np.uint64(0x9E3779B97F4A7C15)


class PoolServer:
    """Generates over the pool what verl's agent loops ask of a replica.

    Guarantees: a request that returns has all its tokens, each once, whatever workers die meanwhile. A request starts
    on weights at most `max_staleness` versions behind the newest committed one. A sample that an update interrupts is
    continued by the workers; verl need not abort and resume it. A prompt that goes on from an answer prefers the worker
    that gave it, whose cache has the prefix. It is found by its tokens: verl gives every turn a request id of its own.

    Args:
        settings: which pool.
        prompt_length: verl's, in tokens. It and `response_length` bound requests that name no `max_tokens`.
        response_length: verl's, in tokens.
        max_model_len: the longest prompt and response together, in tokens; None leaves that to the engines.
        logprobs_mode: verl's; "processed_logprobs" are taken after temperature, "raw_logprobs" before it.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        prompt_length: int,
        response_length: int,
        max_model_len: int | None = None,
        logprobs_mode: str | None = "processed_logprobs",
    ) -> None:
        self._settings, self._logprobs_mode = settings, logprobs_mode
        self._prompt_length, self._response_length, self._longest = prompt_length, response_length, max_model_len
        self._client: RolloutClient | None = None
        self._steps: dict[int, int | None] = {}
        self._workers = LastWorkers()

    async def generate(  # noqa: PLR0917 – verl's own order
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the fields of verl's TokenOutput for one sample.

        token_ids: list of int. log_probs: list of float, or None if the parameters did not ask for them. stop_reason:
        "stop", "length" or "abort". extra_fields: `global_steps` and `max_global_steps` of the weights that sampled the
        last token, `min_global_steps` of those that sampled the first one, `num_cached_tokens` of the prompt.

        prompt_ids: a medium's place in them may be one token, or as many as the model's processor makes of it.
        image_data, video_data, audio_data: all of the prompt, in order, as `rolloutmq.producer.data.medium` takes them.
            Of a video's frames and audio's samples nothing is lost.
        mm_processor_kwargs: `sampling_rate` of audio_data, in Hz.

        Raises InvalidField for a parameter or a medium that cannot be honoured, FeatureUnavailable for other arguments
        of a processor, and JobFailed if the pool gave the request up.
        """
        media: tuple[Medium, ...] = ()
        if image_data or video_data or audio_data:
            given: dict[MediaKind, Any] = {"image": image_data, "video": video_data, "audio": audio_data}
            media = await asyncio.to_thread(_media, given, dict(mm_processor_kwargs or {}))
        prompt, params = [int(token) for token in prompt_ids], dict(sampling_params)
        room = self._room(len(prompt), [params.pop(name, None) for name in BOTH])
        if room == 0:
            return {
                "token_ids": [],
                "log_probs": [],
                "stop_reason": "length",
                "extra_fields": self._fields(None, None, 0),
            }
        if params.get("logprobs"):
            params.setdefault("logprobs_mode", self._logprobs_mode)
        fields = job_fields({**params, "max_new_tokens": room}, "verl")
        (group,) = await self._open().generate(
            [prompt],
            **fields | ({"media": media} if media else {}),
            max_staleness=self._settings.max_staleness,
            trace_id=request_id[:64],
            prefer_worker=next(filter(None, map(self._workers.get, reversed(_beginnings(prompt)))), None),
            prefer_s=self._settings.prefer_s,
        )
        if group.failures:
            raise JobFailed(group.failures[0])
        (result,) = group.results
        answer = result.token_ids.tolist()
        # Without its last token, for which some chat templates put another one before the next turn.
        self._workers.note(_beginnings([*prompt, *answer])[-2 if len(answer) > 1 else -1], result.worker_id)
        versions = [segment.version for segment in result.segments]
        first, last = (versions[0], versions[-1]) if versions else (None, None)
        return {
            "token_ids": answer,
            "log_probs": None if result.logprobs is None else result.logprobs.tolist(),
            "stop_reason": result.finish_reason,
            "extra_fields": self._fields(first, last, result.cached_tokens),
        }

    async def set_global_steps(self, version: int, global_steps: int | None) -> None:
        """Note which of the trainer's steps a version of the weights is from."""
        self._steps[version] = global_steps

    async def aclose(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _room(self, prompt: int, limits: Sequence[Any]) -> int:
        """How many tokens a request may generate; 0 where its prompt leaves none. As in verl's own servers."""
        given = next((limit for limit in limits if limit is not None), None)
        if given is None:
            given = min(self._response_length, self._prompt_length + self._response_length - prompt)
        elif not isinstance(given, int) or isinstance(given, bool):
            raise InvalidField("max_tokens", given, "a count of tokens")
        return max(0, given if self._longest is None else min(given, self._longest - prompt - 1))

    def _fields(self, first: int | None, last: int | None, cached: int) -> dict[str, Any]:
        oldest, newest = (None if version is None else self._steps.get(version) for version in (first, last))
        steps = {"global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest}
        return {**steps, "num_cached_tokens": cached}

    def _open(self) -> RolloutClient:
        if self._client is None:  # on the loop that runs the requests
            self._client = RolloutClient(self._settings.redis_url, self._settings.pool)
        return self._client


def _media(given: Mapping[MediaKind, Sequence[Any] | None], arguments: dict[str, Any]) -> tuple[Medium, ...]:
    """A job's media of verl's. arguments: of the model's processor."""
    rate = arguments.pop("sampling_rate", None)
    for name, value in arguments.items():
        why = "absent beside media: workers use the model's own preprocessor_config.json"
        raise FeatureUnavailable(f"mm_processor_kwargs.{name}", value, why)
    return tuple(
        medium(kind, (one, rate) if kind == "audio" and rate and hasattr(one, "shape") else one)
        for kind, several in given.items()
        for one in several or ()
    )


def _beginnings(ids: Sequence[int]) -> list[int]:
    """A hash of each beginning of the tokens, the shortest first."""
    powers = _BASE ** np.arange(len(ids), dtype=np.uint64)
    hashes: list[int] = np.cumsum((np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(1)) * powers).tolist()
    return hashes
