"""Embeddings, the list of models, /tokenize and /detokenize."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from support.lazily import Lazily

from rolloutmq.messages import InvalidField
from rolloutmq.messages.model import EmbedJob, EmbedResult
from rolloutmq.producer.openai import (
    chat_request,
    detokenize,
    embedding_job,
    embedding_response,
    model_list,
    tokenize,
)

openai, types = Lazily("openai"), Lazily("openai.types")


def embedded(job: EmbedJob) -> list[EmbedResult]:
    of_each = {"job_id": job.id, "n": job.n, "group_id": job.group, "version": 3, "tokens": 2}
    return [
        EmbedResult(**of_each, sample=i, worker_id="w", attempt=1, embedding=np.array([i, 0.1], np.float32))
        for i in range(job.n)
    ]


@pytest.mark.parametrize(
    ("given", "field", "count"),
    [("a", "texts", 1), (["a", "b"], "texts", 2), ([1, 2], "token_ids", 1), ([[1, 2], [3]], "token_ids", 2)],
)
def test_inputs_of_embeddings(given: Any, field: str, count: int) -> None:
    job = embedding_job({"input": given, "model": "m", "dimensions": 2, "priority": -1, "timeout": 9, "user": "u"})
    assert (job.n, job.dimensions, job.normalize, job.priority, job.deadline_s) == (count, 2, True, "high", 9)
    assert len(getattr(job, field)) == count


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "encoding_format": ["hex"]}, "encoding_format"),
        ({"input": "a", "priority": "urgent"}, "priority"),
    ],
)
def test_what_is_wrong_with_embeddings_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        embedding_job(body)
    assert refused.value.field == field


def answering(answer: dict[str, Any]) -> Any:
    """OpenAI's own client at a server that answers this."""
    server = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    return openai.OpenAI(api_key="k", base_url="http://g/v1", http_client=httpx.Client(transport=server))


@pytest.mark.parametrize("written", ["float", "base64"])
def test_openais_client_reads_embeddings(written: str) -> None:
    body = {"input": ["a", "b"], "model": "m", "encoding_format": written}
    answer = embedding_response(body, embedded(embedding_job(body)))
    if written == "float":
        types.CreateEmbeddingResponse.model_validate(answer, strict=True)
    else:
        raw = base64.b64decode(answer["data"][1]["embedding"])
        assert np.frombuffer(raw, "<f4").tolist() == np.array([1, 0.1], np.float32).tolist()
    client = answering(answer)
    asked = {} if written == "base64" else {"encoding_format": "float"}  # by itself the client asks for base64
    found = client.embeddings.create(model="m", input=["a", "b"], **asked)
    assert [one.index for one in found.data] == [0, 1]
    assert np.allclose(found.data[1].embedding, [1, 0.1])
    assert found.usage.total_tokens == 4


def test_models_with_adapters() -> None:
    answer = model_list("org/m", 4096, 1_700_000_000, ["a", "b"])
    for one in answer["data"]:
        types.Model.model_validate(one, strict=True)
        assert one["max_model_len"] == 4096
    assert [(one["id"], one["root"], one["parent"]) for one in answer["data"]] == [
        ("org/m", "org/m", None),
        ("a", "org/m", "org/m"),
        ("b", "org/m", "org/m"),
    ]
    client = answering(answer)
    assert [model.id for model in client.models.list()] == ["org/m", "a", "b"]


def encode(text: str, special: bool) -> list[int]:
    return ([1] if special else []) + [ord(char) for char in text]


def render(messages: Sequence[dict[str, Any]], answer: bool = True, **options: Any) -> list[int]:
    ids = [ord(char) for message in messages for char in message["content"]]
    return ids + [len(options.get("tools", ()))] + ([0] if answer else [])


def test_tokens_of_a_text() -> None:
    assert tokenize({"prompt": "ab"}, encode, render, 50) == {
        "count": 3,
        "max_model_len": 50,
        "tokens": [1, 97, 98],
        "token_strs": None,
    }
    bare = tokenize({"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}, encode, render, 50, chr)
    assert (bare["tokens"], bare["token_strs"]) == ([97, 98], ["a", "b"])
    for wrong in ({}, {"prompt": 5}, {"prompt": "a", "add_special_tokens": "no"}, {"messages": []}):
        with pytest.raises(InvalidField):
            tokenize(wrong, encode, render, 50)


@pytest.mark.parametrize("said", [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}])
def test_tokens_of_a_conversation_are_the_prompt_of_its_chat(said: dict[str, Any]) -> None:
    """NeMo-Gym counts on it, where it does not get the ids with the answer."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "ab"}], "tools": [tool], **said}
    (job,) = chat_request(body, render=render, context_length=99).jobs
    assert job.token_ids is not None
    asked = body | {"add_special_tokens": False, "return_token_strs": False}
    assert tokenize(asked, encode, render, 99)["tokens"] == job.token_ids.tolist()


def test_text_of_tokens() -> None:
    assert detokenize({"tokens": [97, 98]}, lambda ids: "".join(map(chr, ids))) == {"prompt": "ab"}
    assert detokenize({"tokens": []}, lambda ids: "".join(map(chr, ids))) == {"prompt": ""}
    for tokens in ([-1], [1 << 31], "ab", None):
        with pytest.raises(InvalidField, match="tokens"):
            detokenize({"tokens": tokens}, str)
    for wrong in (None, "ab", [1.5], [True], {"a": 1}):
        with pytest.raises(InvalidField, match="tokens="):
            detokenize({"tokens": wrong}, lambda _: "")
