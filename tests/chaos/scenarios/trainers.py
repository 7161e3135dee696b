"""A trainer with a feed and checkpoints. What it was trained on is counted here, and not by its books."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..context import Chaos
from ..scenario import scenario
from ..trainer_process import PROMPTS, SAMPLES, teaches
from .failover import ONE_PAIR, PRIMARY, make_replica, switch

EVERY = [(prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)]


@scenario("trainer_dies_before_its_checkpoint", lease_s=2.0, config=PRIMARY, one_redis=ONE_PAIR)
async def before_its_checkpoint(chaos: Chaos) -> None:
    """A trainer is killed while results of several steps wait for its next checkpoint, and the primary dies before or
    after it. Restored from the checkpoint, it gets those very results again. In the end every sample was trained once,
    or dropped."""
    proxy = await chaos.proxy()
    url = f"{proxy.url}?min_replicas=1"
    pair = await make_replica(chaos)
    await chaos.start_workers(2, url, max_running=8, tokens_per_s=40)
    checkpoint = chaos.directory / "checkpoint.json"
    first = await chaos.trainer_process(checkpoint, "run0", saves=2, url=url)
    await first.heard("trained", chaos.rng.randint(16, 24))  # for longer than it takes to acknowledge results
    late = chaos.rng.random() < 0.5
    if late:
        await first.kill()
    await switch(chaos, proxy, pair)
    if not late:
        await first.heard("trained", len(first.all("trained")) + 2)
        await first.kill()
    saved = trained_by(chaos, checkpoint)
    lost = {tuple(one) for step in first.all("trained") for one in step} - saved
    chaos.expect(lost, "nothing waited for a checkpoint")
    chaos.notes["waited_for_a_checkpoint"] = len(lost)
    second = await chaos.trainer_process(checkpoint, "run1", saves=1_000, url=url)
    report = await second.heard("finished", timeout=60)
    chaos.expect(await second.ended(30) == 0, "the restored trainer did not end well")
    trained = trained_by(chaos, checkpoint)
    chaos.expect(lost <= trained, f"generated anew, though they waited: {sorted(lost - trained)[:5]}")
    counted = {"trained": len(trained), "filtered": sum(not teaches(*one) for one in EVERY)}
    told = {"trained": report["trained"], **report["dropped"]}
    chaos.expect(told == counted, f"the books say {told}; counted are {counted}")
    chaos.expect((report["accepted"], report["in_flight"]) == (len(EVERY), 0), f"the books do not add up: {report}")


def trained_by(chaos: Chaos, checkpoint: Path) -> set[tuple[Any, ...]]:
    """The samples in a checkpoint's weights, each with its job. Each is there once, and its books agree."""
    saved = json.loads(checkpoint.read_text())
    times = Counter((prompt, sample) for prompt, sample, _ in saved["weights"])
    books = saved["feed"]["books"]
    twice = [one for one, count in times.items() if count > 1]
    chaos.expect(not twice, f"trained twice: {twice[:5]}")
    chaos.expect(all(teaches(*one) for one in times), "a sample was trained that was not wanted")
    chaos.expect(books["trained"] == len(saved["weights"]), f"{books['trained']} trained, by the books of a checkpoint")
    return {tuple(one) for one in saved["weights"]}
