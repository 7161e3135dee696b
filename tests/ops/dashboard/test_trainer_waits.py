"""How long a trainer waited for samples, as its feed writes it and the page shows it."""

from __future__ import annotations

from pathlib import Path

from support.pools.pool import worker
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages.journal import read
from rolloutmq.ops.dashboard import load
from rolloutmq.producer.training import Staleness


async def test_a_feed_says_how_long_its_trainer_waited(redis_db: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    async with worker(redis_db), RolloutClient(redis_db, client_id="trainer", journal=folder) as client:
        feed = client.feed(Staleness(1, 2))
        async for batch in feed.batches(tokens(sampling={"max_new_tokens": 4}) for _ in range(4)):
            feed.train(batch)
            feed.advance(feed.books.version + 1)
    waited = [it.data["waited_s"] for it in read(folder, events="note") if "waited_s" in it.data]
    assert len(waited) == 2, "once a batch, with its first group"
    history = load(folder)
    share = history.state()["flow"]["trainer_waits"]
    assert 0 < share <= 1
    assert share == round(min(1.0, sum(waited) / max(1.0, history.ended - history.began)), 3)
