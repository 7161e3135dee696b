"""chat_completion and completion through a pool: bodies in, OpenAI's answers or errors out."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.pools.pool import worker
from support.pools.skyrl import Numbers, engine, joined

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.producer.skyrl import SkyRLEngine


class Words:
    """A worker's tokenizer: ids are characters on the way in, numbers on the way out."""

    def encode(self, text: str) -> Any:
        return np.array([ord(char) for char in text], np.int32)

    def encode_chat(self, messages: Any, *more: Any, **others: Any) -> Any:
        return self.encode("".join(message["role"][0] + str(message["content"]) for message in messages))

    def decode(self, token_ids: Any) -> str:
        return Numbers().decode(token_ids.tolist(), skip_special_tokens=True)


async def asked(it: SkyRLEngine, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "abc"}]
    return await it.chat_completion({"json": {"model": "m", "messages": messages, **body}, "headers": {"x": "y"}})


async def test_a_chat(redis_db: str) -> None:
    params = {"max_generate_length": 3, "n": 5, "logprobs": 0}
    async with worker(redis_db, tokenizer=Words()), engine(redis_db, sampling_params=params) as it:  # type: ignore[arg-type]
        answer = await asked(it, n=2, logprobs=True, return_token_ids=True, return_weight_versions=True)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            ids = choice["token_ids"]
            assert len(ids) == 3
            assert choice["message"] == {"role": "assistant", "content": Numbers().decode(ids)}
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [str(token) for token in ids]
            assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 3}]
            assert choice["finish_reason"] == "length"
        counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
        assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        assert answer["prompt_token_ids"] == Words().encode("uabc").tolist()
        plain = await asked(it)  # how many, and what is in it, says the body alone
        assert len(plain["choices"]) == 1
        assert plain["choices"][0]["logprobs"] is None


async def test_completions(redis_db: str) -> None:
    async with worker(redis_db, tokenizer=Words()), engine(redis_db) as it:  # type: ignore[arg-type]
        answer = await it.completion({"json": {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2}})
        assert len(answer["choices"]) == 4
        assert all(len(choice["text"].split()) == 2 for choice in answer["choices"])
        answer = await it.completion({"json": {"prompt": ["ab", "c"], "max_tokens": 2, "logprobs": 0}})
        assert answer["usage"]["prompt_tokens"] == 3
        assert all(len(choice["logprobs"]["tokens"]) == 2 for choice in answer["choices"])


async def test_a_session_is_sticky(redis_db: str) -> None:
    async with (
        worker(redis_db, tokenizer=Words()),  # type: ignore[arg-type]
        worker(redis_db, tokenizer=Words()),  # type: ignore[arg-type]
        engine(redis_db) as it,
    ):
        await asked(it, max_tokens=2, session_id="s")
        home = it._generation.worker_of["s"]
        for _ in range(5):
            await asked(it, max_tokens=2, session_id="s")
            assert it._generation.worker_of == {"s": home}


async def test_errors(redis_db: str) -> None:
    async with worker(redis_db, tokenizer=Words()), engine(redis_db, timeout_s=5.0) as it:  # type: ignore[arg-type]
        await joined(it)
        wrong: list[tuple[Any, int, str | None]] = [
            ({"n": 0}, 400, "n"),
            ({"temprature": 1}, 400, "temprature"),
            ({"stream": True}, 400, "stream"),
            ({"seed": 3}, 400, "seed"),  # no worker of this pool honours it
            ({"max_tokens": (1 << 20) - 1}, 400, None),  # refused by the worker
        ]
        for body, code, param in wrong:
            error = (await asked(it, **body))["error"]
            assert (error["code"], error["param"]) == (code, param), error
        for payload in ({}, {"json": None}, None):
            assert (await it.chat_completion(payload))["error"]["param"] == "json"  # type: ignore[arg-type]
    async with engine(redis_db, timeout_s=0.2) as it:
        assert (await asked(it, max_tokens=2))["error"]["code"] == 504


async def test_a_pool_of_ids_alone(redis_db: str) -> None:
    """What the worker says of it comes back."""
    async with worker(redis_db), engine(redis_db) as it:
        error = (await asked(it, max_tokens=2))["error"]
        assert error["code"] == 400
        assert RequestRefused.__name__ in error["message"]
