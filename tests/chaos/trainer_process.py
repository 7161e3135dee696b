"""A trainer with a feed: its weights are the samples that it was trained on, and it saves them as it saves weights.

    python -m chaos.trainer_process REDIS_URL CLIENT_ID CHECKPOINT JOURNAL_DIR RUN SAVES

It goes on from the checkpoint, if there is one, and saves after every second step, the first SAVES times. On stdout a
line of JSON each: {"trained": [[prompt, sample, job], …]} for each step, before the books have it, and at the end
{"finished": the books' report}.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sabotage
from .worker_process import PR_SET_PDEATHSIG, tell

if TYPE_CHECKING:
    from .journal import Journal

PROMPTS, SAMPLES, STEP = 100, 3, 6
TOKENS = 20


def teaches(prompt: int, sample: int) -> bool:
    """Whether this trainer wants the sample."""
    return (prompt + sample) % 5 != 0


async def work(url: str, client_id: str, checkpoint: Path, book: Journal, saves: int) -> None:
    from rolloutmq import GenerateJob, GroupRules, RolloutClient, RolloutResult, Staleness  # noqa: PLC0415

    from .context import POOL  # noqa: PLC0415
    from .taker import again  # noqa: PLC0415

    def keep(result: RolloutResult) -> bool:
        book.received(result, client_id)
        return teaches(result.metadata["prompt"], result.sample)

    weights: list[list[Any]] = []
    client = RolloutClient(url, POOL, client_id=client_id)
    # All prompts are accepted before the first step; nobody publishes, so no sample is older than another.
    feed = client.feed(Staleness(PROMPTS * SAMPLES // STEP, STEP, "mark"), GroupRules(keep=keep, deliver="samples"))
    if (saved := last_saved(checkpoint)) is not None:
        weights = saved["weights"]
        feed.load_state_dict(saved["feed"])
    jobs = (
        GenerateJob(token_ids=[5, i], n=SAMPLES, sampling={"max_new_tokens": TOKENS}, metadata={"prompt": i})
        for i in range(PROMPTS)
    )
    batches = feed.batches(islice(jobs, feed.books.numbers, None), timeout=60)
    while batch := await again(lambda: anext(batches, None)):
        mine = [
            [group.number, sample, result.job_id]
            for group in batch
            for sample, result in zip(group.samples, group.results, strict=True)
        ]
        tell(trained=mine)
        weights += mine
        feed.train(batch)
        feed.advance(feed.books.version + 1)
        if feed.books.updates % 2 == 0 and saves > 0:
            saves -= 1
            save(checkpoint, weights, feed)
    save(checkpoint, weights, feed)
    await again(client.aclose)
    tell(finished=feed.report())


def last_saved(checkpoint: Path) -> Any:
    return json.loads(checkpoint.read_text()) if checkpoint.exists() else None


def save(checkpoint: Path, weights: list[list[Any]], feed: Any) -> None:
    state = feed.state_dict()
    draft = checkpoint.with_suffix(".draft")
    draft.write_text(json.dumps({"weights": weights, "feed": state}))
    os.replace(draft, checkpoint)
    feed.saved(state)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    url, client_id, checkpoint, journal_dir, run, saves = sys.argv[1:]
    sabotage.adopt()
    from .journal import Journal  # noqa: PLC0415

    asyncio.run(work(url, client_id, Path(checkpoint), Journal(Path(journal_dir), run), int(saves)))


if __name__ == "__main__":
    main()
