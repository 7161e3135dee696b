"""A worker from claim to result: what it serves, what it refuses, how it leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from support.engines.manual import all_that_can_happen_now
from support.pools.pool import change, check_scripted, eventually, letters, record, replies, runs, wait_replies, worker
from support.specimens.messages import job, result

from rolloutmq.messages import (
    Broker,
    ChatMessage,
    Finished,
    Lease,
    LogprobOptions,
    Partial,
    Piece,
    Release,
    RolloutResult,
    SamplingParams,
    Segment,
    encode,
)
from rolloutmq.messages.broker import Reply
from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import CONTEXT, ScriptedEngine

SLOW = SamplingParams(max_new_tokens=1000)
SHORT = SamplingParams(max_new_tokens=5)


def by_sample(found: list[Reply]) -> dict[tuple[str, int], RolloutResult]:
    results = [reply.outcome for reply in found]
    assert all(isinstance(one, RolloutResult) for one in results), results
    return {(one.job_id, one.sample): one for one in results if isinstance(one, RolloutResult)}


class Words:
    """A tokenizer that counts letters."""

    def encode(self, text: str) -> np.ndarray:
        if text == "bug":
            raise KeyError("a tokenizer may raise anything")
        return np.array([len(word) for word in text.split()], dtype=np.int32)

    def encode_chat(self, messages: list[dict[str, str]]) -> np.ndarray:
        return self.encode(" ".join(f"{message['role']} {message['content']}" for message in messages))

    def decode(self, token_ids: np.ndarray) -> str:
        if len(token_ids) == 3:
            raise KeyError("here too")
        return " ".join(map(str, token_ids))


async def test_every_sample_of_every_job_once(redis_db: str, broker: Broker) -> None:
    jobs = [job(token_ids=list(range(1 + i % 7)), n=1 + i % 4, sampling=SHORT, trace_id=f"t{i}") for i in range(100)]
    async with worker(redis_db, max_running=16) as running:
        await broker.enqueue(jobs)
        samples = sum(one.n for one in jobs)
        results = by_sample(await wait_replies(broker, samples))
        assert len(results) == samples
        for one in jobs:
            for sample in range(one.n):
                found = results[one.id, sample]
                check_scripted(found, len(one.token_ids))
                assert (found.worker_id, found.attempt, found.n) == (running.id, 1, one.n)
                assert (found.finish_reason, found.trace_id) == ("length", one.trace_id)
                assert found.prompt_ids is None
                assert found.fingerprint["engine"] == "scripted-1"
    load = await broker.load()
    assert (load.open_jobs, load.open_bytes, load.done) == (0, 0, 100)
    assert await broker.workers() == []
    assert not any([await part.redis.keys(part.keys.held("*")) for part in broker.parts])


async def test_logprobs_only_if_asked_for(redis_db: str, broker: Broker) -> None:
    await broker.enqueue([job(logprobs=LogprobOptions(sampled=False))])
    async with worker(redis_db):
        ((found, *_),) = [[reply.outcome for reply in await wait_replies(broker, 1)]]
    assert found.logprobs is None


class Routed(ScriptedEngine):
    """Says for each token which experts it went to: 8 in each of 48 layers."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, features=super().info.features | {"routed_experts"})

    async def generate(self, request: EngineRequest) -> EngineOutput:
        output = await super().generate(request)
        rows = np.resize(output.token_ids.astype(np.uint8), (len(output.token_ids), 48, 8))
        return replace(output, token_arrays={"routed_experts": rows})


async def test_the_experts_of_64k_tokens_come_through(redis_db: str, broker: Broker) -> None:
    """24 MiB in one result."""
    await broker.enqueue([job(routed_experts=True, sampling=SamplingParams(max_new_tokens=1 << 16))])
    async with worker(redis_db, engine=Routed(echo=True)):
        (found,) = (await wait_replies(broker, 1))[0:1]
    rows = found.outcome.token_arrays["routed_experts"]
    np.testing.assert_array_equal(rows, np.resize(found.outcome.token_ids.astype(np.uint8), (1 << 16, 48, 8)))


async def test_text_and_messages_are_tokenised_at_the_edge(redis_db: str, broker: Broker) -> None:
    text = job(token_ids=None, text="one three", sampling=SHORT)
    chat = job(token_ids=None, messages=(ChatMessage(role="user", content="hello"),), sampling=SHORT)
    await broker.enqueue([text, chat])
    async with worker(redis_db, tokenizer=Words()):
        results = by_sample(await wait_replies(broker, 2))
    for one, prompt in ((text, [3, 5]), (chat, [4, 5])):
        found = results[one.id, 0]
        assert found.prompt_ids.tolist() == prompt
        assert found.text == " ".join(map(str, found.token_ids))
        check_scripted(found, 2)


async def test_what_cannot_run_is_refused_by_name_and_its_neighbours_run(redis_db: str, broker: Broker) -> None:
    refused = {
        "text": job(token_ids=None, text="x"),
        "messages": job(token_ids=None, messages=(ChatMessage(role="user", content="x"),)),
        "lora": job(lora="adapter"),
        "hidden_states": job(hidden_states="all"),
        "logprobs.top": job(logprobs=LogprobOptions(top=5)),
        "seed": job(seed=1),
        "routed_experts": job(routed_experts=True),
        "sampling.max_new_tokens": job(sampling=SamplingParams(max_new_tokens=CONTEXT)),
    }
    fine = [job(sampling=SHORT) for _ in range(5)]
    both = list(refused.values())
    both[1:1] = fine
    async with worker(redis_db):
        await broker.enqueue(both)
        outcomes = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, len(both))}
    for name, one in refused.items():
        failure = outcomes[one.id]
        assert (failure.outcome, failure.cause, failure.attempts) == ("dead", "refused", 1)
        assert failure.error.startswith(f"RequestRefused: {name}")
        assert failure.host
    assert all(outcomes[one.id].ok for one in fine)
    assert {letter.job_id for letter in await letters(broker)} == {one.id for one in refused.values()}


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff" * 50, encode(job())[:-4], b"\x02\x00\x01\x80", encode(job())],
    ids=["empty", "garbage", "cut-short", "newer-major", "names-no-client"],
)
async def test_a_payload_that_is_no_job_is_buried_alone(redis_db: str, broker: Broker, payload: bytes) -> None:
    bad, before, after = job(), job(sampling=SHORT), job(sampling=SHORT)
    await broker.enqueue([before, bad, after])
    await change(broker, bad.id, {"p": payload})
    async with worker(redis_db):
        outcomes = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, 3)}
    assert outcomes[before.id].ok
    assert outcomes[after.id].ok
    failure = outcomes[bad.id]
    assert failure.cause == "not readable"
    assert failure.error.split(":")[0] in {"MalformedMessage", "UnsupportedVersion", "MessageError", "InvalidField"}
    (letter,) = await letters(broker)
    assert letter.payload == payload


async def test_a_tokenizer_that_breaks_takes_only_its_job_along(redis_db: str, broker: Broker) -> None:
    encoding = job(token_ids=None, text="bug", sampling=SHORT)
    decoding = job(token_ids=None, text="x", sampling=SamplingParams(max_new_tokens=3))
    fine = job(token_ids=None, text="x", sampling=SHORT)
    await broker.enqueue([encoding, decoding, fine])
    async with worker(redis_db, tokenizer=Words()):
        outcomes = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, 3)}
    assert outcomes[fine.id].ok
    for one, said in ((encoding, "may raise anything"), (decoding, "here too")):
        failure = outcomes[one.id]
        assert said in failure.error


async def test_cancelling_frees_the_slot(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1), max_running=1, prefetch=0) as running:
        long, queued = job(sampling=SLOW), job(sampling=SLOW)
        await broker.enqueue([long])
        await eventually(lambda: runs(running.engine), what="the sample to run")
        await broker.enqueue([queued])
        assert await broker.cancel([queued.id, long.id]) == ["ok", "ok"]
        await eventually(lambda: runs(running.engine, 0), what="the slot to be free")
        running.engine.tokens_per_s = 1e9
        fine = job(sampling=SHORT)
        await broker.enqueue([fine])
        outcomes = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, 3)}
    assert outcomes[fine.id].ok
    assert [outcomes[one.id].outcome for one in (long, queued)] == ["cancelled", "cancelled"]


async def test_never_more_than_max_running_and_never_less_while_there_is_work(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=100)
    peak = 0

    async with worker(redis_db, engine=engine, max_running=4, prefetch=0) as running:
        await broker.enqueue([job(n=3, sampling=SHORT) for _ in range(8)])

        async def finished() -> bool:
            nonlocal peak
            peak = max(peak, running.generation.running)
            assert running.status.held <= 4 + 2  # capacity, and what the last job goes over
            return await broker.count_replies("client") == 24

        await eventually(finished)
    assert peak == 4


async def test_a_draining_worker_hands_over_and_another_continues_the_very_tokens(
    redis_db: str, broker: Broker
) -> None:
    jobs = [job(n=2, sampling=SLOW) for _ in range(3)]
    slow = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=slow, max_running=4, prefetch=0, drain_s=0.2) as first:
        await broker.enqueue(jobs)
        await eventually(lambda: len(slow.ops.generated()) == 4, what="tokens to hand over, of a full engine")
        await first.stop()
        assert await replies(broker) == []
        assert await broker.workers() == []
        load = await broker.load()
        assert (load.queued, load.dead) == ((0, 3, 0), 0)
    async with worker(redis_db) as second:
        results = by_sample(await wait_replies(broker, 6))
        for one in jobs:
            for sample in range(2):
                found = results[one.id, sample]
                check_scripted(found, len(one.token_ids))
                assert sum(segment.tokens for segment in found.segments) == 1000
                assert (found.worker_id, found.attempt) == (second.id, results[one.id, 0].attempt)
        assert sorted(results[one.id, 0].attempt for one in jobs) == [1, 2, 2]  # one was not in the first engine
        again = second.generation.generated_tokens
    assert again < 6 * 1000  # what the first had generated was not generated again


async def test_a_drain_lets_what_fits_finish(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=10)
    async with worker(redis_db, engine=engine, drain_s=10.0) as running:
        one = job(sampling=SHORT)
        await broker.enqueue([one])
        await eventually(lambda: runs(engine))
        await running.stop()
    (reply,) = await replies(broker)
    assert reply.outcome.ok


async def test_a_drain_in_the_middle_of_a_claim_burns_nothing(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim has been made in Redis, its reply is on the way when the worker is told to leave."""
    one = job(sampling=SLOW)
    claiming = asyncio.Event()
    claim = Lease.claim

    async def slow_reply(lease: Lease, *args: int) -> object:
        answer = await claim(lease, *args)
        if answer:
            claiming.set()
            await eventually(running.worker._draining.is_set)
            await all_that_can_happen_now()
        return answer

    # before the worker begins: a claim that is on its way already would take the job
    monkeypatch.setattr(Lease, "claim", slow_reply)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1), drain_s=2.0) as running:
        await broker.enqueue([one])
        await claiming.wait()
        await running.stop()
    assert (await broker.load()).queued == (0, 1, 0)
    assert b"c" not in await record(broker, one.id)


async def test_a_partial_from_newer_weights_is_not_continued_by_older(redis_db: str, broker: Broker, joined) -> None:
    one = job(sampling=SHORT)
    await broker.enqueue([one])
    lease = await joined("newer")
    await lease.claim(1, 1, 0)
    partial = Partial(token_ids=[1, 2], logprobs=[0, 0], segments=(Segment(2, 2),))
    await lease.release([Release(one.id, 1, (Piece(one.id, 1, 0, 0, partial),))], 3)
    await lease.leave()
    async with worker(redis_db):
        (found,) = by_sample(await wait_replies(broker, 1)).values()
    assert found.segments == (Segment(0, 5),)
    check_scripted(found, 3)


async def test_a_partial_nobody_can_read_starts_over(redis_db: str, broker: Broker) -> None:
    one = job(sampling=SHORT)
    await broker.enqueue([one])
    await change(broker, one.id, {"k0": b"\xff\xff\xff\xff", "kk": 1})
    async with worker(redis_db):
        (found,) = by_sample(await wait_replies(broker, 1)).values()
    check_scripted(found, 3)


async def test_published_samples_are_not_generated_again(redis_db: str, broker: Broker, joined) -> None:
    one = job(n=3, sampling=SHORT)
    await broker.enqueue([one])
    lease = await joined("earlier")
    await lease.claim(1, 9, 0)
    await lease.complete([Finished(one.id, 1, 1, result(one, 1, worker="earlier"))])
    await lease.release([Release(one.id, 1)], 3)
    await lease.leave()
    async with worker(redis_db) as running:
        results = by_sample(await wait_replies(broker, 3))
        assert running.generation.generated_tokens == 10
    assert sorted(sample for _, sample in results) == [0, 1, 2]
    assert results[one.id, 1].worker_id == "earlier"


async def test_a_payload_that_disagrees_with_its_record_is_buried(redis_db: str, broker: Broker) -> None:
    """Published samples are counted against the record: a payload with more of them could never end."""
    one = job(n=3)
    await broker.enqueue([one])
    await change(broker, one.id, {"n": 2})
    async with worker(redis_db):
        (reply,) = await wait_replies(broker, 1)
    assert "n=3: 2, as the job was queued" in reply.outcome.error
