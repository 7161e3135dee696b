"""The chaos suite's oracle is worth as much as the lies it catches: doctored ledgers, and a real server with sabotaged
scripts, each of which must be found by the rule it breaks, while the truth passes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chaos import aof, journal, ledger
from chaos.baseline import Rest, Size, judge_rest, look
from chaos.oracle import Terms, Verdict, judge
from support.pools.pool import status

from rolloutmq.messages import Broker, Finished, GenerateJob, Lease, RolloutResult, SamplingParams, Segment, connect
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.codec import decode, encode
from rolloutmq.messages.errors import LeaseLost
from rolloutmq.messages.scripts import runner as messages_lua
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import scripted_token

MAX_LOST = 3


@dataclass(frozen=True)
class Evidence:
    """What the oracle is given."""

    events: list[ledger.Event]
    submitted: list[journal.Submitted]
    received: list[journal.Received]
    before: Rest
    after: Rest

    def judged(self, terms: Terms | None = None) -> Verdict:
        verdict = judge(self.events, self.submitted, self.received, terms)
        judge_rest(self.before, self.after, self.events, verdict)
        return verdict

    def rules(self) -> set[str]:
        return {rule for rule, _ in self.judged().violations}


def made(job: GenerateJob, sample: int, worker: str, attempt: int, version: int = 0) -> RolloutResult:
    """What a truthful worker publishes: two tokens."""
    assert job.token_ids is not None
    stream, first = f"{job.id}{sample:04x}", len(job.token_ids)
    return RolloutResult(
        job_id=job.id,
        sample=sample,
        n=job.n,
        group_id=job.group,
        token_ids=[scripted_token(stream, first + i, version) for i in range(2)],
        finish_reason="length",
        segments=(Segment(version, 2),),
        worker_id=worker,
        attempt=attempt,
    )


class Story:
    """A pool's day: samples published twice over, a frozen worker that comes back, a cancelled job and a poison one."""

    def __init__(self, broker: Broker, book: journal.Journal) -> None:
        self.broker, self.book = broker, book
        fields = {"token_ids": [1, 2, 3], "reply_to": "client", "sampling": SamplingParams(max_new_tokens=2)}
        self.pair, self.single, self.poison, self.unwanted = (
            GenerateJob(**fields, n=n, group_id="g") for n in (2, 1, 1, 1)
        )
        self.jobs = {job.id: job for job in (self.pair, self.single, self.poison, self.unwanted)}

    async def tell(self) -> None:
        await self.enqueue(self.pair, self.single, self.unwanted)
        await self.broker.cancel([self.unwanted.id])
        frozen = await self.join("frozen")
        first = await frozen.claim(8, 8, 0)
        await self.publish(frozen, first, samples=[0])
        await self.publish(frozen, first, samples=[0])  # sent again: its reply was lost
        await self.expire(frozen)
        heir = await self.join("heir")
        await heir.reap(MAX_LOST)
        second = await heir.claim(8, 8, 0)
        await self.publish(frozen, first, samples=[0, 1])  # it thawed
        await self.publish(heir, second, samples=[0, 1])
        await self.enqueue(self.poison)
        for turn in range(MAX_LOST):
            victim = await self.join(f"victim{turn}")
            await victim.claim(8, 8, 0)
            await self.expire(victim)
            await heir.reap(MAX_LOST)
        await heir.leave()
        await self.take()

    async def enqueue(self, *jobs: GenerateJob) -> None:
        await self.broker.enqueue(jobs)
        for job in jobs:
            self.book.submitted(job, "client")

    async def join(self, worker_id: str) -> Lease:
        lease = Lease(self.broker.redis, "default", worker_id)
        await lease.join(status(worker_id))
        return lease

    async def publish(self, lease: Lease, claims: list[Claim], samples: list[int]) -> None:
        finished = [
            Finished(claim.job_id, claim.attempt, sample, made(job, sample, lease.worker_id, claim.attempt))
            for claim in claims
            for sample in samples
            if sample < (job := self.jobs[claim.job_id]).n
        ]
        await lease.complete(finished)

    async def expire(self, lease: Lease) -> None:
        """A lease that is over, as after a long silence."""
        try:
            await lease.heartbeat(status(lease.worker_id))
        except LeaseLost:
            return
        await self.broker.redis.zadd(self.broker.keys.workers, {lease.worker_id: 1})

    async def take(self) -> None:
        while replies := await self.broker.read_replies("client", "0"):
            for reply in replies:
                self.book.received(reply.outcome, "client")
            await self.broker.ack("client", replies)


async def evidence(directory: Path) -> Evidence:
    with EmbeddedRedis(appendonly=True, directory=directory / "redis", config=aof.SETTINGS) as server:
        async with connect(server.url) as redis:
            broker = Broker(redis, "default")
            prefix = broker.keys.prefix
            before = await look(redis, prefix)
            book = journal.Journal(directory / "journal", "driver")
            await Story(broker, book).tell()
            book.close()
            after = await look(redis, prefix)
        server.kill()  # the log has everything that was answered
    events = ledger.tell(aof.read_commands(directory / "redis"), prefix)
    return Evidence(events, *journal.read(directory / "journal"), before, after)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    return asyncio.run(evidence(tmp_path_factory.mktemp("truth")))


def test_the_truth_passes(truth: Evidence) -> None:
    verdict = truth.judged()
    assert verdict.violations == []
    kinds = [event.kind for event in truth.events if event.kind not in {"clock", "ack", "requeue"}]
    assert kinds.count("accept") == kinds.count("terminal") == len(truth.submitted) == 4
    assert (kinds.count("publish"), kinds.count("failure"), kinds.count("letter")) == (3, 2, 1)
    assert kinds.count("claim") == 2 + 1 + MAX_LOST  # the single job was done when its worker froze
    assert len(truth.received) == 5
    assert all(event.at_ms for event in truth.events[:-5])


# --- doctored ledgers -------------------------------------------------------------------------------------------------

Lie = Callable[[Evidence], Evidence]
lies: list[tuple[str, Lie]] = []


def lie(rule: str) -> Callable[[Lie], Lie]:
    def add(tell: Lie) -> Lie:
        lies.append((rule, tell))
        return tell

    return add


def index(it: Evidence, kind: str, which: int = 0) -> int:
    return [i for i, event in enumerate(it.events) if event.kind == kind][which]


def without(it: Evidence, kind: str, which: int = 0) -> Evidence:
    at = index(it, kind, which)
    return replace(it, events=it.events[:at] + it.events[at + 1 :])


def again(it: Evidence, kind: str, which: int = 0) -> Evidence:
    at = index(it, kind, which)
    return replace(it, events=[*it.events[: at + 1], *it.events[at:]])


def changed(it: Evidence, kind: str, which: int = 0, **fields: object) -> Evidence:
    at = index(it, kind, which)
    events = list(it.events)
    events[at] = replace(events[at], **fields)  # type: ignore[arg-type]
    return replace(it, events=events)


def republished(it: Evidence, which: int, **fields: object) -> Evidence:
    """The result of one publish says something else, and so does what the client got."""
    event = it.events[index(it, "publish", which)]
    result = decode(event.payload, RolloutResult)
    other = result.model_copy(update=fields)
    told, now = journal.digest(result), journal.digest(other)
    received = [replace(got, digest=now) if got.digest == told else got for got in it.received]
    return replace(changed(it, "publish", which, payload=encode(other)), received=received)


@lie("a")
def an_accepted_job_never_ends(it: Evidence) -> Evidence:
    return without(it, "terminal")


@lie("a")
def an_accepted_job_is_not_known(it: Evidence) -> Evidence:
    return replace(it, submitted=[*it.submitted, replace(it.submitted[0], job="f" * 32)])


@lie("a")
def a_job_ends_twice(it: Evidence) -> Evidence:
    return again(it, "terminal")


@lie("a")
def a_sample_is_published_twice(it: Evidence) -> Evidence:
    return again(it, "publish")


@lie("a")
def a_done_job_lacks_a_sample(it: Evidence) -> Evidence:
    return without(it, "publish")


@lie("a")
def nobody_is_told_of_a_failure(it: Evidence) -> Evidence:
    return without(it, "failure")


@lie("a")
def there_is_no_dead_letter(it: Evidence) -> Evidence:
    return without(it, "letter")


@lie("a")
def the_client_gets_nothing(it: Evidence) -> Evidence:
    return replace(it, received=it.received[1:])


@lie("a")
def the_client_gets_it_twice(it: Evidence) -> Evidence:
    return replace(it, received=[*it.received, it.received[0]])


@lie("a")
def the_client_gets_something_else(it: Evidence) -> Evidence:
    which = next(i for i, got in enumerate(it.received) if got.sample >= 0)
    received = list(it.received)
    received[which] = replace(received[which], digest="0")
    return replace(it, received=received)


@lie("b")
def another_owner_publishes(it: Evidence) -> Evidence:
    return changed(it, "publish", worker="somebody")


@lie("b")
def an_earlier_attempt_publishes(it: Evidence) -> Evidence:
    return changed(it, "publish", -1, attempt=7)


@lie("b")
def a_publish_after_the_end(it: Evidence) -> Evidence:
    return changed(it, "publish", state="done")


@lie("b")
def a_claim_from_under_its_owner(it: Evidence) -> Evidence:
    return changed(it, "claim", -1, was="r")


@lie("b")
def a_claim_that_raises_no_attempt(it: Evidence) -> Evidence:
    return changed(it, "claim", -1, attempt=MAX_LOST - 1)


@lie("c")
def tokens_of_other_weights(it: Evidence) -> Evidence:
    return republished(it, 0, segments=(Segment(1, 2),))


@lie("c")
def a_worker_goes_back_in_versions(it: Evidence) -> Evidence:
    """True tags, each: but a worker that has loaded version 1 samples with version 0 afterwards."""
    first = decode(it.events[index(it, "publish")].payload, RolloutResult)
    tokens = [scripted_token(f"{first.job_id}{first.sample:04x}", 3 + i, 1) for i in range(2)]
    return republished(it, 0, segments=(Segment(1, 2),), token_ids=decode_tokens(tokens))


@lie("c")
def a_sample_under_anothers_number(it: Evidence) -> Evidence:
    return republished(it, 0, sample=1)


@lie("d")
def a_key_without_ttl_is_left(it: Evidence) -> Evidence:
    return leftover(it, "held:w", Size("set", 1, -1))


@lie("d")
def a_tombstone_never_goes(it: Evidence) -> Evidence:
    job = next(key for key in it.after.keys if key.startswith("job:"))
    return leftover(it, job, Size("hash", 1, -1))


@lie("d")
def a_stream_is_not_empty(it: Evidence) -> Evidence:
    return leftover(it, "reply:client", Size("stream", 1, 1000))


@lie("d")
def the_bell_grows(it: Evidence) -> Evidence:
    return leftover(it, "bell", Size("stream", 5000, -1))


@lie("d")
def a_counter_is_wrong(it: Evidence) -> Evidence:
    return replace(it, after=replace(it.after, load=it.after.load | {"jobs": 1}))


def leftover(it: Evidence, key: str, size: Size) -> Evidence:
    return replace(it, after=replace(it.after, keys=it.after.keys | {key: size}))


def decode_tokens(tokens: list[int]) -> object:
    return RolloutResult.model_validate(
        {"job_id": "0", "sample": 0, "n": 1, "group_id": "", "finish_reason": "stop", "worker_id": "", "attempt": 1}
        | {"token_ids": tokens, "segments": (Segment(0, len(tokens)),)}
    ).token_ids


@pytest.mark.parametrize(("rule", "tell"), lies, ids=[tell.__name__ for _, tell in lies])
def test_a_doctored_ledger_is_found_out(truth: Evidence, rule: str, tell: Lie) -> None:
    assert rule in tell(truth).rules()


def test_a_loss_where_nobody_died_is_found_out(truth: Evidence) -> None:
    assert truth.judged(Terms(lossless=False)).violations == []
    assert [rule for rule, _ in truth.judged(Terms(lossless=True)).violations] == ["a"]


def test_every_rule_has_several_lies() -> None:
    rules = [rule for rule, _ in lies]
    assert all(rules.count(rule) >= 3 for rule in "abcd")


# --- sabotaged scripts ------------------------------------------------------------------------------------------------

SABOTAGE = {
    "a sample again is published again": ("complete", r"if f\[1\] == 'done' or .* then", "if false then", "a"),
    "an accepted job is put in no queue": ("enqueue", r"redis.call\('RPUSH', queue_key.*", "", "a"),
    "losses are not counted": ("reap", r"redis.call\('HINCRBY', job_key\(id\), 'c', 1\)", "0", "a"),
    "a failure is not told": ("lib", r"redis.call\('XADD', reply, (?s:.*?)\n.*\)\n", "\n", "a"),
    "the owner is not checked": ("complete", r"or f\[2\] ~= worker or f\[3\] ~= attempt\n", "\n", "b"),
    "a claim raises no attempt": ("claim", r"tonumber\(f\[2\]\) \+ 1\)", "math.max(tonumber(f[2]), 1))", "b"),
    "the wrong sample number": ("complete", r"'s', sample, 'm'", "'s', 1 - sample, 'm'", "c"),
    "no SREM from what a worker holds": ("lib", r"if owner then redis.call\('SREM', held_key.*", "", "d"),
    "a tombstone without TTL": ("lib", r"redis.call\('EXPIRE', key, TOMBSTONE_S\)", "", "d"),
    "bytes are not given back": ("complete", r"redis.call\('HINCRBY', load_key, 'bytes'.*", "", "d"),
    "the client's jobs are not forgotten": ("lib", r"redis.call\('SREM', client_key.*", "", "d"),
}


@pytest.mark.parametrize("what", SABOTAGE)
async def test_a_sabotaged_script_is_found_out(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, pattern, instead, rule = SABOTAGE[what]
    real = messages_lua.script_source

    def source(name: str) -> str:
        text = real(name)
        if script not in {"lib", name}:
            return text
        text, count = re.subn(pattern, instead, text)
        assert count, f"{script}.lua does not contain {pattern} any more: find another way to sabotage it"
        return text

    monkeypatch.setattr(messages_lua, "script_source", source)
    found = await evidence(tmp_path)
    assert rule in found.rules(), found.judged().violations
