"""The scripts against a model: any sequence of calls by clients and workers, each perhaps sent twice, and time passing.

The same examples run every time. HYPOTHESIS_PROFILE=long runs many more, new ones each time. What
fails is printed as steps and as a @reproduce_failure(...) line; above `class PoolMachine` it runs that example again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from support.redis.machine_calls import AMPLE, CLIENTS, PREFIX, STEADY, index, twice
from support.redis.machine_workers import WorkerRules
from support.redis.model import CLASSES, Job
from support.redis.model_claim import WARD_MS, Claiming, waiting

from rolloutmq.messages.scripts.source import script_source
from rolloutmq.ops.redis.embedded import EmbeddedRedis

COMMON = settings(deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
SOME = settings(COMMON, max_examples=20, stateful_step_count=40, derandomize=True)
MANY = settings(SOME, max_examples=60)
LONG = settings(COMMON, max_examples=5000, stateful_step_count=60)
LYING = settings(SOME, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False, verbosity=Verbosity.quiet)

LIES = {
    "the owner is not checked": ("complete", "owner ~= worker or current ~= attempt", "current ~= attempt"),
    "the attempt is not raised": ("claim", "or 0, f[2] + 1", "or 0, f[2] + 0"),
    "who loses a job still holds it": ("lib", "redis.call('SREM', held_key(owner), id)\nend", "\nend"),
    "bytes of done jobs stay counted": ("complete", "jobs_ended(done_jobs, done_bytes,", "jobs_ended(done_jobs, 0,"),
    "saved bytes of ended jobs stay counted": ("lib", "if saved then", "if false then"),
    "saved bytes of published samples stay counted": (
        "lib_pieces",
        "if bytes > 0 then count_saved(key, -bytes) end",
        "",
    ),
    "a published sample is forgotten": ("complete", "'s' .. sample, 1, 'd', done)", "'d', done)"),
    "a claim sent again gives the next jobs": ("claim", "last[1] == number", "false"),
    "an ended job keeps its deadline": (
        "lib",
        "redis.call('ZREM', prefix .. 'deadlines', id) end\n  if saved",
        "end\n  if saved",
    ),
    "what was saved of a published sample stays": (
        "complete",
        "done)\n      if saved and dropped < 4096 then dropped = dropped + drop_pieces_from(key, sample, 0) end",
        "done)",
    ),
    "handing back counts as a loss": (
        "release",
        "lost > 0 and redis.call('HINCRBY', job_key(id), 'c', lost) or 0",
        "redis.call('HINCRBY', job_key(id), 'c', 1)",
    ),
    "anybody may bury a running job": (
        "dead",
        "not owns(ARGV[3], ARGV[2], ARGV[4])",
        "redis.call('HGET', job_key(ARGV[3]), 'st') ~= 'r'",
    ),
    "a result is taken twice": ("ack", "redis.call('XDEL', reply, ARGV[i]) == 1", "redis.call('XDEL', reply, ARGV[i])"),
    "lower classes never have their turn": ("claim", "take(class, math.floor(owed[class] / 8))", "0"),
    "nobody is a suspect": ("lib", "lost > 0 and lost >= max_lost - 1", "false"),
    "any weights will do": ("claim", "version < needs then", "false then"),
    "an ended id is a new job": ("enqueue", "if not state then", "if state ~= 'q' and state ~= 'r' then"),
    "all groups are one": ("cancel_client", "group == '' or", "true or"),
    "an old claim gets new jobs": ("claim", "(whole(last[1]) or 0) > tonumber(number)", "false"),
    "a piece is kept after a gap": (
        "lib_pieces",
        "number > 0 and redis.call('HEXISTS', key, piece_field(sample, number - 1)) == 0",
        "false",
    ),
    "later pieces stay": ("lib_pieces", "drop_pieces_from(key, sample, number + 1)", ""),
    "a sample too many is published": ("complete", "or tonumber(sample) >= tonumber(samples)", ""),
    "set-aside jobs wait for ever": (
        "claim",
        "ranges = {}, '', {{0, math.min(version, 1099511627776 - 1)}}",
        "ranges = {}, '', {{0, 0}}",
    ),
    "ended suspects stay": ("claim", "redis.call('LREM', suspects_key, 1, id)\n      else\n", "else\n"),
    "a ward's turn is not renewed": ("claim", "if ward() == worker then be_ward() end", ""),
    "ended ids stay in a queue": ("lib", "if redis.call('ZREM', queue_key(class), id) == 1", "if false"),
    "tenants have no turns": ("enqueue", "turns[tenant] = turn + n", "turns[tenant] = turn"),
    "a late tenant makes up for what it did not ask for": ("enqueue", "counted(load[6 + class])", "0"),
    "what comes back has lost its turn": (
        "lib_jobs",
        "'ZADD', queue_key(class), whole(turn) or 0",
        "'ZADD', queue_key(class), 0",
    ),
    "what nobody ran was its client's turn": (
        "lib",
        "redis.call('ZREM', turns_key(class), client)",
        "redis.call('ZREM', 'x', client)",
    ),
    "claimed ids stay in their queue": ("claim", "if queue then claimed[#claimed + 1]", "if queue then claimed[1]"),
    "samples that wait are not counted": ("claim", "if unqueued ~= 0 then", "if false then"),
    "a move is a redelivery": ("claim", "redis.call('HDEL', job_key(id), 'm') == 1", "false"),
    "a move is anybody's": (
        "lib",
        "redis.call('ZADD', later_key(class), -number,",
        "redis.call('ZADD', later_key(class), 0,",
    ),
    "a suspect moves": ("release", "counted(lost) > 0 or not ", "not "),
    "who is gone is given jobs": ("lib", "if not alive(worker) then return false end", ""),
    "a share never grows": (
        "claim",
        "level = level * 2 ^ math.min(math.max(waited - 2, 0), 16) + math.max(waited - 2, 0)",
        "",
    ),
    "a failure is of no group": ("lib", "group or id)", "id)"),
    "a stray is taken from its worker": ("reap", "state ~= 'r' or owner ~= worker", "state ~= 'r'"),
    "a job without a record stays held": ("release", "redis.call('EXISTS', job_key(id)) == 0", "false"),
    "a transfer opens again": ("announce", "state == 'closed'", "false"),
    "a committed version goes back": ("lib", "<= (whole(redis.call('HGET', weights, newest)) or 0)", "< 0"),
    "who has an older version still offers it": ("lib", "redis.call('UNLINK', prefix .. 'holders')", ""),
    "an older version is offered": ("report", "ARGV[9] ~= '' and redis", "ARGV[9] ~= '' or redis"),
    "who is gone still offers weights": ("lib", "redis.call('HDEL', prefix .. 'holders', worker)", ""),
    "a preference is for ever": ("claim", "until_ms > clock().deadlines\n    and", "true\n    and"),
    "a preference is for every attempt": ("claim", "until_ms and f[2] == '0'", "until_ms"),
    "nobody ends a preference": ("reap", "undecided = end_preferences(left - expired)", "undecided = 0"),
    "a worker that is gone is waited for": ("lib", "redis.call('ZADD', prefers_key, 0, id_of(member))", ""),
    "an ended job is still left to a worker": ("lib", "if prefers then redis.call('ZREM', prefers_key, id) end", ""),
    "the preferred worker looks in vain": ("claim", "if whole(last[4]) then ranges", "if false then ranges"),
    "outcomes stay for ever": ("lib", "redis.call('EXPIRE', reply, 604800)", ""),
}
"""What a script could do wrong: (script, what it says, what it says then)."""
LATE = {
    "anybody may bury a running job", "a result is taken twice", "ended suspects stay", "nobody ends a preference",
    "a worker that is gone is waited for", "a ward's turn is not renewed", "set-aside jobs wait for ever",
}  # fmt: skip
"""Lies that take hundreds of examples to find."""


class PoolMachine(WorkerRules):
    """Calls scripts as broker and leases would, with raw arguments; compares all of Redis with the model after each."""

    @rule(number=st.integers(1, 3), served=st.booleans(), committed=st.booleans(), which=index, again=twice)
    def weights(self, number: int, served: bool, committed: bool, which: int, again: bool) -> None:
        """served: by a worker, which says so. committed: the sender says it, when it ends the transfer.

        After a committed version comes one that no worker has.
        """
        self.transfer(number, served, committed, which, again)
        if committed and number < 3:
            self.transfer(number + 1, False, True, which, again)

    def transfer(self, number: int, served: bool, committed: bool, which: int, again: bool) -> None:
        self.epochs += 1
        opened = self.epochs, number, "m", 60, "told", ""
        before = self.look()
        if number <= int(before["weights"].get("highest", 0)):
            assert self.call("announce", *opened) == "taken"
            assert self.look().stable() == before.stable(), "a number that is taken"
            self.redis.hset(f"{PREFIX}weights", "highest", number - 1)  # as if Redis had lost the newer ones
        self.send("announce", *opened, again=again)
        if served and self.model.workers:
            worker = self.pick(list(self.model.workers), which)
            waiting = sum(1 <= score <= number for cls in range(CLASSES) for score in self.state.later(cls).values())
            said = self.epochs, worker, "report", 1, number, 60, "digest", "there"
            (how, found), _ = self.send("report", *said, again=again)
            assert (how, found) == ("ok" if number in self.model.served else "committed", waiting)
            self.commit(number, worker, "there")
        ends = self.epochs, number, "committed" if committed else "failed", 60, "digest", "here", "{}"
        how, _ = self.send("close", *ends, again=again)
        assert (how == "committed") == (committed or number in self.model.served)
        if how == "committed":
            self.commit(number, "", "here")
        self.remember("announce", *opened)
        if again:
            ended = self.look().stable()
            assert self.call("announce", *opened) == "closed"
            assert self.look().stable() == ended, "a copy of the announcement after the end"

    def commit(self, version: int, who: str, where: str) -> None:
        """A version is committed, if it was not, and `who` offers it."""
        model = self.model
        model.served.add(version)
        if version > model.committed:
            model.committed, model.holders = version, {}
        if version == model.committed:
            model.holders[who] = where

    @precondition(lambda self: self.state["suspects"] and self.model.workers)
    @rule(which=index, ended=st.booleans())
    def suspects_turn(self, which: int, ended: bool) -> None:
        """Somebody claims while there are suspects, perhaps one that has just been cancelled."""
        if ended:
            job = self.model.jobs[self.pick(list(self.state["suspects"]), which)]
            if job.open:
                assert self.call("cancel", "no more", job.id) == ["ok"]
                self.model.fail(job, "cancelled", "no more")
            self.settle()
        self.take(Claiming(self.pick(list(self.model.workers), which), 2, 9, 3))

    @rule()
    def ward_is_over(self) -> None:
        self.redis.delete(f"{PREFIX}ward")

    @precondition(lambda self: self.state["ward"])
    @rule()
    def ward_ages(self) -> None:
        """And the ward claims, as it does all the time."""
        until = int(self.state["clock"]["at"]) + WARD_MS // 2
        self.redis.set(f"{PREFIX}ward", f"{until}@{self.state['ward']}", keepttl=True)
        self.state = self.look()
        if self.state["ward"] in self.model.workers:
            self.take(Claiming(self.state["ward"], 2, 9, 3))

    ward_claims = ward_ages

    @precondition(lambda self: self.sent)
    @rule(which=index)
    def late_copy(self, which: int) -> None:
        """A copy that was on its way all the time, on a connection given up long ago."""
        name, args = self.pick(self.sent, which)
        self.call(name, *args)
        assert self.look().stable() == self.state.stable(), f"a late copy of {name}"

    @precondition(lambda self: self.old_claims)
    @rule(which=index)
    def late_claim(self, which: int) -> None:
        """The newest gives once more what the worker still has of it, an older one nothing; both change nothing."""
        older = [one for one in self.old_claims if one[1] < self.claims[one[0]] and one[0] in self.model.workers]
        worker, number, *limits = self.pick(older if older and which < 8 else self.old_claims, which)
        answer = self.call("claim", worker, number, *limits)
        if self.model.workers.get(worker, True):
            assert answer == ["NOLEASE"]
        elif number < int(self.state[f"worker:{worker}"]["claim"]):
            assert answer == [0, -1], "an old claim gave something"
        else:
            assert {*answer[2::7]} <= {job.id for job in self.model.held(worker)}
        assert self.look().stable() == self.state.stable(), f"claim {number} came late"

    @precondition(lambda self: not self.rushed and False in self.model.workers.values() and not self.state["suspects"])
    @rule(which=index, jobs=st.sampled_from((8, 4, 5)), aside=st.integers(0, CLASSES - 1))
    def rush(self, which: int, jobs: int, aside: int) -> None:
        """24 jobs of the highest class come and go: lower classes that wait are not left behind, set aside or not."""
        worker = self.pick([worker for worker, over in self.model.workers.items() if not over], which)
        if any(self.model.jobs[id].suspect for id in self.state[f"held:{worker}"]):
            return
        self.rushed = True
        if aside:  # nothing waits but what was set aside, in this class at least one
            self.made += 1
            self.submit([Job(f"{self.made:032x}", 1, aside, "ca", "", 3, None, False, "p")])
            self.take(Claiming(worker, 64, AMPLE, 2))
            self.settle()
        neglected = {cls: waiting(self.state, self.model, cls, worker, 3) for cls in range(1, CLASSES)}
        neglected = {cls: found for cls, found in neglected.items() if found}
        passed = 0
        while passed < 24:
            if len(self.state.queue(0)) < 8:
                self.made += 8
                fresh = [[f"{self.made - i:032x}", 1, 0, "ca", "", 0, None, False, "p"] for i in range(8)]
                self.submit([Job(*one) for one in fresh])
            given = self.take(Claiming(worker, jobs, AMPLE, 3))
            self.settle()
            for cls in {job.cls for job in given}:
                neglected.pop(cls, None)
            passed += sum(job.cls == 0 for job in given)
            if done := [job for job in given if job.cls == 0]:
                self.publish(worker, [(job.id, job.attempt, i) for job in done for i in range(job.n)])
                self.settle()
        assert not neglected, "classes that were not served while 24 jobs of higher ones were"

    rush_more = rush

    @precondition(lambda self: self.steps > 35)
    @rule()
    def everything_ends(self) -> None:
        """Cancelled, taken, left: nothing stays but what is meant to."""
        for client in CLIENTS:
            self.cancel_client(client, "", False)
            self.settle()
            self.ack(client, 1000, False)
        for worker in list(self.model.workers):
            assert self.call("leave", worker) == 0
            del self.model.workers[worker]
        self.join(False)
        worker = list(self.claims)[-1]
        self.ward_is_over()
        while any(self.lists(self.look()).values()):
            self.settle()
            assert self.take(Claiming(worker, 64, 64, 0)) == []
        self.settle()
        self.reap(256, False)
        assert self.call("leave", worker) == 0
        del self.model.workers[worker]
        state = self.look()
        lasting = {"load", "bell", "weights", "holders", "transfers", "dead", "letters", "clock"}
        assert {key for key, ttl in state.ttl.items() if ttl == -1} <= lasting


@pytest.fixture
def machine(redis_db: str, shared_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PoolMachine]]:
    with redis.Redis.from_url(shared_redis.unix_url, encoding="latin-1", decode_responses=True) as client:
        monkeypatch.setattr(PoolMachine, "redis", client, raising=False)
        monkeypatch.setattr(PoolMachine, "shas", {}, raising=False)
        yield PoolMachine


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "examples", [pytest.param(SOME, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
)
def test_any_sequence_keeps_the_promises(machine: type[PoolMachine], examples: settings) -> None:
    assert all(truth in script_source("claim") for truth, _ in STEADY), "the script has changed"
    run_state_machine_as_test(machine, settings=LONG if os.environ.get("HYPOTHESIS_PROFILE") == "long" else examples)


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[pytest.mark.slow] if lie in LATE else []) for lie in LIES])
def test_the_machine_finds_this_lie(machine: type[PoolMachine], lie: str) -> None:
    script, truth, told = LIES[lie]
    assert truth in script_source(script), "the script has changed: tell another lie"
    liar = type("Liar", (machine,), {"lies": ((truth, told),)})
    with pytest.raises(Exception) as found:  # noqa: PT011  (whatever the machine notices first)
        run_state_machine_as_test(liar, settings=LYING)
    assert not isinstance(found.value, redis.RedisError), "the lie is no Lua"
