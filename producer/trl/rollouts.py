"""A `rollout_func` of GRPOTrainer that also serves its later turns and brings its weights to the pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob, MemoryTag, RolloutResult
from ...sync.transfer import SyncOptions
from ..blocking import BlockingRolloutClient
from ..training import seed_of
from .colocated import Colocated
from .turns import sampling_of
from .weights import PoolWeightTransfer, bare, named_weights


class PoolRollouts:
    """Generates GRPOTrainer's completions in a pool; `use_vllm` stays False.

        trainer = GRPOTrainer(model, reward_funcs, args, dataset, rollout_func=PoolRollouts())

    At its first call it takes the place of the trainer's vLLM generation. So TRL does with the pool what it does with
    vLLM. It publishes the weights whenever the step has changed. It generates the turns after calls of `tools` and of
    an `environment_factory` in the pool. It corrects for the difference between trainer and engine as `args` say
    (`vllm_importance_sampling_correction`, `…_mode`, `…_clip_max`), which it leaves out for other rollout functions.
    Mode "token_truncate" is truncated importance sampling.

    Guarantees: all tokens of a step are sampled with its weights, however many workers die. A PEFT adapter is merged
    for the copy, or travels alone under the name `adapter`; see PoolWeightTransfer. On a distributed trainer each rank
    asks for its own prompts, and the first one sends the weights.

    reproducible: the same run has the same samples, whatever happens to the pool. Step k samples with version k + 1 and
    with seeds of its own, on deterministic workers. A trainer that is killed has to save a checkpoint after each step.

    colocated: memory of a GPU that trainer and workers share: all workers of the pool give it up while the trainer's
    models compute ("kv_cache", "cuda_graph", "weights"; docs/recipes.md). `close` wakes them and waits until they
    have weights.

    The other arguments are those of PoolWeightTransfer. A call raises InvalidField for prompts with images, JobFailed
    for a completion that no worker can generate, and what PoolWeightTransfer raises. With `colocated` it raises
    CommandFailed if a worker does not wake, and so does the trainer's model if one does not sleep.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        adapter: str | None = None,
        reproducible: bool = False,
        colocated: Sequence[MemoryTag] = (),
        **settings: Unpack[SyncOptions],
    ) -> None:
        if reproducible and adapter is not None:
            raise InvalidField("adapter", adapter, "None in a reproducible run: no job asks for one adapter's version")
        self._reproducible, self._shared = reproducible, Colocated(colocated)
        self._asked = (-1, 0)  # step, and how many prompts of it were asked for
        self.weights = PoolWeightTransfer(redis_url, pool, adapter=adapter, **settings)
        self._client: BlockingRolloutClient | None = None
        self._trainer: Any = None
        self._version = 0
        self._fields: dict[str, Any] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL asks of a `rollout_func`: prompt_ids, completion_ids and logprobs, one list for each prompt."""
        if self._trainer is not trainer:
            self._take_over(trainer)
        prompt_ids, images, extra = trainer._tokenize_prompts(prompts)
        if images is not None or extra:
            raise InvalidField("prompts", "with images", "text alone: the pool's TRL adapter has no images")
        completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, 1)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def close(self) -> None:
        """Wake the workers and disconnect. Safe to call twice; the next call connects again and sends the weights."""
        sent, client, self._client = self.weights.report, self._client, None
        try:
            self._shared.close(offered=sent is not None and sent.state == "committed")
        finally:
            if client is not None:
                client.close()
            self.weights.destroy()
            if self._trainer is not None:
                self._trainer._last_loaded_step = None

    # --- what PoolFigures asks --------------------------------------------------------------------------------------

    def report(self) -> None:
        """None: there are no books, because every sample is trained on at once."""

    def log(self, told: dict[str, float]) -> None:
        """Have TRL log these figures with its own, the next time that it logs."""
        for name, value in told.items() if self._trainer is not None else ():
            self._trainer._metrics["train"][name].append(value)

    # --- what TRL asks of its vLLM generation -----------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publish the trainer's weights. Every rank calls it."""
        self._connect()
        self._shared.wake("weights")
        model = bare(self._trainer.accelerator.unwrap_model(self._trainer.model))
        self.weights.model = model
        merge = hasattr(model, "merge_adapter") and self.weights.adapter is None
        if merge:
            model.merge_adapter()
        try:
            if self._trainer.accelerator.is_main_process:
                version = self._trainer.state.global_step + 1 if self._reproducible else None
                self.weights.send_weights(named_weights(model), version)
                if self._shared.tags:
                    self.weights.arrive()  # what the transfer takes is free before the KV cache takes it
            else:
                for _ in named_weights(model):  # the gathers of sharded parameters need every rank
                    pass
        finally:
            if merge:
                model.unmerge_adapter()
        self._version = _from_first_rank(self.weights.version)

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, list[list[int]], list[list[list[float]]], None]:
        """A completion of each prompt, in order; equal neighbours are one job, whose prompt is computed once.

        Returns the prompts, the completions' ids, (completion, token, 1) log-probabilities, and None.
        """
        if images is not None and any(images):
            raise InvalidField("images", len(images), "none: the pool's TRL adapter has no images")
        client = self._connect()
        self._shared.wake()
        least = "min_version" if self.weights.adapter is None else "min_adapter_version"
        bounds: dict[str, Any] = self._fields | {least: self._version}
        jobs = [
            GenerateJob.build(token_ids=list(ids), n=len(list(same)), **bounds | self._exact())
            for ids, same in itertools.groupby(map(list, prompts))
        ]
        try:
            handles = client.submit_many(jobs, timeout=None)
            results = [result for handle in handles for result in client.wait(handle)]
        except BaseException:
            client.cancel_all()
            raise
        return prompts, [it.token_ids.tolist() for it in results], [list(_logprobs(it)) for it in results], None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _exact(self) -> dict[str, Any]:
        """The version and the seed of the next prompt of a reproducible run, by step, rank and place."""
        if not self._reproducible:
            return {}
        step, rank = self._trainer.state.global_step, self._trainer.accelerator.process_index
        self._asked = (step, self._asked[1] + 1 if self._asked[0] == step else 0)
        return {"exact_version": self._version, "seed": seed_of(f"step {step}, rank {rank}, prompt {self._asked[1]}")}

    def _take_over(self, trainer: Any) -> None:
        if trainer.args.use_vllm:
            raise InvalidField("args.use_vllm", True, "False: the pool generates")
        self.close()
        self._fields = sampling_of(trainer.args, trainer.eos_token_ids) | {"lora": self.weights.adapter}
        self._trainer = trainer
        trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = self, True, None
        trainer.vllm_mode = "server"  # in the other mode TRL looks into the engine

    def _connect(self) -> BlockingRolloutClient:
        if self._client is None:
            if self._trainer.accelerator.is_main_process:
                self.weights.init_weight_transfer()
            self._client = BlockingRolloutClient(self.weights.redis_url, self.weights.pool)
            self._shared.attach(self._trainer, self._client.control)
        return self._client


def _logprobs(result: RolloutResult) -> Iterator[list[float]]:
    assert result.logprobs is not None
    return ([float(it)] for it in result.logprobs)


def _from_first_rank(version: int) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return version
    told = [version]
    torch.distributed.broadcast_object_list(told)
    return told[0]
