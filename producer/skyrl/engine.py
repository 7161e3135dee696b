"""SkyRL's inference engine, over a pool of any number of workers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...messages.errors import FeatureUnavailable
from ...messages.model import WorkerStatus
from ..client import RolloutClient
from ..openai import chat_request, completion_request
from .calls import Calls
from .control import COMMAND_S, WorkerControl, memory_tags
from .core import EngineCore, register
from .generation import Generation
from .outputs import InferenceEngineOutput, StreamingChunk
from .requests import InferenceEngineInput
from .sessions import Sessions
from .tasks import EMBED, REWARD, SCORE, Tasks
from .weights import WeightSync, WeightTransferHandle

if TYPE_CHECKING:
    from ...sync.publish import WeightPublisher  # torch


class SkyRLEngine:
    """One engine with the methods of SkyRL's InferenceEngineInterface, behind which a whole pool generates.

        engine = SkyRLEngine(redis_url, tokenizer="Qwen/Qwen3-0.6B", sampling_params={"max_generate_length": 256})
        output = await engine.generate({"prompts": conversations, "sampling_params": {"n": 8, "logprobs": 0}})

    It connects with its first call, on that call's event loop. Many tasks of the loop may call it at the same time.
    What the pool cannot do raises FeatureUnavailable and names it. Arguments that cannot be raise InvalidField.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        tokenizer: of transformers' kind, or its path or name; by default that of the pool's model, if it is here, too.
        sampling_params: for calls without their own; in any dialect.
        publisher: sends weights to the pool; by default one of the engine's own, made when weights come, with
            mode="in_place". `teardown` does not close a given one.
        timeout_s: how long `generate` and its kin wait for the whole answer; None for ever.
        receiver_ranks: how many ranks of a trainer's broadcast group this process fills; by default all that are left.
        receiver_device: where NCCL broadcasts and CUDA IPC tensors arrive: "cuda:1". Gloo's arrive in host memory.
        weights_timeout_s: for joining the group, and for each tensor.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        tokenizer: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        publisher: WeightPublisher | None = None,
        timeout_s: float | None = None,
        receiver_ranks: int | None = None,
        receiver_device: str = "cpu",
        weights_timeout_s: float = 120.0,
    ) -> None:
        self._core = EngineCore(redis_url, pool, tokenizer, sampling_params, timeout_s)
        self._calls = Calls(self._core)
        self._control = WorkerControl(self._core, self._calls)
        self._weights = WeightSync(
            self._core,
            self._control,
            publisher,
            ranks=receiver_ranks,
            device=receiver_device,
            timeout_s=weights_timeout_s,
        )
        self._generation = Generation(self._core, self._calls, self._control, self._weights)
        self._sessions = Sessions(self._generation)
        self._tasks = Tasks(self._core)
        register(type(self))

    async def client(self) -> RolloutClient:
        """The client under this engine, opened. Raises RedisUnavailable, and RolloutMQError after `teardown`."""
        return await self._core.client()

    async def workers(self) -> list[WorkerStatus]:
        """The pool's workers as of their last heartbeat."""
        return await self._core.workers()

    async def teardown(self) -> None:
        """End what is under way here, leave the trainer's group and disconnect, in half a minute at most.
        Workers go on. Later calls raise RolloutMQError; a second teardown does nothing."""
        if not self._core.closed:
            await self._core.close(self._weights.close)
            self._sessions.trees.clear()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SkyRLEngine is not copied: weights that were sent to one copy would be published by none. "
            "Make it a Ray actor, as SkyRL does with its engines: every handle then speaks to the same one"
        )

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Generate for every prompt of a batch, on all of the pool's workers. Waits while the engine is paused.

        Weights that came are published first. Raises InvalidField, FeatureUnavailable if no worker can do it, JobFailed
        if a prompt could not be answered (an output never has holes), WaitTimeout, ConfigError without a tokenizer."""
        return await self._generation.generate(input_batch)

    async def generate_stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk]:
        """What `generate` would return, in chunks. Those of one sample come in order, the last with `is_finished`.
        Raises as `generate` does. If it is left early, it cancels what it has in the pool."""
        async with contextlib.aclosing(self._generation.stream(input_batch)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer {"json": body of POST /v1/chat/completions}: a chat.completion, or an error as a dictionary whose
        `code` is the HTTP status. Workers render the conversation."""
        return await self._generation.answer(request_payload, chat_request)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The same for POST /v1/completions; the prompt is a text, ids, or a list of either."""
        return await self._generation.answer(request_payload, completion_request)

    async def abort_generation(self) -> None:
        """End this engine's requests with what they have and the stop reason "abort". Other clients' go on."""
        await self._control.end_calls()

    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating. New requests wait for `continue_generation`.
        mode: "abort": as `abort_generation`. "in_place": all workers halt with what they run. "retract": they drop its
        KV cache, too, and compute it again afterwards. Raises InvalidField, and what a worker raises if it cannot."""
        await self._generation.pause(mode)

    async def continue_generation(self) -> None:
        """Publish weights that came meanwhile, then let workers and waiting requests go on."""
        await self._generation.resume()

    def supports_streaming(self) -> bool:
        """Whether a worker of the pool streams."""
        return self._core.has("stream")

    async def init_weight_update_communicator(  # noqa: PLR0917 – SkyRL's signature
        self,
        init_info: Any = None,
        master_port: int | None = None,
        rank_offset: int = 1,
        world_size: int = 2,
        group_name: str = "skyrl",
        backend: str = "gloo",
        override_existing: bool = False,
        *,
        master_addr: str | None = None,
    ) -> tuple[bool, str]:
        """Join the trainer's broadcast group as ranks `rank_offset` and following, in this process.
        init_info: SkyRL's BroadcastInitInfo or CudaIpcInitInfo (which joins nothing), or the address, with the other
            arguments behind it. NCCL needs a GPU of its own for this process (`receiver_device`).
        Returns (True, ""). Raises InvalidField, ConfigError, TransferTimeout if not everybody comes in time."""
        rest = rank_offset, world_size, group_name, backend
        return await self._weights.join(init_info, override_existing, master_addr, master_port, *rest)

    async def update_named_weights(self, request: Any) -> tuple[bool, str]:
        """Take some of a version's tensors, or all: given in the request, by CUDA IPC, or broadcast in the group.
        They are kept until the sync ends, and then published as one version: at `update_weight_version`,
        `continue_generation`, `reset_prefix_cache`, `wake_up`, the next `generate`, or when a tensor comes again.
        Returns (True, ""). Raises InvalidField, TransferTimeout."""
        return await self._weights.update(request)

    update_named_weight = update_named_weights
    """The same for one tensor, in the older form: {"name", "dtype", "shape", "extras"}."""

    async def get_weight_version(self) -> str | None:
        """The pool's newest version that is served, as text; "0" is the model as the workers loaded it from disk."""
        return await self._weights.version()

    async def update_weight_version(self, new_version: str | int, abort_all_requests: bool = True) -> tuple[bool, str]:
        """End the sync and publish it as `new_version`. With nothing to publish, the next sync gets that number.
        new_version: a number above all before, as text too. The one that is published already changes nothing.
        abort_all_requests: `abort_generation` first; else requests go on, and their tokens say which version sampled
            them. Raises InvalidField, IncompleteWeights, WeightSyncError."""
        return await self._weights.name_version(new_version, abort_all_requests)

    def supports_overlapped_weight_sync(self) -> bool:
        """True: workers serve the old version while the new one arrives."""
        return True

    async def start_weight_transfer(self, request: Any) -> WeightTransferHandle:
        """Take the tensors of a request, the last of their version, and publish it in the background. Returns at once.
        Raises InvalidField."""
        return await self._weights.start(request)

    async def finish_weight_transfer(self, handle: WeightTransferHandle, flush_cache: bool = True) -> str:
        """The version, once the pool serves it; with `flush_cache`, cached prefixes are dropped. Raises the error of
        the transfer: IncompleteWeights, WeightSyncError, …"""
        return await self._weights.finish(handle, flush_cache)

    async def overlapped_weight_sync(self, request: Any, pause_mode: str = "in_place") -> str:
        """Start and finish a transfer while requests go on; their tokens say which version sampled them.
        pause_mode: how requests cross the update. "in_place": weights change under them. "retract": they go on with a
        new KV cache. "abort": they end. The first two need a publisher with mode "in_place" or "resume", or this raises
        InvalidField."""
        return await self._weights.overlapped(request, pause_mode)

    async def load_weights_from_disk(
        self, model_path: str, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Publish a folder of this host as the next version: a safetensors checkpoint, or a snapshot.
        load_format: what it must be; None and "auto" take what is found. For folders that only workers see there is
        `rolloutmq control load`. Returns (True, ""). Raises InvalidField, SnapshotError, WeightSyncError."""
        return await self._weights.load_folder(model_path, load_format, flush_cache)

    async def get_weights_by_name(self, name: str) -> Any:
        """Raises FeatureUnavailable: weights do not come back from workers; `validate_weights` compares them there."""
        raise FeatureUnavailable("get_weights_by_name", name, "validate_weights, which compares them where they are")

    async def validate_weights(
        self, weight_names: Iterable[str] | None = None, check_nan: bool = True, check_inf: bool = True
    ) -> dict[str, Any]:
        """Every worker looks through all of its engine's parameters: {"valid", "version", "nonfinite", "zero", "wrong",
        "workers": worker -> its whole finding}. Raises InvalidField unless `check_nan` equals `check_inf`.
        nonfinite: parameters with NaN or Inf; zero: matrices of zeros; both in the engine's names. wrong: tensors that
        are not bit for bit what was published, in the trainer's names. weight_names: others are looked at, too."""
        return await self._control.validate(weight_names, check_nan, check_inf)

    async def check_weight_sync_integrity(self, expected_version: str | int | None = None) -> dict[str, Any]:
        """Whether all workers serve one version with the same bits: {"consistent", "expected_version", "versions":
        worker -> version, "fingerprints": worker -> of its parameters, "wrong": worker -> tensors that differ}.
        expected_version: by default the newest one. Only workers of one kind have comparable fingerprints."""
        expected = await self._weights.version() if expected_version is None else expected_version
        return await self._control.compare(expected)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> tuple[bool, str]:
        """Publish the adapter in a folder of this host (as PEFT saves it) as the newest version of `lora_name`.
        Prompts ask for it by `lora` in their sampling parameters. A published adapter stays, pinned or not.
        Returns (True, ""). Raises WeightSyncError if no worker has taken it, InvalidField."""
        return await self._weights.load_adapter(lora_name, lora_path)

    async def unload_lora_adapter(self, lora_name: str) -> tuple[bool, str]:
        """Take all of its versions out of the workers' engines. Raises while samples use it, and for an unknown one."""
        return await self._weights.unload_adapter(lora_name)

    async def sleep(
        self, *args: Any, tags: Sequence[str] | None = None, level: int = 1, timeout_s: float = COMMAND_S, **kwargs: Any
    ) -> None:
        """Workers give up memory of their GPUs. What runs is continued after `wake_up`.
        tags: "weights", "kv_cache", "cuda_graph", or none for all. level: vLLM's; 1 and 2 are alike here. Raises
        InvalidField, FeatureUnavailable for workers that cannot."""
        await self._control.sleep(memory_tags(args, tags, kwargs), level, timeout_s)

    async def wake_up(
        self, *args: Any, tags: Sequence[str] | None = None, timeout_s: float = COMMAND_S, **kwargs: Any
    ) -> None:
        """Workers take memory again; tags as for `sleep`. Weights that came meanwhile are published after the weights'
        memory is awake and before the KV cache's is woken."""
        await self._control.wake(memory_tags(args, tags, kwargs), timeout_s, self._weights.end_sync)

    async def sleep_weights_only(self, **kwargs: Any) -> None:
        """`sleep` of the weights."""
        await self.sleep(tags=["weights"], **kwargs)

    async def wake_up_weights_only(self, **kwargs: Any) -> None:
        """`wake_up` of the weights."""
        await self.wake_up(tags=["weights"], **kwargs)

    async def sleep_all(self, **kwargs: Any) -> None:
        """`sleep` of everything."""
        await self.sleep(**kwargs)

    async def wake_up_all(self, **kwargs: Any) -> None:
        """`wake_up` of everything."""
        await self.wake_up(**kwargs)

    async def reset_prefix_cache(self) -> None:
        """Publish weights that came, and drop all cached prefixes. Those of other versions are never used anyway."""
        await self._weights.end_sync()
        await self._control.flush_caches()

    async def clear_hicache_storage(self) -> bool:
        """Clear the storage behind the hierarchical caches; True. Raises FeatureUnavailable where there is none."""
        return await self._control.clear_storage()

    def supports_sessions(self) -> bool:
        """True: any worker can continue any session."""
        return True

    async def open_session(self, capacity_of_str_len: int = 8192, session_id: str | None = None) -> str | None:
        """The id of a new session; None if there is one of that id. Nothing of it is on a worker."""
        return self._sessions.open(session_id, capacity_of_str_len)

    async def close_session(self, session_id: str) -> None:
        """Forget a session. Raises InvalidField for one that is not open."""
        self._sessions.close(session_id)

    async def generate_with_session(  # noqa: PLR0917 – SkyRL's signature
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None = None,
        offset: int | None = None,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> InferenceEngineOutput:
        """Generate behind what the session has: the prompt is only what comes new.
        rid: the request to continue, one of an earlier output's `request_ids`; None begins anew. offset: -1 or None:
        behind all of it; 0 or more: behind so many of its tokens, prompt first. replace: what continued that request
        before is forgotten (without rid: the whole session is). drop_previous_output: without what that request
        generated. Several prompts, or n > 1, become branches. Raises InvalidField for an unknown session or request;
        as `generate` otherwise."""
        return await self._sessions.generate(session_id, input_batch, rid, offset, replace, drop_previous_output)

    async def get_session_info(self, session_id: str) -> dict[str, Any] | None:
        """Its requests, and how many tokens it has; None for one that is not open."""
        tree = self._sessions.trees.get(session_id)
        return tree.info() if tree is not None else None

    async def list_sessions(self) -> list[str]:
        """Ids of the open ones."""
        return list(self._sessions.trees)

    async def fork_session(self, source: str, target: str | None = None, offset: int = -1) -> str | None:
        """The id of a new session that begins with what `source` has; None if there is one of the id `target`.
        offset: -1: all of its requests, under their ids. 0 or more: so many tokens of the newest one, which every
        first turn (rid=None) continues. Raises InvalidField for a source that is not open."""
        return self._sessions.fork(source, target, offset)

    def supports_scoring(self) -> bool:
        """Whether a worker of the pool has a reward model, or one that can tell how likely it finds an answer."""
        return self._core.has(REWARD) or self._core.has(SCORE)

    def supports_embeddings(self) -> bool:
        """Whether a worker of the pool has an embedding model."""
        return self._core.has(EMBED)

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool = False
    ) -> dict[str, Any]:
        """{"scores": one float for each pair of prompt and answer, "kind": what they are}.
        input_ids, output_ids: as many lists of ids, or one list each. kind: "reward" from a pool with a reward model,
        of prompt and answer as one sequence; else "logprob", of the answer behind its prompt. Raises InvalidField,
        FeatureUnavailable in a pool that can do neither and for hidden states, JobFailed, WaitTimeout."""
        return await self._tasks.score(input_ids, output_ids, return_hidden_states)

    async def encode(self, texts: Sequence[str] | str, dimensions: int | None = None) -> list[list[float]]:
        """An embedding of each text. dimensions: only so many of its first components, of a model trained for it.
        Raises InvalidField, FeatureUnavailable in a pool without an embedding model, JobFailed, WaitTimeout."""
        return await self._tasks.encode([texts] if isinstance(texts, str) else list(texts), dimensions)

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """The embedding of one text; see `encode`."""
        return (await self.encode([text], dimensions))[0]

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Cosine of the angle between two texts' embeddings; see `encode`."""
        return await self._tasks.similarity(text1, text2, dimensions)

    async def decode(self, token_ids: Sequence[Any], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of ids, or of one list of them, made here with the model's tokenizer."""
        return await self._tasks.decode(token_ids, skip_special_tokens)

    async def save_sharded_model(self, save_path: str, pattern: str | None = None, max_size: int | None = None) -> bool:
        """One worker writes what it serves into a folder of its host, in SGLang's sharded format; True. Raises
        InvalidField for a pattern or max_size."""
        return await self._control.save_sharded(save_path, pattern, max_size)

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """One worker writes what it serves, as safetensors, and copies it to a URL by fsspec; True.
        remote_path: a URL, or what comes behind `storage_type`://. The files stay in the worker's /var/tmp."""
        return await self._control.save_remote(remote_path, storage_type)

    async def start_profile(self) -> bool:
        """Every worker begins to record; True. Raises what a worker raises that records already."""
        return await self._control.start_profile()

    async def stop_profile(self) -> dict[str, Any] | None:
        """Worker -> where its traces are; None from a pool without workers."""
        return await self._control.ask("stop_profile") or None

    async def get_server_info(self) -> dict[str, Any]:
        """The pool: its name, the workers as of their last heartbeat, how much is queued, and the newest version."""
        return await self._control.server_info()

    async def get_memory_pool_size(self) -> dict[str, int]:
        """{"total_tokens", "available_tokens", "used_tokens"} of the workers' KV caches together. Raises
        FeatureUnavailable if a worker does not tell."""
        return await self._control.memory_pool_size()

    def tp_size(self) -> int:
        """Tensor-parallel size of a worker's engine. Raises RolloutMQError if workers differ, or if there is none."""
        return self._control.size("tp_size")

    def pp_size(self) -> int:
        """Pipeline-parallel size; see `tp_size`."""
        return self._control.size("pp_size")

    def dp_size(self) -> int:
        """Data-parallel size of a worker's engine; `get_server_info` says how many workers there are."""
        return self._control.size("dp_size")

    def ep_size(self) -> int:
        """Expert-parallel size; see `tp_size`."""
        return self._control.size("ep_size")
