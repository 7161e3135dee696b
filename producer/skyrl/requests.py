"""A batch of prompts as SkyRL gives it, as jobs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ...messages.dialects import job_fields
from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, LogprobOptions
from .texts import Texts
from .types import InferenceEngineInput

KEYS = frozenset(InferenceEngineInput.__annotations__)
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
MEDIA = ("image_data", "video_data", "audio_data")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the output is to have beside tokens and texts."""

    logprobs: bool = False
    hidden_states: bool = False
    routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """jobs: one per prompt, in order, all with the same n."""

    jobs: list[GenerateJob]
    n: int
    wishes: Wishes


def prompts_of(input_batch: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """("prompts" or "prompt_token_ids", what is in it). Raises InvalidField naming the key that is wrong."""
    if strange := sorted(map(str, input_batch.keys() - KEYS)):
        raise InvalidField(strange[0], input_batch[strange[0]], f"one of {', '.join(sorted(KEYS))}")
    given = [name for name in ("prompts", "prompt_token_ids") if input_batch.get(name) is not None]
    if len(given) != 1:
        raise InvalidField("prompts", given, "exactly one of prompts and prompt_token_ids")
    prompts = input_batch[given[0]]
    if not isinstance(prompts, list | tuple) or not prompts:
        raise InvalidField(given[0], prompts, "a list of prompts, at least one")
    for name in ("session_ids", *MEDIA):
        beside = input_batch.get(name)
        if beside is not None and (not isinstance(beside, list | tuple) or len(beside) != len(prompts)):
            raise InvalidField(name, beside, f"a list of {len(prompts)} entries, one for each prompt")
    return given[0], list(prompts)


def sampling_fields(params: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Sampling parameters as fields of a job, and whether log-probabilities were asked for. Raises InvalidField."""
    fields = job_fields(params, "skyrl")
    asked = params.get("logprobs") is not None or "logprobs" in fields
    options: LogprobOptions = fields.get("logprobs", LogprobOptions())
    if not asked:
        fields["logprobs"] = LogprobOptions(sampled=False)
    return fields, asked and options.sampled


def session_name(session_id: Hashable) -> str:
    """A session id of any kind as a name; the same for equal ones, whatever the process."""
    text = str(session_id)
    return text if _NAME.fullmatch(text) else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_batch(input_batch: Mapping[str, Any], defaults: Mapping[str, Any], texts: Texts) -> Batch:
    """Jobs for a batch. Raises InvalidField, naming the key that is wrong; ConfigError without a tokenizer to use."""
    form, prompts = prompts_of(input_batch)
    params = input_batch.get("sampling_params")
    fields, logprobs = sampling_fields(defaults if params is None else params)
    hidden = input_batch.get("return_hidden_states")
    if hidden:
        fields["hidden_states"] = hidden if isinstance(hidden, str) else "all"
    if input_batch.get("return_routed_experts"):
        fields["routed_experts"] = True
    wishes = Wishes(logprobs, fields.get("hidden_states", "none") != "none", bool(fields.get("routed_experts", False)))
    sessions = input_batch.get("session_ids")
    jobs = []
    for place, prompt in enumerate(prompts):
        own = dict(fields)
        if sessions is not None and sessions[place] is not None:
            own["session_id"] = session_name(sessions[place])
        media = {name: input_batch[name][place] for name in MEDIA if input_batch.get(name) is not None}
        jobs.append(_job(form, place, prompt, fields=own, media=media, texts=texts))
    return Batch(jobs, jobs[0].n, wishes)


def _job(
    form: str, place: int, prompt: Any, *, fields: dict[str, Any], media: dict[str, Any], texts: Texts
) -> GenerateJob:
    from .media import with_media  # noqa: PLC0415 – only where there is any

    if not hasattr(prompt, "__len__") or len(prompt) == 0:
        raise InvalidField(f"{form}[{place}]", prompt, "at least one " + ("message" if form == "prompts" else "token"))
    try:
        if any(value is not None for value in media.values()):
            return GenerateJob.build(**fields, **with_media(form, prompt, media))
        ids = prompt if form == "prompt_token_ids" else texts.encode_chat(prompt)
        return GenerateJob.build(**fields, token_ids=ids)
    except InvalidField as error:
        if error.field.split(".")[0] in {"token_ids", "messages", "media"} or not error.field:
            raise InvalidField(f"{form}[{place}].{error.field}", error.value, error.allowed) from None
        raise
