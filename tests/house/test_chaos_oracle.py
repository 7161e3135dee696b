"""The chaos suite's oracle is worth as much as the lies it catches: doctored ledgers, and a real server with sabotaged
scripts, each of which must be found by the rule it breaks, while the truth passes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import journal
from chaos.baseline import Size
from chaos.context import back_ms
from chaos.ledger import Event
from chaos.oracle import Terms
from chaos.story import MAX_LOST, Evidence, evidence

from rolloutmq.messages import GenerateJob, RolloutResult, Segment
from rolloutmq.messages.codec import decode, encode
from rolloutmq.messages.scripts import runner as messages_lua
from rolloutmq.worker.scripted.engine import scripted_token


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
    last = max(i for i, event in enumerate(truth.events) if event.kind in {"clock", "failure"})  # later: unknown
    assert all(event.at_ms for event in truth.events[:last])


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


def asking(it: Evidence, oldest: int = 2) -> Evidence:
    """The first job of which a sample is published asks for an adapter, in this version or a newer one."""
    job_id = it.events[index(it, "publish")].job
    which = [event.job for event in it.events if event.kind == "accept"].index(job_id)
    job = decode(it.events[index(it, "accept", which)].payload, GenerateJob)
    asks = job.model_copy(update={"lora": "math", "min_adapter_version": oldest})
    return changed(it, "accept", which, payload=encode(asks))


def tuned(it: Evidence, version: int = 2) -> Evidence:
    """The samples of that job have a version of the adapter, and it is true."""
    published = [event for event in it.events if event.kind == "publish"]
    for which, event in enumerate(published):
        if event.job == published[0].job:
            stream = f"{event.job}{event.sample:04x}"
            tokens = decode_tokens([scripted_token(stream, 3 + i, 0, f"math@{version}") for i in range(2)])
            says = {"adapter": "math", "adapter_version": version, "adapter_segments": (Segment(version, 2),)}
            it = republished(it, which, token_ids=tokens, **says)
    return it


@lie("c")
def an_adapter_that_nobody_published(it: Evidence) -> Evidence:
    return tuned(asking(it))


@lie("c")
def an_adapter_that_was_not_asked_for(it: Evidence) -> Evidence:
    return tuned(it)


@lie("c")
def no_adapter_where_one_was_asked_for(it: Evidence) -> Evidence:
    return asking(it)


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


def test_each_term_excuses_what_it_names_and_nothing_else(truth: Evidence) -> None:
    def rules(it: Evidence, **terms: object) -> set[str]:
        return {rule for rule, _ in it.judged(Terms(**terms)).violations}  # type: ignore[arg-type]

    nothing, other, twice = (
        the_client_gets_nothing(truth),
        the_client_gets_something_else(truth),
        the_client_gets_it_twice(truth),
    )
    assert rules(nothing, giving_up=frozenset({"client"})) == set()
    assert rules(twice, giving_up=frozenset({"client"})) == {"a"}
    assert rules(other, rewound=True) == set()
    assert other.judged(Terms(rewound=True)).unlogged == 1
    assert rules(nothing, rewound=True) == {"a"}
    alone = truth.received[0].job
    forgotten = replace(truth, events=[event for event in truth.events if event.job != alone])
    assert "a" in rules(forgotten)
    assert "a" not in rules(forgotten, forgotten=True, rewound=True)
    untold = replace(forgotten, received=[got for got in truth.received if got.job != alone])
    assert [text for _, text in untold.judged(Terms(forgotten=True)).violations if "never told" in text]
    unfinished = without(truth, "terminal")
    job = next(event.job for event in truth.events if event.kind == "terminal")
    others = {event.job for event in truth.events if event.job} - {job}
    assert "a" in rules(unfinished, tampered=frozenset(others))
    assert "a" not in rules(unfinished, tampered=frozenset({job}))
    assert "d" not in rules(a_counter_is_wrong(truth), tampered=frozenset({job}))


def test_an_adapter_is_judged_by_what_was_published_and_asked_for(truth: Evidence) -> None:
    terms = Terms(adapters=frozenset({("math", 2)}))
    verdict = tuned(asking(truth)).judged(terms)
    assert (verdict.violations, verdict.with_adapter) == ([], 2)
    too_old = tuned(asking(truth, 3)).judged(terms).violations
    assert [(rule, text.split(": ", 1)[1]) for rule, text in too_old] == [
        ("c", "versions [2] of math, the job asked for 3 or newer")
    ] * 2
    another = republished(tuned(asking(truth)), 0, adapter_segments=(Segment(1, 2),)).judged(terms).violations
    assert {rule for rule, _ in another} == {"c"}
    assert any("did not sample" in text for _, text in another)


def test_what_a_worker_publishes_in_two_shards_is_in_no_order(truth: Evidence) -> None:
    lie = a_worker_goes_back_in_versions(truth)
    assert "c" in lie.rules()
    assert changed(lie, "publish", 0, shard=1).rules() == set()


def test_a_worker_that_comes_back_under_its_name_does_not_hold_what_it_claims_then() -> None:
    def event(kind: str, job: str, worker: str, at_ms: int) -> Event:
        return Event(0, kind, job, worker, at_ms=at_ms)  # type: ignore[arg-type]

    story = [event("claim", "a", "w", 10), event("lost", "a", "w", 40), event("requeue", "a", "w", 41)]
    heir = [event("claim", "a", "heir", 5000)]  # when somebody has room for it
    later = [event("claim", "b", "w", 6000), event("terminal", "b", "w", 9000)]
    assert back_ms([*story, *heir, *later], "w", 20) == back_ms(story, "w", 20) == 41


def test_every_rule_has_several_lies() -> None:
    rules = [rule for rule, _ in lies]
    assert all(rules.count(rule) >= 3 for rule in "abcd")


# --- sabotaged scripts ------------------------------------------------------------------------------------------------

SABOTAGE = {
    "a sample again is published again": ("complete", r"if stands == 'done' or .* then", "if false then", "a"),
    "an accepted job is put in no queue": ("enqueue", r"redis.call\('ZADD', queue_key\(class\), its_turn.*", "", "a"),
    "losses are not counted": ("reap", r"redis.call\('HINCRBY', job_key\(id\), 'c', 1\)", "0", "a"),
    "a failure is not told": ("lib", r"redis.call\('XADD', reply, (?s:.*?)\n.*\)\n", "\n", "a"),
    "the owner is not checked": ("complete", r"or owner ~= worker or current ~= attempt\n", "\n", "b"),
    "a claim raises no attempt": ("claim", r"or 0, f\[2\] \+ 1", "or 0, math.max(f[2], 1)", "b"),
    "the wrong sample number": ("complete", r"'s', sample,", "'s', 1 - sample,", "c"),
    "no SREM from what a worker holds": ("lib", r"if owner then redis.call\('SREM', held_key.*", "", "d"),
    "a tombstone without TTL": ("lib", r"redis.call\('EXPIRE', key, remembered_s\(\)\)", "", "d"),
    "bytes are not given back": ("lib", r"redis.call\('H(?:INCRBY|SET)', load_key, 'bytes', 0.*", "", "d"),
    "the client's jobs are not forgotten": ("lib", r"redis.call\('SREM', client_key\(client\), id\)", "", "d"),
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
        assert count or script != name, f"{script}.lua has no {pattern} any more: find another way to sabotage it"
        return text

    monkeypatch.setattr(messages_lua, "script_source", source)
    found = await evidence(tmp_path)
    assert rule in found.rules(), found.judged().violations
