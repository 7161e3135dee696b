"""The rule for every sampling parameter of SGLang, vLLM, SkyRL, VERL and OpenAI.

A rule reads a name into fields of a GenerateJob. Or it ignores the name, because nothing about the job depends on it
here. Or it refuses the name, because ignoring it would change the samples or the results. A refused name is ignored if
its value is the default of its inventor (`unless`). None is ignored everywhere.

From: SGLang 0.5.17 and 0.5.23 (SamplingParams, GenerateReqInput), vLLM (SamplingParams, StructuredOutputsParams, and
its OpenAI server's older guided_* names), SkyRL (SamplingParams of its configuration), VERL (rollout configuration and
what its agent loop sends), OpenAI (chat and legacy completions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..model import SamplingParams
from . import readers as read

Dialect = Literal["auto", "sglang", "vllm", "skyrl", "verl", "openai"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for one name: `read` it into fields, ignore it (`why`), or refuse it (`refuse`) except for `unless`."""

    read: read.Reader | None = None
    why: str = ""
    refuse: str = ""
    unless: tuple[Any, ...] = ()


def _to(field: str) -> Rule:
    return Rule(read.to(field))


def _ignored(why: str) -> Rule:
    return Rule(why=why)


def _refused(why: str, *unless: Any) -> Rule:
    return Rule(refuse=why, unless=unless)


_TEXT = "ids come back as they were sampled; a job given as text gets its text without special tokens, too"
_DELIVERY = "how outputs are delivered is the client's call: results, groups or stream"
_CODE = "code never travels: register a processor on the workers and name it in logit_processors"
_BEAMS = "there is no beam search here"

NESTED = frozenset({"sampling", "sampling_params", "additional_kwargs", "sampling_kwargs", "extra_body"})
"""Names whose value is itself a mapping of sampling parameters."""

OWN: dict[str, Rule] = {
    **{name: _to(f"sampling.{name}") for name in SamplingParams.model_fields},
    "n": _to("n"),
    "seed": Rule(read.seed),
    "stream": Rule(read.switch("stream")),
    "lora": _to("lora"),
    "hidden_states": Rule(read.hidden_states),
    "routed_experts": Rule(read.switch("routed_experts")),
    "logit_processors": Rule(read.processors),
    "logprobs": Rule(read.count_of_logprobs),
    "top_k": Rule(read.top_k),
    "stop": Rule(read.texts("sampling.stop")),
    "stop_regex": Rule(read.texts("sampling.stop_regex")),
    "stop_token_ids": Rule(read.ids("sampling.stop_token_ids")),
    "logit_bias": Rule(read.logit_bias),
    "json_schema": Rule(read.json_schema),
    "include_stop": Rule(read.switch("sampling.include_stop")),
    "ignore_eos": Rule(read.switch("sampling.ignore_eos")),
}
"""This package's own names. Most are SGLang's, and many are common to all dialects."""

OTHERS: dict[str, Rule] = {
    # how long
    "max_tokens": _to("sampling.max_new_tokens"),
    "max_completion_tokens": _to("sampling.max_new_tokens"),
    "max_generate_length": _to("sampling.max_new_tokens"),
    "response_length": _to("sampling.max_new_tokens"),
    "max_response_length": _to("sampling.max_new_tokens"),
    "min_tokens": _to("sampling.min_new_tokens"),
    "min_response_length": _to("sampling.min_new_tokens"),
    "max_length": _refused("it counts the prompt, too: say max_new_tokens"),
    "min_length": _refused("it counts the prompt, too: say min_new_tokens", 0),
    # how many
    "num_return_sequences": _to("n"),
    "n_samples_per_prompt": _to("n"),
    "best_of": _refused("samples are not ranked here: ask for n and choose", 1),
    # how they are drawn
    "do_sample": Rule(read.do_sample),
    "sampling_seed": Rule(read.seed),
    "use_beam_search": _refused(_BEAMS, False),
    "beam_width": _refused(_BEAMS, 1),
    "num_beams": _refused(_BEAMS, 1),
    "length_penalty": _refused(_BEAMS, 1, 1.0, 0, 0.0),
    "early_stopping": _refused(_BEAMS, False),
    "thinking_token_budget": _refused("no limit for a part of the output is known here", -1),
    "repetition_detection": _refused("no stop at repetitions is known here: use stop_regex or repetition_penalty"),
    "trace_decode_token_ids": _refused("name the logit processor forced_tokens, or score the sequence"),
    "watermark": _refused("samples are not watermarked"),
    "watermarking": _refused("samples are not watermarked", False),
    # where they end
    "stop_strings": Rule(read.texts("sampling.stop")),
    "stop_sequences": Rule(read.texts("sampling.stop")),
    "stop_strs": Rule(read.texts("sampling.stop")),
    "stop_regex_strs": Rule(read.texts("sampling.stop_regex")),
    "include_stop_str_in_output": Rule(read.switch("sampling.include_stop")),
    "no_stop_trim": Rule(read.switch("sampling.include_stop")),
    "eos_token_id": _refused("the model's own end stays what it is: say stop_token_ids for further ones"),
    # what may be drawn
    "guided_json": Rule(read.json_schema),
    "guided_regex": _to("sampling.regex"),
    "guided_grammar": _to("sampling.ebnf"),
    "guided_choice": Rule(read.choice),
    "guided_json_object": Rule(read.any_json),
    "guided_decoding": Rule(read.structured),
    "structured_outputs": Rule(read.structured),
    "response_format": Rule(read.response_format),
    "guided_decoding_backend": _ignored("the grammar backend is the worker's setting"),
    "guided_whitespace_pattern": _refused("white space in JSON is the grammar backend's"),
    "structural_tag": _refused("structural tags are not supported: say json_schema, regex or ebnf"),
    "bad_words": _refused("a text is not one token: name ids in the logit processor disallowed_tokens", []),
    "allowed_token_ids": Rule(read.mask("only_tokens", some=True)),
    "action_mask": Rule(read.mask("only_tokens", some=True)),
    "disallowed_tokens": Rule(read.mask("no_tokens")),
    "logits_processors": _refused(_CODE, []),
    "custom_logit_processor": _refused(_CODE),
    "custom_params": _refused(
        "parameters of a custom processor: name processor and parameters in logit_processors", {}
    ),
    "extra_args": _refused("for plugins of vLLM, which has none of them here", {}),
    # what comes back
    "return_logprob": Rule(read.switch("logprobs.sampled")),
    "return_logprobs": Rule(read.switch("logprobs.sampled")),
    "top_logprobs": Rule(read.top_logprobs),
    "top_logprobs_num": Rule(read.top_logprobs),
    "prompt_logprobs": Rule(read.prompt_logprobs),
    "logprob_start_len": Rule(read.logprob_start),
    "token_ids_logprob": Rule(read.ids("logprobs.token_ids")),
    "logprob_token_ids": Rule(read.ids("logprobs.token_ids")),
    "logprobs_mode": Rule(read.logprob_kind),
    "prompt_logprob_token_ids": _refused("say logprob_token_ids and prompt_logprobs: every position has the same ids"),
    "prompt_logprob_start": _refused("prompt log-probabilities are of the whole prompt", 0),
    "flat_logprobs": _ignored("log-probabilities always come as packed arrays"),
    "return_text_in_logprobs": _ignored("log-probabilities come with ids: decode them at the client"),
    "return_hidden_states": Rule(read.hidden_states),
    "return_routed_experts": Rule(read.switch("routed_experts")),
    "enable_return_routed_experts": Rule(read.switch("routed_experts")),
    "routed_experts_prompt_start": _refused("routed experts are of the whole sequence", 0),
    "lora_path": _to("lora"),
    "lora_name": _to("lora"),
    "echo": _refused("the prompt's ids come back with a job given as text: there is no echo", False),
    "suffix": _refused("there is no fill-in-the-middle here", ""),
    "truncate_prompt_tokens": _refused("prompts are not cut here: cut them before", -1),
    "detokenize": _ignored(_TEXT),
    "skip_special_tokens": _ignored(_TEXT),
    "spaces_between_special_tokens": _ignored(_TEXT),
    "clean_up_tokenization_spaces": _ignored(_TEXT),
    "priority": Rule(read.priority),
    # how it is delivered
    "output_kind": _ignored(_DELIVERY),
    "stream_interval": _ignored(_DELIVERY),
    "stream_options": _ignored(_DELIVERY),
    "skip_clone": _ignored("about vLLM's own objects"),
    "user": _ignored("who asked is the client's id"),
    "cache_salt": _ignored("prefixes are never shared across weights versions or adapters anyway"),
    "skip_reading_prefix_cache": _ignored("a cached prefix gives the same numbers as one computed anew"),
    "_target_": _ignored("the class that Hydra would make of it"),
}
"""The names of the other dialects, and the reasons why some are ignored or refused."""

RULES: dict[str, Rule] = OWN | OTHERS

SIGNS: dict[Dialect, frozenset[str]] = {
    "skyrl": frozenset({"max_generate_length", "additional_kwargs"}),
    "verl": frozenset({"response_length", "max_response_length", "do_sample", "sampling_kwargs"}),
}
"""Names that only one dialect uses. They identify the dialect where it decides the meaning of a value."""

READ_BY: dict[Dialect, dict[str, Rule]] = {
    "vllm": {"priority": Rule(read.priority_downwards)},
    "skyrl": {"logprobs": Rule(read.sampled_only)},
    "verl": {"logprobs": Rule(read.sampled_only)},
}
"""Names with another meaning in one dialect: in SkyRL `logprobs=1` asks for the sampled token's only, and in vLLM a low
number is a high priority."""
