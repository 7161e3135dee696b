"""Streams, cancellation, deadlines and sessions on real SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.remote import RemoteEngine, RemoteWorker
from support.pools.worker_process import WorkerProcess, until_running

from rolloutmq import BlockingRolloutClient, GenerateJob, JobFailed, RolloutResult, SamplingParams
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer import Delta
from rolloutmq.worker.text.tokenizer import ModelTokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
SLOTS = 8
PROMPT = list(range(5, 69))
UNTOLD = 50
"""SGLang tells of a request that does not stream after so many tokens."""


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def worker(text_engine: RemoteEngine, redis_url: str) -> Iterator[RemoteWorker]:
    with text_engine.worker(redis_url, max_running=SLOTS, prefetch=0) as joined:
        yield joined


@pytest.fixture
def client(worker: RemoteWorker, redis_url: str) -> Iterator[BlockingRolloutClient]:
    with BlockingRolloutClient(redis_url) as opened:
        yield opened


def greedy(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **({"ignore_eos": True} | fields))


def long(count: int = 1900, **fields: Any) -> GenerateJob:
    return GenerateJob(token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=count, ignore_eos=True), **fields)


def check(deltas: list[Delta]) -> dict[int, RolloutResult]:
    """Of each sample without a gap, and what its result has."""
    results: dict[int, RolloutResult] = {}
    for sample in sorted({delta.sample for delta in deltas}):
        mine = [delta for delta in deltas if delta.sample == sample]
        assert not any(delta.restarted for delta in mine)
        assert [delta.start for delta in mine] == np.cumsum([0, *(len(delta.token_ids) for delta in mine)])[
            :-1
        ].tolist()
        result = mine[-1].result
        assert np.concatenate([delta.token_ids for delta in mine]).tolist() == result.token_ids.tolist()
        if result.logprobs is not None:
            assert np.concatenate([delta.logprobs for delta in mine]).tolist() == result.logprobs.tolist()  # type: ignore[misc]
        if result.text is not None:
            assert "".join(delta.text or "" for delta in mine) == result.text
        results[sample] = result
    return results


def test_tokens_come_as_the_engine_samples_them(client: BlockingRolloutClient) -> None:
    (plain,) = client.wait(client.submit(token_ids=PROMPT, sampling=greedy(600)), 120)
    deltas = list(client.stream(token_ids=PROMPT, sampling=greedy(600), n=2, timeout=60))
    results = check(deltas)
    assert [results[i].token_ids.tolist() for i in (0, 1)] == [plain.token_ids.tolist()] * 2
    np.testing.assert_allclose(results[0].logprobs, plain.logprobs, atol=1e-4)  # type: ignore[arg-type]
    assert len(deltas) > 4
    assert min(len(delta.token_ids) for delta in deltas if delta.result is None) < UNTOLD


def test_text_is_whole_characters_and_turns_are_tokens(client: BlockingRolloutClient, text_model: Path) -> None:
    with client.session(system="be brief", sampling=greedy(300)) as session:
        deltas = list(session.stream("größer 漢字?", timeout=60))
        results = check(deltas)
        assert results[0].text
        assert len(deltas) > 2
        assert session.mask.sum() == 300
        before = session.token_ids
        second = session.generate("again?", timeout=60, sampling=greedy(4))
    tokenizer = ModelTokenizer(str(text_model))
    end = tokenizer.encode("<|im_end|>\n", special=False)
    has = next(n for n in (2, 1, 0) if n == 0 or before[-n:].tolist() == end[:n].tolist())
    turn = tokenizer.encode("<|im_start|>user\nagain?<|im_end|>\n<|im_start|>assistant\n", special=False)
    assert session.token_ids.tolist() == [*before, *end[has:], *turn, *second.token_ids]


def test_a_stop_that_is_taken_off_is_never_shown(client: BlockingRolloutClient) -> None:
    (plain,) = client.wait(client.submit(token_ids=PROMPT, sampling=greedy(400)), 120)
    tokens = plain.token_ids.tolist()
    place = next(i for i in range(200, 390) if tokens[i : i + 8] not in (tokens[j : j + 8] for j in range(i)))
    stop = tuple(tokens[place : place + 8])
    sampling = greedy(400, stop_token_sequences=(stop,), include_stop=False)
    results = check(list(client.stream(token_ids=PROMPT, sampling=sampling, timeout=60)))
    assert results[0].token_ids.tolist() == tokens[:place]
    assert results[0].finish_reason == "stop"


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_slots_are_free_at_once(client: BlockingRolloutClient, how: str) -> None:
    """One that waits for a slot has it as soon as others are not wanted any more, and not when they would have ended.

    One more of them stays, to tell how long they would have run.
    """
    unwanted = client.submit_many(long(deadline_s=None if how == "cancel" else 3.0) for _ in range(SLOTS - 1))
    stays = client.submit(long())
    until_running(client, SLOTS)
    waiting = client.submit(token_ids=PROMPT, sampling=greedy(2))
    if how == "cancel":
        assert client.cancel(unwanted) == ["ok"] * len(unwanted)
    client.wait(waiting, 60)
    assert client.cancel([stays]) == ["ok"], "it has ended: nobody made room before that"
    for handle in unwanted:
        with pytest.raises(JobFailed, match="cancelled" if how == "cancel" else "expired"):
            client.wait(handle, 60)


def test_a_session_stays_with_its_prefix_and_outlives_its_worker(
    text_engine: RemoteEngine, small_pool: str, small_worker: WorkerProcess
) -> None:
    with text_engine.worker(small_pool) as worker, BlockingRolloutClient(small_pool) as client:
        opening = np.random.default_rng(0).integers(5, 200, 300).tolist()
        session = client.session(token_ids=opening, sampling=greedy(40), prefer_s=30.0)
        session.generate(timeout=60, prefer_worker=worker.worker_id)
        assert session.worker == worker.worker_id
        for turn in range(4):
            before = len(session)
            result = session.generate([20 + turn] * 10, timeout=60)
            assert result.worker_id == worker.worker_id, "although the other one is idle"
            # All but the last token that was generated, which was never an input, and what the engine rounds off.
            assert before - 2 <= result.cached_tokens <= before
        branch = session.branch(at=len(opening) + 20)
        assert branch.generate([7], timeout=60).cached_tokens >= len(opening) + 19
        before = len(session)
        worker.leave(crash=True)
        result = session.generate([30], timeout=60)
        assert result.worker_id == session.worker == small_worker.worker_id
        assert result.cached_tokens == 0, "all of it is read again"
        assert session.generate([31], timeout=60).cached_tokens >= before
        assert len(session) == before + 82
        assert session.mask.sum() == 40 * 7
