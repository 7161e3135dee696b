"""The ceiling of the queue benchmark: this package's own Lua scripts and nothing else.

Client and worker run enqueue, claim, complete and ack in batches over redis-py with hiredis, in two processes; every
result is checked. There is no asyncio, no heartbeat, no retry and no message model: frames are made before the clock
starts, and a result is a string of a frame's size that begins with the answer. Each side sends all it has as one
pipeline, and has one round trip under way. One client and one worker in Python cannot get more from these scripts.

`python -m benchmarks.broker.raw worker|client URL LOAD-JSON`
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import redis

from rolloutmq.messages.broker import BATCH_BYTES, Caps
from rolloutmq.messages.codec import encode
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.messages.redis import ENTRY_BYTES, Keys
from rolloutmq.messages.scripts import script_source

from ..peers import Load, Tally, main
from .ours import POOL, job_of

CLIENT, WORKER = "raw-client", "raw-worker"
BATCH = 256
RESULT_FRAME = 480
"""Bytes, about as many as an encoded RolloutResult of 16 tokens with logprobs has."""
ANSWER = 64
COUNTED = ENTRY_BYTES + RESULT_FRAME
"""Bytes that complete.lua counts for such a result. `ack` has to give the same number."""
FRAMES_BYTES = 32 << 20


class Raw:
    """Runs scripts by their SHA on one connection."""

    def __init__(self, url: str, *names: str) -> None:
        self.redis: Any = redis.Redis.from_url(url, protocol=2)
        self.keys = Keys(POOL)
        self._shas = {name: self.redis.script_load(script_source(name)) for name in names}

    def command(self, name: str, *args: Any) -> tuple[Any, ...]:
        return ("EVALSHA", self._shas[name], 1, self.keys.load, self.keys.prefix, *args)

    def run(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands as one pipeline, and return the replies. Exits on an error reply."""
        connection = self.redis.connection_pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [connection.read_response() for _ in commands]
        finally:
            self.redis.connection_pool.release(connection)


def work(url: str, load: Load) -> None:
    """Claim, answer as the payload asks, and claim again in the same round trip, until SIGTERM."""
    raw = Raw(url, "heartbeat", "claim", "complete")
    status = encode(WorkerStatus(worker_id=WORKER, host="raw", pid=1, state="serving", version=0))
    raw.run(raw.command("heartbeat", WORKER, 3_600_000, status, 1))
    at = _frame(load, 0).index(load.payload(0))
    pad = b"x" * (RESULT_FRAME - ANSWER)
    answers: list[Any] = []
    for number in itertools.count(1):
        claim = raw.command("claim", WORKER, number, BATCH, BATCH, 0)
        _, _, *given = raw.run(*([raw.command("complete", WORKER, *answers)] if answers else []), claim)[-1]
        answers = []
        for i in range(0, len(given), 7):
            answers += (given[i], given[i + 1], 0, given[i + 5][at : at + ANSWER] + pad)
        if not given:
            raw.redis.blpop([raw.keys.wake], timeout=1)


def _frame(load: Load, number: int) -> bytes:
    return encode(job_of(load.payload(number)).model_copy(update={"reply_to": CLIENT}))


def drive(url: str, load: Load) -> dict[str, float]:
    raw = Raw(url, "enqueue", "ack")
    frames = [_frame(load, number) for number in range(max(1, min(4096, FRAMES_BYTES // load.payload_bytes)))]
    client = _Client(raw, load, frames)
    client.phase(load.warmup_s)
    return client.phase(load.seconds)


class _Client:
    """Keeps the window full: acknowledges, enqueues and waits for more in one round trip."""

    def __init__(self, raw: Raw, load: Load, frames: list[bytes]) -> None:
        self._raw, self._load, self._frames = raw, load, frames
        self._tally = Tally(load)
        self._ids = itertools.count(1)
        self._last: bytes = b"0"
        self._acks: list[Any] = []

    def phase(self, seconds: float) -> dict[str, float]:
        tally, window = self._tally, self._load.window
        tally.begin()
        until = time.perf_counter() + seconds
        while True:
            commands = self._flush()
            room = window - len(tally.open)
            if room > 0 and time.perf_counter() < until:
                commands += self._enqueues(room)
            if not tally.open:
                self._raw.run(*commands)
                return tally.figures()
            read = ("XREAD", "COUNT", 512, "BLOCK", 60_000, "STREAMS", self._raw.keys.reply(CLIENT), self._last)
            self._take(self._raw.run(*commands, read)[-1])

    def _flush(self) -> list[tuple[Any, ...]]:
        acks, self._acks = self._acks, []
        return [self._raw.command("ack", CLIENT, "", *acks)] if acks else []

    def _enqueues(self, room: int) -> list[tuple[Any, ...]]:
        caps, frames, sent = Caps(), self._frames, self._tally.sent
        batch = min(BATCH, max(1, BATCH_BYTES // len(frames[0])))
        commands = []
        while room > 0:
            args: list[Any] = [caps.jobs, caps.nbytes, caps.unread, ""]
            for _ in range(min(room, batch)):
                number = next(self._ids)
                key, frame = b"%032x" % number, number % len(frames)
                sent(key, frame)
                args += (key, frames[frame], 1, 1, CLIENT, 0, "", "", "", "", "", key[-8:], "")
            commands.append(self._raw.command("enqueue", *args))
            room -= batch
        return commands

    def _take(self, answer: Any) -> None:
        if not answer:
            raise SystemExit(f"{len(self._tally.open)} jobs were not answered within a minute")
        entries = answer[0][1]
        self._last = entries[-1][0]
        for entry_id, fields in entries:  # fields: j, id, s, sample, m, result, l, last
            self._tally.answered(fields[1], fields[5][:ANSWER], size=ANSWER)
            self._acks += (entry_id, COUNTED)


if __name__ == "__main__":
    main(work, drive)
