"""A trainer to be killed: `python killed_trainer.py URL CHECKPOINT`. Prints a line for each step.

Its weights are the samples it was trained on. It saves them with the feed's state after every second step.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

from rolloutmq import BlockingRolloutClient, GenerateJob, Staleness

PROMPTS, SAMPLES = 40, 2


def main(url: str, checkpoint: Path) -> None:
    weights: list[list[object]] = []
    with BlockingRolloutClient(url, client_id="killed") as client:
        feed = client.feed(Staleness(eta=2, batch_size=4, on_stale="mark"))
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            weights = saved["weights"]
            feed.load_state_dict(saved["feed"])
        data = (
            GenerateJob(token_ids=[5, i], n=SAMPLES, sampling={"max_new_tokens": 4}, metadata={"place": i})
            for i in range(PROMPTS)
        )
        for step, batch in enumerate(feed.batches(islice(data, feed.books.numbers, None), timeout=60)):
            for group in batch:
                weights += [[group.metadata["place"], sample] for sample in group.samples]
            feed.train(batch)
            feed.advance(feed.books.version + 1)
            print(f"step {step}", flush=True)
            if step % 2:
                state = feed.state_dict()
                draft = checkpoint.with_suffix(".draft")
                draft.write_text(json.dumps({"weights": weights, "feed": state}))
                os.replace(draft, checkpoint)
                feed.saved(state)
        print(json.dumps({"weights": weights, "report": feed.report()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
