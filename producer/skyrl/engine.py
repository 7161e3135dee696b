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

    The first call connects, on its own event loop. Many tasks of that loop may call the engine at the same time.
    FeatureUnavailable names what the pool cannot do. InvalidField names a wrong argument.

    Args:
        redis_url: the pool's Redis. The default is $ROLLOUTMQ_REDIS, or the Redis on this host.
        pool: the pool's name.
        tokenizer: an object like transformers' tokenizers, or its path or name. The default is the tokenizer of the
            pool's model, if this host has it.
        sampling_params: the defaults of calls without their own, in any dialect.
        publisher: sends weights to the pool. By default the engine makes one with mode="in_place" when weights come.
            `teardown` does not close a publisher that was given.
        timeout_s: seconds that `generate` and similar calls wait for the whole answer. None waits for ever.
        receiver_ranks: how many ranks of the trainer's broadcast group this process has; by default all that are left.
        receiver_device: where NCCL broadcasts and CUDA IPC tensors arrive: "cuda:1". Gloo's arrive in host memory.
        weights_timeout_s: seconds to join the group, and for each tensor.
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
        """End this engine's calls, leave the trainer's group and disconnect, in half a minute at most.
        Workers go on. Later calls raise RolloutMQError. A second teardown does nothing."""
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

        Publishes received weights first. Raises InvalidField, FeatureUnavailable if no worker can do it, JobFailed if a
        prompt could not be answered (an output never has holes), WaitTimeout, ConfigError without a tokenizer."""
        return await self._generation.generate(input_batch)

    async def generate_stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk]:
        """The output of `generate` in chunks. Chunks of one sample come in order; the last one has `is_finished`.
        Raises as `generate` does. If the caller leaves it early, it cancels its jobs in the pool."""
        async with contextlib.aclosing(self._generation.stream(input_batch)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer {"json": body of POST /v1/chat/completions}: a chat.completion, or an error as a dictionary whose
        `code` is the HTTP status. Workers render the conversation."""
        return await self._generation.answer(request_payload, chat_request)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The same for POST /v1/completions. The prompt is a text, ids, or a list of texts or of lists of ids."""
        return await self._generation.answer(request_payload, completion_request)

    async def abort_generation(self) -> None:
        """End this engine's requests with the tokens they have and stop reason "abort". Other clients' go on."""
        await self._control.end_calls()

    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating. New requests wait for `continue_generation`.
        mode: "abort" does the same as `abort_generation`. "in_place" halts all workers; their requests go on later.
        "retract" also drops the KV cache of these requests; workers compute it again afterwards. Raises InvalidField,
        and the error of a worker that cannot halt."""
        await self._generation.pause(mode)

    async def continue_generation(self) -> None:
        """Publish weights that were received meanwhile, then let workers and waiting requests go on."""
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
        init_info: SkyRL's BroadcastInitInfo or CudaIpcInitInfo (which joins nothing). Or the address, followed by the
            other arguments. NCCL needs a GPU of its own for this process (`receiver_device`).
        Returns (True, ""). Raises InvalidField, ConfigError, TransferTimeout if a rank does not join in time."""
        rest = rank_offset, world_size, group_name, backend
        return await self._weights.join(init_info, override_existing, master_addr, master_port, *rest)

    async def update_named_weights(self, request: Any) -> tuple[bool, str]:
        """Receive some or all tensors of a version: in the request itself, by CUDA IPC, or broadcast in the group.
        The engine keeps them until the sync ends, and then publishes them as one version. A sync ends with
        `update_weight_version`, `continue_generation`, `reset_prefix_cache`, `wake_up`, the next `generate`, or when a
        tensor comes again. Returns (True, ""). Raises InvalidField, TransferTimeout."""
        return await self._weights.update(request)

    update_named_weight = update_named_weights
    """The same for one tensor, in the older form: {"name", "dtype", "shape", "extras"}."""

    async def get_weight_version(self) -> str | None:
        """The newest committed version, as text. "0" is the model as the workers loaded it from disk."""
        return await self._weights.version()

    async def update_weight_version(self, new_version: str | int, abort_all_requests: bool = True) -> tuple[bool, str]:
        """End the sync and publish it as `new_version`. With nothing to publish, the next sync gets that number.
        new_version: a number, or its text, above all earlier versions. The newest published one changes nothing.
        abort_all_requests: call `abort_generation` first. Otherwise requests go on, and their tokens say which version
            sampled them. Raises InvalidField, IncompleteWeights, WeightSyncError."""
        return await self._weights.name_version(new_version, abort_all_requests)

    def supports_overlapped_weight_sync(self) -> bool:
        """True: workers serve the old version while the new one arrives."""
        return True

    async def start_weight_transfer(self, request: Any) -> WeightTransferHandle:
        """Receive the last tensors of a version, and publish the version in the background. Returns at once.
        Raises InvalidField."""
        return await self._weights.start(request)

    async def finish_weight_transfer(self, handle: WeightTransferHandle, flush_cache: bool = True) -> str:
        """Wait until the pool serves the version, and return it. flush_cache: drop cached prefixes then.
        Raises the error of the transfer: IncompleteWeights, WeightSyncError, …"""
        return await self._weights.finish(handle, flush_cache)

    async def overlapped_weight_sync(self, request: Any, pause_mode: str = "in_place") -> str:
        """Start and finish a transfer while requests go on. Their tokens say which version sampled them.
        pause_mode: how requests cross the update. "in_place": weights change under them. "retract": they go on with a
        new KV cache. "abort": they end. "in_place" needs a publisher with mode "in_place", "retract" one with mode
        "resume". Raises InvalidField for another publisher."""
        return await self._weights.overlapped(request, pause_mode)

    async def load_weights_from_disk(
        self, model_path: str, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Publish a folder of this host as the next version: a safetensors checkpoint, or a snapshot.
        load_format: the required format; None and "auto" accept both. `rolloutmq control load` loads folders that only
        workers can read. Returns (True, ""). Raises InvalidField, SnapshotError, WeightSyncError."""
        return await self._weights.load_folder(model_path, load_format, flush_cache)

    async def get_weights_by_name(self, name: str) -> Any:
        """Raises FeatureUnavailable: workers do not send weights back. `validate_weights` compares them there."""
        raise FeatureUnavailable("get_weights_by_name", name, "validate_weights, which compares them where they are")

    async def validate_weights(
        self, weight_names: Iterable[str] | None = None, check_nan: bool = True, check_inf: bool = True
    ) -> dict[str, Any]:
        """Every worker checks all parameters of its engine: {"valid", "version", "nonfinite", "zero", "wrong",
        "workers": worker -> its whole finding}. Raises InvalidField unless `check_nan` equals `check_inf`.
        nonfinite: parameters with NaN or Inf. zero: matrices of zeros. Both are in the engine's names. wrong: tensors
        that differ in a bit from the published ones, in the trainer's names. weight_names: does not limit the check."""
        return await self._control.validate(weight_names, check_nan, check_inf)

    async def check_weight_sync_integrity(self, expected_version: str | int | None = None) -> dict[str, Any]:
        """Whether all workers serve one version with the same bits: {"consistent", "expected_version", "versions":
        worker -> version, "fingerprints": worker -> digest of its parameters, "wrong": worker -> tensors that differ}.
        expected_version: the newest one by default. Fingerprints of workers of different kinds cannot be compared."""
        expected = await self._weights.version() if expected_version is None else expected_version
        return await self._control.compare(expected)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> tuple[bool, str]:
        """Publish the adapter in a folder of this host (as PEFT saves it) as the newest version of `lora_name`.
        Prompts ask for it by `lora` in their sampling parameters. A published adapter stays, whatever `pinned` says.
        Returns (True, ""). Raises InvalidField, and WeightSyncError if no worker has taken it."""
        return await self._weights.load_adapter(lora_name, lora_path)

    async def unload_lora_adapter(self, lora_name: str) -> tuple[bool, str]:
        """Remove all versions of an adapter from the workers' engines. Raises for an adapter in use or unknown."""
        return await self._weights.unload_adapter(lora_name)

    async def sleep(
        self, *args: Any, tags: Sequence[str] | None = None, level: int = 1, timeout_s: float = COMMAND_S, **kwargs: Any
    ) -> None:
        """Workers release memory of their GPUs. Running samples continue after `wake_up`.
        tags: "weights", "kv_cache", "cuda_graph", or none for all. level: vLLM's 1 and 2 mean the same here. Raises
        InvalidField, and FeatureUnavailable for workers that cannot."""
        await self._control.sleep(memory_tags(args, tags, kwargs), level, timeout_s)

    async def wake_up(
        self, *args: Any, tags: Sequence[str] | None = None, timeout_s: float = COMMAND_S, **kwargs: Any
    ) -> None:
        """Workers take their memory back. tags: as for `sleep`. Weights that were received meanwhile are published when
        the weights' memory is back, before that of the KV cache."""
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
        """Publish received weights, and drop all cached prefixes. Prefixes of other versions are never used anyway."""
        await self._weights.end_sync()
        await self._control.flush_caches()

    async def clear_hicache_storage(self) -> bool:
        """Clear the storage behind the hierarchical caches. Returns True. Raises FeatureUnavailable without one."""
        return await self._control.clear_storage()

    def supports_sessions(self) -> bool:
        """True: any worker can continue any session."""
        return True

    async def open_session(self, capacity_of_str_len: int = 8192, session_id: str | None = None) -> str | None:
        """The id of a new session, None if that id is in use. A session is kept here, not on a worker."""
        return self._sessions.open(session_id, capacity_of_str_len)

    async def close_session(self, session_id: str) -> None:
        """Forget a session. Raises InvalidField if it is not open."""
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
        """Continue a session. The prompt has only the new tokens.
        rid: the request to continue, from an earlier output's `request_ids`. None begins anew. offset: keep only so
        many of that request's tokens, prompt first; -1 or None keeps all. replace: forget the requests that continued
        it before; without rid, forget the whole session. drop_previous_output: leave out that request's output.
        Several prompts, or n > 1, become branches. Raises InvalidField for an unknown session or request, otherwise as
        `generate`."""
        return await self._sessions.generate(session_id, input_batch, rid, offset, replace, drop_previous_output)

    async def get_session_info(self, session_id: str) -> dict[str, Any] | None:
        """The session's requests and its number of tokens. None if it is not open."""
        tree = self._sessions.trees.get(session_id)
        return tree.info() if tree is not None else None

    async def list_sessions(self) -> list[str]:
        """Ids of the open sessions."""
        return list(self._sessions.trees)

    async def fork_session(self, source: str, target: str | None = None, offset: int = -1) -> str | None:
        """The id of a new session that begins as a copy of `source`. None if the id `target` is in use.
        offset: -1 copies all requests, under their ids. 0 or more copies so many tokens of the newest request, and
        every first turn (rid=None) continues them. Raises InvalidField if `source` is not open."""
        return self._sessions.fork(source, target, offset)

    def supports_scoring(self) -> bool:
        """Whether a worker of the pool has a reward model, or can compute log-probabilities of a given answer."""
        return self._core.has(REWARD) or self._core.has(SCORE)

    def supports_embeddings(self) -> bool:
        """Whether a worker of the pool has an embedding model."""
        return self._core.has(EMBED)

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool = False
    ) -> dict[str, Any]:
        """{"scores": one float for each pair of prompt and answer, "kind": "reward" or "logprob"}.
        input_ids, output_ids: equally many lists of ids, or one list each. kind: "reward" in a pool with a reward
        model, for prompt and answer as one sequence; else "logprob", of the answer after its prompt. Raises
        InvalidField, JobFailed, WaitTimeout, and FeatureUnavailable in a pool without both and for hidden states."""
        return await self._tasks.score(input_ids, output_ids, return_hidden_states)

    async def encode(self, texts: Sequence[str] | str, dimensions: int | None = None) -> list[list[float]]:
        """An embedding of each text. dimensions: only its first components; the model must be trained for that.
        Raises InvalidField, FeatureUnavailable in a pool without an embedding model, JobFailed, WaitTimeout."""
        return await self._tasks.encode([texts] if isinstance(texts, str) else list(texts), dimensions)

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """The embedding of one text; see `encode`."""
        return (await self.encode([text], dimensions))[0]

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Cosine similarity of two texts' embeddings; see `encode`."""
        return await self._tasks.similarity(text1, text2, dimensions)

    async def decode(self, token_ids: Sequence[Any], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of ids, or of one list. Decoded in this process, with the model's tokenizer."""
        return await self._tasks.decode(token_ids, skip_special_tokens)

    async def save_sharded_model(self, save_path: str, pattern: str | None = None, max_size: int | None = None) -> bool:
        """One worker saves its weights into a folder of its host, in SGLang's sharded format. Returns True. Raises
        InvalidField for a pattern or max_size."""
        return await self._control.save_sharded(save_path, pattern, max_size)

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """One worker saves its weights as safetensors and copies them to a URL with fsspec. Returns True.
        remote_path: a URL, or its part after `storage_type`://. The files stay in the worker's /var/tmp."""
        return await self._control.save_remote(remote_path, storage_type)

    async def start_profile(self) -> bool:
        """Every worker starts its profiler. Returns True. Raises a worker's error if its profiler runs already."""
        return await self._control.start_profile()

    async def stop_profile(self) -> dict[str, Any] | None:
        """Worker -> folder of its traces. None for a pool without workers."""
        return await self._control.ask("stop_profile") or None

    async def get_server_info(self) -> dict[str, Any]:
        """The pool's name, its workers as of their last heartbeat, its load and the newest version."""
        return await self._control.server_info()

    async def get_memory_pool_size(self) -> dict[str, int]:
        """{"total_tokens", "available_tokens", "used_tokens"}: sums over the workers' KV caches. Raises
        FeatureUnavailable if a worker does not report them."""
        return await self._control.memory_pool_size()

    def tp_size(self) -> int:
        """Tensor-parallel size of a worker's engine. Raises RolloutMQError if workers differ or there is none."""
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
