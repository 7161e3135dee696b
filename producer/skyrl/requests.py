"""Reads SkyRL's batches of prompts and makes jobs of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ...messages.dialects import job_fields
from ...messages.errors import FeatureUnavailable, InvalidField
from ...messages.model import GenerateJob, LogitProcessor, LogprobOptions, MediaKind, Medium, SamplingParams
from ..data import Texts, from_openai, medium

Conversation = list[dict[str, Any]]
"""Turns of `role` and `content`."""


class InferenceEngineInput(TypedDict, total=False):
    """A batch of prompts. It has exactly one of `prompts` and `prompt_token_ids`.

    prompts: conversations. prompt_token_ids: token ids, which are used as they are.
    sampling_params: in any dialect (SkyRL, vLLM, VERL, SGLang), `n` and `logprobs` among them. They replace all of the
        engine's own.
    session_ids: one per prompt. Prompts of one id go to the worker that has the prefix, if it has room.
    return_hidden_states, return_routed_experts: see InferenceEngineOutput.
    cache_salt: ignored. Prefixes are never shared across versions or adapters anyway.
    mm_features: None. vLLM's features of media cannot be used here.
    image_data, video_data, audio_data: one entry per prompt: text (path, URL, base64), bytes, a PIL image, a list of
        these, or None.
    """

    prompts: list[Conversation] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Hashable] | None
    return_hidden_states: bool | None
    return_routed_experts: bool | None
    cache_salt: str | None
    mm_features: list[Any] | None
    image_data: list[Any] | None
    video_data: list[Any] | None
    audio_data: list[Any] | None


KEYS = frozenset(InferenceEngineInput.__annotations__)
MEDIA: Mapping[str, MediaKind] = {"image_data": "image", "video_data": "video", "audio_data": "audio"}
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the output contains beside tokens and texts."""

    logprobs: bool = False
    top_logprobs: bool = False
    prompt_logprobs: bool = False
    hidden_states: bool = False
    routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """The jobs of a batch, and what its output contains. jobs: one per prompt, in order, all with the same n."""

    jobs: list[GenerateJob]
    wishes: Wishes


def prompts_of(input_batch: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """("prompts" or "prompt_token_ids", its value). Raises InvalidField, which names the wrong key."""
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
    if any(features is not None for features in input_batch.get("mm_features") or ()):
        why = "None: these are vLLM's; give image_data, video_data or audio_data"
        raise FeatureUnavailable("mm_features", "features of media", why)
    return given[0], list(prompts)


def sampling_fields(params: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Sampling parameters as fields of a job, and whether they ask for log-probabilities. Raises InvalidField.

    As in SkyRL's SGLang engine a response ends where its stop text begins, unless the parameters say otherwise.
    """
    processors = params.get("custom_logit_processor")
    fields = job_fields({name: params[name] for name in params if name != "custom_logit_processor"}, "skyrl")
    if processors is not None:
        fields["logit_processors"] = (*fields.get("logit_processors", ()), *parse_rl_logit_processor(processors))
    sampling: SamplingParams = fields.get("sampling", SamplingParams())
    if (sampling.stop or sampling.stop_regex) and "include_stop" not in sampling.model_fields_set:
        fields["sampling"] = sampling.model_copy(update={"include_stop": "token"})
    asked = params.get("logprobs") is not None or "logprobs" in fields
    options: LogprobOptions = fields.setdefault("logprobs", LogprobOptions(sampled=asked))
    return fields, asked and options.sampled


def create_rl_logit_processor(action_mask: Any = None, disallowed_tokens: Any = None) -> str | None:
    """The text of logit processors, for `custom_logit_processor` in sampling parameters; None without arguments.

    action_mask: the only tokens that may be sampled. disallowed_tokens: those that may not. Both are token ids, or one
    boolean for each token of the vocabulary. Raises InvalidField. The text has names and parameters, and no code.
    """
    asked = job_fields({"action_mask": action_mask, "disallowed_tokens": disallowed_tokens})
    processors: tuple[LogitProcessor, ...] = asked.get("logit_processors", ())
    return json.dumps([one.model_dump() for one in processors]) if processors else None


def parse_rl_logit_processor(text: str) -> list[LogitProcessor]:
    """The processors in a text of `create_rl_logit_processor`. Raises InvalidField for any other text."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
        if not isinstance(found, list) or not found:
            raise TypeError("no list of processors")
        return [LogitProcessor.model_validate(one) for one in found]
    except (TypeError, ValueError, RecursionError) as error:
        why = f"a text of create_rl_logit_processor, since code never travels ({error})"
        raise InvalidField("custom_logit_processor", text, why) from None


def session_name(session_id: Hashable) -> str:
    """A session id of any type as a name. Equal ids have equal names in every process."""
    text = str(session_id)
    return text if _NAME.fullmatch(text) else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_batch(
    input_batch: Mapping[str, Any], defaults: Mapping[str, Any], texts: Texts, lora: str | None = None
) -> Batch:
    """The jobs of a batch. lora: the adapter of parameters that name none.

    Raises InvalidField, which names the wrong key, and ConfigError without a tokenizer.
    """
    form, prompts = prompts_of(input_batch)
    params = input_batch.get("sampling_params")
    fields, logprobs = sampling_fields(defaults if params is None else params)
    if lora is not None:
        fields.setdefault("lora", lora)
    hidden = input_batch.get("return_hidden_states")
    if hidden:
        fields["hidden_states"] = hidden if isinstance(hidden, str) else "all"
    if input_batch.get("return_routed_experts"):
        fields["routed_experts"] = True
    options: LogprobOptions = fields["logprobs"]
    wishes = Wishes(
        logprobs,
        options.top > 0,
        options.prompt,
        fields.get("hidden_states", "none") != "none",
        bool(fields.get("routed_experts", False)),
    )
    sessions = input_batch.get("session_ids")
    jobs = []
    for place, prompt in enumerate(prompts):
        own = dict(fields)
        if sessions is not None and sessions[place] is not None:
            own["session_id"] = session_name(sessions[place])
        media = {name: input_batch[name][place] for name in MEDIA if input_batch.get(name) is not None}
        jobs.append(_job(form, place, prompt, fields=own, media=media, texts=texts))
    return Batch(jobs, wishes)


def _job(
    form: str, place: int, prompt: Any, *, fields: dict[str, Any], media: dict[str, Any], texts: Texts
) -> GenerateJob:
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


def with_media(form: str, prompt: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job for a prompt with media: ids as they are, or messages, which the worker tokenises.

    data: image_data, video_data and audio_data of the prompt: one source, a list of them, or None. If the conversation
    has no places for media, they go to the start of its last user message. Raises InvalidField. May block.
    """
    given = {name: value for name, value in data.items() if value is not None}
    media = {name: [medium(MEDIA[name], one) for one in _list(value)] for name, value in given.items()}
    found = [one for several in media.values() for one in several]
    if form == "prompt_token_ids":
        return {"token_ids": prompt, "media": tuple(found)}
    if places := [kind for message in prompt for kind in _places(message)]:
        return {"messages": tuple(prompt), "media": tuple(_in_order(places, media))}
    users = [place for place, message in enumerate(prompt) if message.get("role") == "user"]
    if not users:
        raise InvalidField("prompts", prompt, "a message of a user, whose the media are")
    conversation = [dict(message) for message in prompt]
    last = conversation[users[-1]]
    content = last.get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())
    last["content"] = [{"type": one.kind, one.kind: one} for one in found] + text
    messages, ordered = from_openai(conversation)
    return {"messages": messages, "media": ordered}


def _list(value: Any) -> list[Any]:
    # An array and what is told about it are one medium.
    if isinstance(value, tuple) and [hasattr(one, "shape") for one in value] == [True, False]:
        return [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _places(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    parts: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return [part["type"] for part in parts if isinstance(part, Mapping) and part.get("type") in MEDIA.values()]


def _in_order(places: Sequence[str], media: Mapping[str, list[Medium]]) -> list[Medium]:
    waiting = {MEDIA[name]: list(several) for name, several in media.items()}
    try:
        return [waiting[kind].pop(0) for kind in places]  # type: ignore[index]
    except (KeyError, IndexError):
        told = {MEDIA[name]: len(several) for name, several in media.items()}
        raise InvalidField("prompts", list(places), f"places for as many as there are: {told}") from None
