"""A run of many versions on two real workers, of which one's engine is corrupted midway, past all checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engines.remote import RemoteEngine
from support.pools.operations import until

from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.disk import SnapshotStore


@dataclass(frozen=True)
class Run:
    """What is left of it: folders, and the worker that was corrupted."""

    model: Path
    journal: Path
    snapshots: Path
    worker: str


def weights(model: Path, version: int) -> dict[str, Any]:
    """A version's tensors: large enough that attention is not the same everywhere."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    torch.manual_seed(version)
    tensors = load_file(model / "model.safetensors")
    return {name: one if one.dim() == 1 else one + 0.15 * torch.randn_like(one) for name, one in tensors.items()}


def record(
    folder: Path, model: Path, good: RemoteEngine, bad: RemoteEngine, *, versions: int, broken: int,
    first: int = 0, prompt: int = 24, tokens: int = 8,
) -> Run:  # fmt: skip
    """Versions 1 to `versions`; each worker samples one job of each. From version `broken` on one encodes positions
    from `first` on otherwise."""
    run = folder / "journal", folder / "snapshots"
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    store = SnapshotStore(run[1], keep=versions)
    with (
        EmbeddedRedis() as server,
        good.worker(server.url) as one,
        bad.worker(server.url) as other,
        WeightPublisher(server.url, snapshots=store) as publisher,
        BlockingRolloutClient(server.url, client_id="run", journal=run[0]) as client,
    ):
        for version in range(1, versions + 1):
            report = publisher.publish(version, weights(model, version).items()).wait(60)
            assert (report.state, len(report.workers)) == ("committed", 2)
            until(lambda at=version: publisher.snapshots_saved == at)
            if version == broken:
                bad.misplace(first)
            jobs = [
                GenerateJob(
                    token_ids=[(7 * version + 11 * place + token * token) % 250 + 3 for token in range(prompt)],
                    sampling=sampling, min_version=version, prefer_worker=worker.worker_id, prefer_s=60,
                )
                for place, worker in enumerate((one, other))
            ]  # fmt: skip
            for handle in client.submit_many(jobs):
                assert [result.versions for result in client.wait(handle, 60)] == [(version,)]
    return Run(model, *run, other.worker_id)
