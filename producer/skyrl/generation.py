"""generate, and ending what generates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob
from .calls import run_jobs
from .outputs import Samples, output_of
from .requests import read_batch
from .types import InferenceEngineInput, InferenceEngineOutput
from .weights import WeightMethods

PAUSE_MODES = ("abort", "in_place", "retract")
REMEMBERED = 1 << 16
"""Session ids whose workers are known; of more, the ones that were used last."""


class GenerationMethods(WeightMethods):
    """See SkyRLEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker_of: dict[str, str] = {}

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Generate for every prompt of a batch, on all of the pool's workers; see InferenceEngineInput and -Output.

        Raises InvalidField for a key, prompt or sampling parameter that is wrong (FeatureUnavailable if no worker can
        do it), JobFailed if a prompt could not be answered - there are never holes in an output -, WaitTimeout,
        ConfigError without a tokenizer. Weights that were sent and not published yet are published first. While the
        engine is paused it waits.
        """
        calls = await self.open_calls()
        with calls.begin() as call:
            await calls.pass_gate(call)
            await self.end_sync()
            texts = await self.ready_texts()
            batch = await asyncio.to_thread(read_batch, input_batch, self.sampling_params, texts)
            jobs = [self.sticky(job) for job in batch.jobs]
            found = await run_jobs(await self.client(), call, jobs, self.timeout_s)
            self.remember_workers(jobs, found)
        return await asyncio.to_thread(output_of, jobs, found, batch.wishes, texts)

    # --- ending and pausing ----------------------------------------------------------------------------------------

    async def abort_generation(self) -> None:
        """End this engine's requests: those that run return what they have, with the stop reason "abort"; those that
        wait, here or in the pool, return no tokens. Other clients of the pool are not touched."""
        await self.stop_calls()

    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating; what is asked for from now on waits for `continue_generation`.

        mode: "abort" ends this engine's requests as `abort_generation` does. "in_place" halts the pool's workers with
        their requests where they are, KV cache included; "retract" has them give the cache up and compute it anew
        afterwards. Raises InvalidField for another one, and what the control channel raises if a worker cannot.
        """
        if mode not in PAUSE_MODES:
            raise InvalidField("mode", mode, f"one of {', '.join(PAUSE_MODES)}")
        calls = await self.open_calls()
        await calls.set_paused(True)
        if mode == "abort":
            await self.stop_calls()
        else:
            await self.pause_workers(mode)

    async def continue_generation(self) -> None:
        """Go on: publishes weights that came meanwhile, then lets workers and waiting requests go on."""
        calls = await self.open_calls()
        if self._halted == "in_place":  # engines that are frozen take no weights; they change under what runs
            await self.resume_workers()
        await self.end_sync()
        await self.resume_workers()
        await calls.set_paused(False)

    # --- prefixes --------------------------------------------------------------------------------------------------

    def sticky(self, job: GenerateJob) -> GenerateJob:
        """The job, at the worker that answered last for its session, if it has one."""
        worker = self._worker_of.get(job.session_id) if job.session_id is not None else None
        return job.model_copy(update={"prefer_worker": worker}) if worker else job

    def remember_workers(self, jobs: Sequence[GenerateJob], found: Sequence[Samples]) -> None:
        """Who has the prefixes of sessions now."""
        for job, samples in zip(jobs, found, strict=True):
            if job.session_id is None:
                continue
            for sample in samples:
                if sample is not None:
                    self._worker_of.pop(job.session_id, None)
                    self._worker_of[job.session_id] = sample.worker_id
        while len(self._worker_of) > REMEMBERED:
            del self._worker_of[next(iter(self._worker_of))]
