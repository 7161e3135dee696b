"""What is in Redis under short names, by the names that scripts (see `script_source`) and readers use.

docs/redis.md has a table of the keys and of these fields, made of the docstrings here and in keys.py.
"""

from __future__ import annotations

import re

from ..model import PRIORITIES

CLASSES = len(PRIORITIES)
ENTRY_BYTES = 64
"""Bytes that an entry of a reply stream counts for beside its content."""
ADAPTERS_FROM, SLOTS_FROM, SLOT = 1 << 40, 1 << 52, 1 << 32
"""Scores in `later`: below the first a version of the weights, then an adapter's number times it and a version of that,
then a slot of needs times SLOT and tokens of context. A higher version of the weights counts as ADAPTERS_FROM - 1.
Below 0 minus the number of a worker, and from -ADAPTERS_FROM down minus that less the one version that a job wants."""

NUMBERS = ("CLASSES", "ENTRY_BYTES", "ADAPTERS_FROM", "SLOTS_FROM", "SLOT")
"""Those of these constants that scripts have, too."""


class JOB:
    """A job's record. Of one that has ended `state` and `digest` are left, with a TTL."""

    state = "st"
    """`q` queued, `r` running; after the end `done`, `cancelled`, `expired`, `dead`"""
    payload = "p"
    """The job, encoded"""
    nbytes = "z"
    """Bytes of the payload"""
    digest = "h"
    """Of its content"""
    samples = "n"
    """How many it has"""
    published = "d"
    """How many of them are published"""
    priority = "q"
    """Number of its class, 0 for the highest"""
    client = "y"
    """Who reads the results"""
    group = "G"
    """Group id, where one was given"""
    accepted = "t"
    """When, in ms of the pool's clock"""
    deadline = "e"
    """Until when, in ms of the pool's clock"""
    min_version = "v"
    """Least version of the weights, or `=<version>`: that one and no other"""
    max_staleness = "g"
    """Versions that it may be behind"""
    adapter = "l"
    """`<name>@<least version>`"""
    needs = "N"
    """Of an engine, `<tokens of context> <name> <name> …`; a plain job has none"""
    prefers = "P"
    """`<ms>@<worker id>`: no other worker takes it for so many ms after its acceptance"""
    turn = "T"
    """Its place in the queue, see `queued`"""
    owner = "w"
    """Worker that runs it"""
    attempt = "a"
    """The fencing token: one more with every claim"""
    lost = "c"
    """Leases that it was lost with"""
    moves = "M"
    """How often it was moved"""
    moving = "m"
    """It is on its way to another worker"""
    ending = "x"
    """The next worker only ends it, with the tokens that it has"""
    saved = "kk"
    """Bytes of saved pieces, once there was one"""
    sample = "s"
    """`s<i>`: sample i is published"""
    piece = "k"
    """`k<i>`, `k<i>.1`, `k<i>.2` …: saved pieces of unfinished sample i, in order"""


class ENTRY:
    """An outcome on a client's reply stream: a result, or why there is none. Notices on `news` have the first two."""

    job = "j"
    """Job id"""
    sample = "s"
    """Number of the sample"""
    result = "m"
    """The result, encoded"""
    last = "l"
    """`0` if further results of the job come"""
    outcome = "o"
    """`cancelled`, `expired` or `dead`"""
    cause = "c"
    """For people"""
    host = "h"
    """Where it failed"""
    error = "e"
    """Text of the error"""
    attempts = "a"
    """How often it was claimed"""
    published = "d"
    """Samples that were published before"""
    group = "G"
    """Group id"""


class SESSION:
    """A recorded session. Of a forgotten one `closed` is left, with a TTL."""

    closed = "x"
    """It takes no further turns: `1` it was taken, `2` forgotten"""
    turns = "n"
    """How many turns it has"""
    tokens = "t"
    """Tokens of their prompts and outputs"""
    nbytes = "z"
    """Bytes that it counts for"""
    first = "f"
    """When its first turn came, in ms of the pool's clock"""
    last = "l"
    """When its last one came"""
    frame = "m"
    """`m<i>`: the result of turn i, encoded, without the beginning of its prompt that `b<i>` says"""
    begins = "b"
    """`b<i>`: `<turn> <tokens>`: the prompt begins with so many tokens of that turn"""
    ends = "h"
    """`h<i>`: `<tokens>:<digest>` of the prompt, and of prompt and output together"""
    key = "k"
    """`k<turn key>`: the number of its turn"""


CLAIMED = (
    "payload", "attempt", "accepted", "deadline", "published", "state", "samples", "saved", "min_version",
    "max_staleness", "owner", "adapter", "prefers", "ending", "client", "priority", "needs", "turn",
)  # fmt: skip
"""What a claim reads of each job's record, in this order."""
PROGRESS = re.compile(rf"([{JOB.sample}{JOB.piece}])(\d{{1,9}})(?:\.(\d{{1,9}}))?")
"""Fields of a job's record: a published sample, or a piece of one, and their numbers."""


def piece_field(sample: int, number: int) -> str:
    """The field of a job's record that holds piece `number` of a sample."""
    return f"{JOB.piece}{sample}.{number}" if number else f"{JOB.piece}{sample}"
