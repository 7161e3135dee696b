"""How the state machine talks to Redis: raw calls of scripts, a look at everything, one check of everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from support.redis.model import CLASSES, Job, Model
from support.redis.state import State

from rolloutmq.messages.scripts.source import script_source

PREFIX = "rmq:{m}:"
CLIENTS = ("ca", "cb")
HOUR_MS = 3_600_000
AMPLE = 1 << 40

SNAPSHOT = """
local found = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind, content = redis.call('TYPE', key).ok, nil
  if kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'set' then content = redis.call('SMEMBERS', key)
  elseif kind == 'list' then content = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'stream' then content = redis.call('XRANGE', key, '-', '+')
  else content = redis.call('GET', key) end
  found[#found + 1] = {string.sub(key, #ARGV[1] + 1), kind, redis.call('PTTL', key), content}
end
return found
"""

STEADY = (("one.asked + 500 <= now", "false"), ("age >= 0 and age <= oldest", "false"))
"""How long ago somebody claimed makes no difference, so that a run can be repeated."""

index = st.integers(0, 9)
twice = st.booleans()


class PoolCalls(RuleBasedStateMachine):
    """Calls scripts as broker and leases would, with raw arguments; compares all of Redis with the model after each."""

    redis: Any
    """A client of a server that nobody else uses, which decodes replies as Latin-1."""
    shas: dict[str, str]
    """Of the scripts it has been given."""
    lies: tuple[tuple[str, str], ...] = ()
    """What scripts say, and what they are made to say instead."""

    def __init__(self) -> None:
        super().__init__()
        self.redis.flushdb()
        self.model = Model(3)
        self.state = State({}, {})
        self.submitted: list[list[Any]] = []  # what was sent, to send it again
        self.claims: dict[str, int] = {}
        self.tokens: list[tuple[str, str, int]] = []  # (worker, job, attempt) of every claim
        self.sent: list[tuple[str, tuple[Any, ...]]] = []
        self.old_claims: list[tuple[Any, ...]] = []
        self.saved: list[tuple[str, list[tuple[str, int, int, int, str]]]] = []
        self.made = self.epochs = self.incarnations = self.steps = 0
        self.rushed = False

    # calling

    def eval(self, source: str, *args: Any) -> Any:
        if source not in self.shas:
            self.shas[source] = self.redis.script_load(source)
        return self.redis.evalsha(self.shas[source], 1, f"{PREFIX}load", PREFIX, *args)

    def call(self, name: str, *args: Any) -> Any:
        source = script_source(name)
        for truth, lie in (*(STEADY if name == "claim" else ()), *self.lies):
            source = source.replace(truth, lie)
        return self.eval(source, *args)

    def look(self) -> State:
        return State.read(self.eval(SNAPSHOT))

    def send(self, name: str, *args: Any, again: bool = False) -> tuple[Any, Any]:
        """The answer; and, sent twice as redis-py does when a reply is lost, the second one. It must change nothing."""
        answer = self.call(name, *args)
        if not again:
            return answer, None
        first = self.look().stable()
        second = self.call(name, *args)
        assert self.look().stable() == first, f"{name} sent twice"
        return answer, second

    @invariant()
    def settle(self) -> None:
        """Redis holds what the model says, and nothing else."""
        self.state = self.look()
        self.model.check(self.state)
        self.steps += 1

    def pick(self, found: list[Any], which: int) -> Any:
        """One of the newest first, so that small numbers are the interesting ones."""
        return found[-1 - which % len(found)]

    def remember(self, name: str, *args: Any, claims: Iterable[tuple[str, int]] = ()) -> None:
        """A copy may arrive late. Not of what was said of an attempt that is still to come: nobody says that."""
        if all(attempt <= self.model.jobs[id].attempt for id, attempt in claims):
            self.sent.append((name, args))

    def lists(self, state: State | None = None) -> dict[str, list[str]]:
        state = state or self.state
        return {f"queued:{cls}": state.queue(cls) for cls in range(CLASSES)} | {"suspects": list(state["suspects"])}

    def put_back(self, job: Job, lists: dict[str, list[str]]) -> None:
        if job.suspect:
            lists["suspects"].append(job.id)
        else:
            queue = lists[f"queued:{job.cls}"]
            queue[:] = sorted([*queue, job.id], key=lambda id: (self.model.jobs[id].turn, id))
