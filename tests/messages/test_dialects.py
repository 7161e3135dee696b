"""Sampling parameters in everybody's names."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages.dialects.names import DIALECTS, OTHERS, OWN, RULES
from rolloutmq.messages.dialects.translate import Dialect, job_fields, sampling_from
from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model.sampling import LogitProcessor, LogprobOptions

SAME = {
    "ours": {"sampling": {"max_new_tokens": 64, "min_new_tokens": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.9}},
    "sglang": {
        "sampling_params": {"max_new_tokens": 64, "min_new_tokens": 3, "stop": "x", "temperature": 0.5, "top_p": 0.9},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": -1,
    },
    "vllm": {"max_tokens": 64, "min_tokens": 3, "stop": "x", "temperature": 0.5, "top_p": 0.9, "logprobs": 2},
    "skyrl": {
        "max_generate_length": 64,
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "logprobs": 2,
        "additional_kwargs": {"min_tokens": 3},
    },
    "verl": {
        "response_length": 64,
        "sampling_kwargs": {"min_tokens": 3, "stop_strings": ["x"]},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "do_sample": True,
        "logprobs": True,
        "top_logprobs_num": 2,
    },
    "openai": {
        "max_completion_tokens": 64,
        "extra_body": {"min_tokens": 3},
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
    },
}


def refused(params: dict[str, Any], dialect: Dialect = "auto") -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        job_fields(params, dialect)
    return caught.value


@pytest.mark.parametrize("dialect", SAME)
def test_one_request_in_every_dialect_is_one_job(dialect: str) -> None:
    fields = job_fields(SAME[dialect], dialect if dialect in DIALECTS else "auto")  # type: ignore[arg-type]
    job = GenerateJob.build(token_ids=[1], **fields)
    wanted = SamplingParams(max_new_tokens=64, min_new_tokens=3, stop=("x",), temperature=0.5, top_p=0.9)
    assert job.sampling == wanted
    if dialect != "ours":
        assert job.logprobs == LogprobOptions(top=2)


def test_only_what_is_said_is_set() -> None:
    assert job_fields({}) == {}
    assert job_fields(dict.fromkeys(RULES)) == {}
    fields = job_fields({"temperature": 0.5, "max_tokens": None})
    assert list(fields) == ["sampling"]
    assert fields["sampling"].model_fields_set == {"temperature"}


@pytest.mark.parametrize("value", [-1, 0, 1 << 30])
def test_every_way_to_say_the_whole_vocabulary(value: int) -> None:
    assert job_fields({"top_k": value})["sampling"].top_k == -1


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"do_sample": False, "temperature": 0.7}, "temperature", 0.0),
        ({"do_sample": True, "temperature": 0.7}, "temperature", 0.7),
        ({"include_stop_str_in_output": False}, "include_stop", False),
        ({"no_stop_trim": True}, "include_stop", True),
        ({"logit_bias": {"7": -100, 8: 1}}, "logit_bias", {7: -100.0, 8: 1.0}),
        ({"stop": ["a", "", None]}, "stop", ("a",)),
        ({"stop_regex": "a+"}, "stop_regex", ("a+",)),
        ({"stop_token_ids": {9, 3}}, "stop_token_ids", (3, 9)),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x"),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["a.b", "c"]}, "regex", "(a\\.b|c)"),
        ({"structured_outputs": {"regex": "x", "json": None}}, "regex", "x"),
        ({"structured_outputs": SimpleNamespace}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"guided_json": '{"type": "array"}'}, "json_schema", '{"type": "array"}'),
    ],
)
def test_what_a_sampling_parameter_becomes(given: dict[str, Any], field: str | None, value: Any) -> None:
    if field is None:
        assert "named parts" in refused(given).allowed
    else:
        assert getattr(job_fields(given)["sampling"], field) == value


def test_a_schema_comes_as_text_object_model_or_response_format() -> None:
    class Answer(BaseModel):
        number: int

    schema = Answer.model_json_schema()
    given: list[dict[str, Any]] = [
        {"json_schema": json.dumps(schema)},
        {"guided_json": schema},
        {"guided_json": Answer},
        {"structured_outputs": {"json": schema}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            }
        },
    ]
    assert {job_fields(each)["sampling"].json_schema for each in given} == {json.dumps(schema)}


@pytest.mark.parametrize(
    ("given", "dialect", "options"),
    [
        ({"logprobs": 1}, "vllm", LogprobOptions(top=1)),
        ({"logprobs": 1}, "skyrl", LogprobOptions()),
        ({"logprobs": 1, "max_generate_length": 5}, "auto", LogprobOptions()),
        ({"sampling_params": {"logprobs": 1, "max_generate_length": 5}}, "auto", LogprobOptions()),
        ({"additional_kwargs": {"logprobs": 1}}, "auto", LogprobOptions()),
        ({"logprobs": 0}, "auto", LogprobOptions()),
        ({"logprobs": True}, "verl", LogprobOptions()),
        ({"logprobs": False}, "auto", LogprobOptions(sampled=False)),
        ({"logprobs": 2, "prompt_logprobs": 5}, "auto", LogprobOptions(top=5, prompt=True)),
        ({"prompt_logprobs": 0}, "auto", LogprobOptions(prompt=True)),
        ({"return_logprob": True, "logprob_start_len": 0}, "sglang", LogprobOptions(prompt=True)),
        ({"token_ids_logprob": [4, 5]}, "sglang", LogprobOptions(token_ids=(4, 5))),
        ({"logprobs_mode": "processed_logprobs"}, "vllm", LogprobOptions(kind="scaled")),
        ({"logprobs": {"top": 3}}, "auto", LogprobOptions(top=3)),
        ({"logprobs": LogprobOptions(top=3)}, "auto", LogprobOptions(top=3)),
    ],
)
def test_which_logprobs_come_back(given: dict[str, Any], dialect: Dialect, options: LogprobOptions) -> None:
    assert job_fields(given, dialect)["logprobs"] == options


def test_what_belongs_to_the_job_and_not_to_sampling() -> None:
    fields = job_fields(
        {
            "num_return_sequences": 4,
            "sampling_seed": 9,
            "return_hidden_states": True,
            "return_routed_experts": True,
            "lora_path": "tutor",
            "stream": False,
            "logit_processors": [{"name": "temperature_schedule", "params": {"start": 1}}],
            "allowed_token_ids": [5, 6],
        }
    )
    job = GenerateJob.build(token_ids=[1], **fields)
    assert (job.n, job.seed, job.hidden_states, job.routed_experts, job.lora) == (4, 9, "all", True, "tutor")
    assert job.logit_processors == (
        LogitProcessor(name="temperature_schedule", params={"start": 1}),
        LogitProcessor(name="action_mask", params={"token_ids": [5, 6]}),
    )
    assert "seed" not in job_fields({"seed": -1})


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"tempreature": 1.0}, "tempreature", "nearest: temperature"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_new_tokens", "max_tokens says sampling.max_new_tokens=5"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed", "seed says seed=1"),
        ({"max_tokens": 0}, "max_tokens (sampling.max_new_tokens)", "greater than or equal to 1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"num_return_sequences": 0}, "num_return_sequences (n)", "greater than or equal to 1"),
        ({"top_logprobs": 1000}, "top_logprobs (logprobs.top)", "less than or equal to 64"),
        ({"logprobs": -1}, "logprobs", "too much"),
        ({"return_logprob": False, "logprobs": 2}, "logprobs", "return_logprob says logprobs.sampled=False"),
        ({"min_tokens": 9, "max_tokens": 3}, "SamplingParams", "at most max_new_tokens=3"),
        ({"guided_json": {}, "regex": "x"}, "SamplingParams", "at most one of"),
        ({"structured_outputs": {"regex": "x", "grammar": "y"}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs", "cannot be honoured"),
        ({"best_of": 4}, "best_of", "ask for n"),
        ({"use_beam_search": True}, "use_beam_search", "no beam search"),
        ({"custom_logit_processor": "gASV"}, "custom_logit_processor", "code never travels"),
        ({"logits_processors": [print]}, "logits_processors", "code never travels"),
        ({"bad_words": ["x"]}, "bad_words", "disallowed_tokens"),
        ({"action_mask": [False, False]}, "action_mask", "at least one true"),
        ({"action_mask": [1, 0, 1]}, "action_mask", "each token id once"),
        ({"action_mask": "all"}, "action_mask", "a list of token ids"),
        ({"action_mask": []}, "action_mask", "at least one token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
        ({"action_mask": [True, 1, 0]}, "action_mask", "token ids, 0 to 2147483647"),
        ({"disallowed_tokens": [1.5]}, "disallowed_tokens", "token ids, 0 to 2147483647"),
        ({"action_mask": [1], "allowed_token_ids": [2]}, "allowed_token_ids", "action_mask says only_tokens"),
        ({"priority": True}, "priority", "high, normal, low"),
        ({"priority": "urgent"}, "priority", "high"),
        ({"stop": [3]}, "stop", "a text or a list of texts"),
        ({"ignore_eos": "yes"}, "ignore_eos", "true or false"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids to numbers"),
        ({"logit_bias": {1.7: 1}}, "logit_bias", "token ids to numbers"),
        ({"logit_bias": {"5": 1, 5: 2}}, "logit_bias", "each id once"),
        ({"top_k": True}, "top_k", "a count"),
        ({"top_logprobs": True}, "top_logprobs", "a count"),
        ({"logprob_start_len": 5}, "logprob_start_len", "all of them"),
        ({"sampling_params": 3}, "sampling_params", "a mapping"),
        ({"additional_kwargs": {"min_tokns": 1}}, "additional_kwargs.min_tokns", "nearest: min_tokens"),
        ({"response_format": {"type": "grammar"}}, "response_format", "json_schema"),
    ],
)
def test_a_refusal_names_field_value_and_what_is_allowed(given: dict[str, Any], field: str, says: str) -> None:
    error = refused(given)
    assert error.field == field
    assert says in error.allowed


def test_masks_of_tokens_and_priorities_of_the_engines() -> None:
    mask, banned = ("action_mask", {"token_ids": [1, 2]}), ("disallowed_tokens", {"token_ids": [3]})
    arrays = {"action_mask": np.array([False, True, True, False]), "disallowed_tokens": np.array([3])}
    for given_names in (arrays, {"action_mask": [1, 2], "disallowed_tokens": 3}, {"allowed_token_ids": [1, 2]}):
        found = [(one.name, one.params) for one in job_fields(given_names)["logit_processors"]]
        assert found == [mask, banned][: len(given_names)]
    assert job_fields({"disallowed_tokens": []}) == {}
    numbers: list[tuple[Any, Dialect, str, int]] = [
        (3, "skyrl", "high", 3), (-1, "auto", "low", -1), (0, "sglang", "normal", 0), (3, "vllm", "low", -3),
    ]  # fmt: skip
    for number, dialect, name, engines in numbers:
        assert job_fields({"priority": number}, dialect) == {"priority": name, "engine_priority": engines}
    assert job_fields({"priority": "low"}, "vllm") == {"priority": "low"}


def test_an_unknown_dialect_and_no_mapping_are_refused_by_name() -> None:
    assert refused({}, "vlm").allowed.endswith("nearest: vllm")  # type: ignore[arg-type]
    assert refused([("n", 1)]).field == "params"  # type: ignore[arg-type]


def test_defaults_of_refused_names_say_nothing() -> None:
    quiet = {name: rule.unless[0] for name, rule in OTHERS.items() if rule.refuse and rule.unless}
    assert len(quiet) > 10
    assert job_fields(quiet) == {}


def test_ignored_names_are_listed_with_their_reasons() -> None:
    told = sampling_from({"skip_special_tokens": False, "detokenize": None, "temperature": 0.5, "best_of": 1})
    assert told.sampling == SamplingParams(temperature=0.5)
    assert set(told.ignored) == {"skip_special_tokens", "best_of"}
    assert all(told.ignored.values())
    assert [(fate.key, fate.verdict) for fate in told.fates] == [
        ("skip_special_tokens", "ignored"),
        ("detokenize", "ignored"),
        ("temperature", "became"),
        ("best_of", "ignored"),
    ]


def test_a_temperature_beside_do_sample_false_is_told_to_be_ignored() -> None:
    fates = {fate.key: fate for fate in sampling_from({"temperature": 0.7, "do_sample": False}).fates}
    assert fates["temperature"].verdict == "ignored"
    assert fates["do_sample"].what == "sampling.temperature=0"


def test_every_name_has_one_rule_and_a_reason_where_nothing_comes_of_it() -> None:
    assert not OWN.keys() & OTHERS.keys()
    assert set(SamplingParams.model_fields) <= OWN.keys()
    for name, rule in RULES.items():
        assert sum((rule.read is not None, bool(rule.why), bool(rule.refuse))) == 1, name


def test_every_sampling_parameter_of_the_installed_sglang_is_known() -> None:
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed")
    tree = ast.parse((Path(spec.origin).parent / "srt/sampling/sampling_params.py").read_text())
    (params,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams")
    names = {
        node.target.id for node in params.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    filled_by_sglang_itself = {"stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant"}
    assert "max_new_tokens" in names
    assert names - filled_by_sglang_itself <= RULES.keys()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": st.integers(1, 1000),
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(1, 100),
            "stop_token_ids": st.lists(st.integers(0, 99), max_size=4).map(tuple),
            "ignore_eos": st.booleans(),
            "include_stop": st.booleans(),
            "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-10, 10), max_size=3),
        },
    )
)
def test_our_own_names_come_back_as_they_are(given_fields: dict[str, Any]) -> None:
    params = SamplingParams(**given_fields)
    for form in (given_fields, {"sampling": params}, {"sampling_params": given_fields}):
        assert job_fields(form).get("sampling", SamplingParams()) == params


LENGTHS = ["max_new_tokens", "max_tokens", "max_completion_tokens", "max_generate_length", "response_length"]


@given(st.dictionaries(st.sampled_from(LENGTHS), st.integers(1, 5), min_size=1))
def test_names_for_one_thing_agree_or_are_refused(lengths: dict[str, int]) -> None:
    if len(set(lengths.values())) == 1:
        assert job_fields(lengths)["sampling"].max_new_tokens == min(lengths.values())
    else:
        assert refused(lengths).field in lengths


@given(st.text(min_size=1).filter(lambda name: name not in RULES), st.integers())
def test_no_unknown_name_is_ever_ignored(name: str, value: int) -> None:
    assert refused({"temperature": 1.0, name: value}).field == name


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(RULES)), VALUES, max_size=4))
@example({"action_mask": -(1 << 63) - 1})
def test_any_values_make_a_job_or_one_typed_error(params: dict[str, Any]) -> None:
    with suppress(InvalidField):
        GenerateJob.build(token_ids=[1], **job_fields(params))
