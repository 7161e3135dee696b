"""SkyRL's inference engine, over a pool of any number of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from ..client import RolloutClient
from .calls import Calls
from .control import MEMORY_S, WorkerControl, memory_tags
from .core import EngineCore, register
from .extras import Extras
from .generation import Generation, checked_mode
from .outputs import InferenceEngineOutput, StreamingChunk
from .requests import InferenceEngineInput, session_name
from .sessions import Sessions
from .tasks import Tasks
from .weights import WeightSync, WeightTransferHandle, remote_version

if TYPE_CHECKING:
    from ...sync.publish import WeightPublisher  # torch


class SkyRLEngine(Sessions, Tasks, Extras):
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
        pause_mode: what `pause_generation` does without a mode: "abort", or "in_place" (SkyRL's present interface).
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
        pause_mode: str = "abort",
    ) -> None:
        self._pause_mode = checked_mode(pause_mode)
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
        self._generation = Generation(self._core, self._calls, self._weights)
        self._sessions = {}
        register(type(self))

    async def client(self) -> RolloutClient:
        """The client under this engine, opened. Raises RedisUnavailable, and RolloutMQError after `teardown`."""
        return await self._core.client()

    async def teardown(self) -> None:
        """End this engine's calls, leave the trainer's group and disconnect, in half a minute at most.
        Workers go on, but for memory that sleeps. Later calls raise RolloutMQError. A second teardown does nothing."""
        if not self._core.closed:
            await self._control.let_go()
            await self._core.close(self._weights.close)
            self._sessions.clear()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SkyRLEngine is not copied: weights that were sent to one copy would be published by none. "
            "Make it a Ray actor, as SkyRL does with its engines: every handle then speaks to the same one"
        )

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """Generate for every prompt of a batch, on all of the pool's workers. Waits while the engine is paused.

        model: the pool's model, or the name of an adapter. The default is the adapter that `update_named_weights`
        loaded last, otherwise the model. Publishes received weights first. Raises InvalidField, FeatureUnavailable if
        no worker can do it, JobFailed if a prompt could not be answered (an output never has holes), WaitTimeout,
        ConfigError without a tokenizer."""
        return await self._generation.generate(input_batch, model)

    def generate_stream(self, input_batch: InferenceEngineInput) -> AsyncGenerator[StreamingChunk]:
        """The output of `generate`, token by token. Chunks of one sample come in order; the last has `is_finished`.
        Raises as `generate` does. If the caller leaves it early, it cancels its jobs in the pool."""
        return self._generation.stream(input_batch)

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer {"json": body of POST /v1/chat/completions}: a chat.completion, or an error as a dictionary whose
        `code` is the HTTP status. Workers render the conversation, unless `continue_final_message` is set or
        `add_generation_prompt` is false: then this engine does. A `model` that is an adapter's name samples with it."""
        return await self._generation.answer(request_payload, chat=True)

    async def render_chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """{"model", "token_ids", "features": None}: the prompt of a chat's body, rendered with this engine's tokenizer.
        Or an error as a dictionary."""
        return await self._generation.render(request_payload)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """The same for POST /v1/completions. The prompt is a text, ids, or a list of texts or of lists of ids."""
        return await self._generation.answer(request_payload, chat=False)

    async def abort_generation(self) -> None:
        """End this engine's requests with the tokens they have and stop reason "abort". Other clients' go on."""
        await self._control.end_calls()

    async def pause_generation(self, mode: str | None = None) -> None:
        """Stop generating. New requests wait for `continue_generation`.
        mode: "abort" does the same as `abort_generation`. "in_place" (or "keep") halts all workers; their requests go
        on later. "retract" also drops the KV cache of these requests; workers compute it again afterwards. The default
        is the engine's `pause_mode`. Raises InvalidField, and the error of a worker that cannot halt."""
        mode = self._pause_mode if mode is None else checked_mode(mode)
        await self._calls.set_paused(True)
        await (self._control.end_calls() if mode == "abort" else self._control.halt(mode))

    async def continue_generation(self) -> None:
        """Publish weights that were received meanwhile, then let workers and waiting requests go on."""
        await self._core.client()
        if self._control.halted == "in_place":  # a halted engine takes no weights; running samples cross the update
            await self._control.resume()
        await self._weights.end_sync()
        await self._control.resume()
        await self._calls.set_paused(False)

    resume_generation = continue_generation
    """SkyRL's present name of it."""

    async def finish_session(self, session_id: str) -> None:
        """A trajectory has ended: no worker is preferred for its session id any more. Unknown ids are ignored."""
        for name in {session_name(session_id), str(session_id)}:
            self._generation.worker_of.pop(name, None)

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
        Or publish the adapter of a LoraLoadRequest (named "skyrl-lora" without a name): later calls sample with it.
        The engine keeps them until the sync ends, and then publishes them as one version. A sync ends with
        `update_weight_version`, `continue_generation`, `reset_prefix_cache`, `wake_up`, the next `generate`, or when a
        tensor comes again. Returns (True, ""). Raises InvalidField, TransferTimeout."""
        return await self._weights.update(request)

    async def get_weight_version(self) -> str | None:
        """The newest committed version: the name that this engine gave it, or its number as text. "0" is the model as
        the workers loaded it from disk."""
        return await self._weights.version()

    @staticmethod
    async def get_remote_weight_version(endpoint: str, pool: str = "default", timeout: float = 5.0) -> str:
        """The number of a pool's newest committed version, as text, without an engine for it.
        endpoint: the URL of its Redis. Raises RedisUnavailable, also if there is no answer within `timeout` seconds."""
        return await remote_version(endpoint, pool, timeout)

    async def update_weight_version(self, new_version: str | int, abort_all_requests: bool = True) -> tuple[bool, str]:
        """End the sync and publish it as `new_version`. With nothing to publish, the next sync gets that number.
        new_version: a number, or its text, above all earlier versions; or a name such as "step_100", for the next
            number. The newest published one changes nothing.
        abort_all_requests: call `abort_generation` first. Otherwise requests go on, and their tokens say which version
            sampled them. Raises InvalidField, IncompleteWeights, WeightSyncError."""
        return await self._weights.name_version(new_version, abort_all_requests)

    async def start_weight_transfer(self, request: Any) -> WeightTransferHandle:
        """Receive the last tensors of a version, and publish the version in the background. Returns at once.
        Raises InvalidField."""
        return await self._weights.start(request)

    async def finish_weight_transfer(self, handle: WeightTransferHandle) -> str:
        """Wait until the pool serves the version, and return it. Cached prefixes are dropped then.
        Raises the error of the transfer: IncompleteWeights, WeightSyncError, …"""
        version = await handle.wait()
        await self._control.flush_caches()
        return version

    async def overlapped_weight_sync(self, request: Any, pause_mode: str = "in_place") -> str:
        """Start and finish a transfer while requests go on. Their tokens say which version sampled them.
        pause_mode: how requests cross the update. "in_place": weights change under them. "retract": they go on with a
        new KV cache. "abort": they end. "in_place" needs a publisher with mode "in_place", "retract" one with mode
        "resume". Raises InvalidField for another publisher."""
        return await self._weights.overlapped(request, pause_mode)

    async def load_weights_from_disk(self, model_path: str) -> tuple[bool, str]:
        """Publish a folder of this host as the next version: a safetensors checkpoint, or a snapshot.
        `rolloutmq control load` loads folders that only workers can read. Returns (True, ""). Raises InvalidField,
        SnapshotError, WeightSyncError."""
        return await self._weights.load_folder(model_path)

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> tuple[bool, str]:
        """Publish the adapter in a folder of this host (as PEFT saves it) as the newest version of `lora_name`.
        Prompts ask for it by `lora` in their sampling parameters. pinned: workers keep this version when newer ones
        come. Returns (True, ""). Raises InvalidField, and WeightSyncError if no worker has taken it."""
        return await self._weights.load_adapter(lora_name, lora_path, pinned)

    async def unload_lora_adapter(self, lora_name: str) -> tuple[bool, str]:
        """Remove all versions of an adapter from the workers' engines. Raises for an adapter in use or unknown."""
        return await self._weights.unload_adapter(lora_name)

    async def sleep(
        self,
        *args: Any,
        tags: Any = None,
        level: int = 1,
        timeout: float = MEMORY_S,
        abort_first: bool = True,
        drain_timeout: float = 5.0,
        **kwargs: Any,
    ) -> None:
        """Workers release memory of their GPUs. Other clients' samples continue after `wake_up`.
        tags: "weights", "kv_cache", "cuda_graph", or none for all. level: vLLM's 1 and 2 mean the same here.
        timeout: seconds for the workers' answers. abort_first: `abort_generation` first. drain_timeout: seconds to wait
        until this engine's requests have ended. Those that have not, continue later.
        Raises InvalidField, WaitTimeout, and FeatureUnavailable for workers that cannot."""
        released = memory_tags(args, tags, kwargs)
        await self._control.sleep(released, level, timeout, abort_first=abort_first, drain_timeout=drain_timeout)

    async def wake_up(self, *args: Any, tags: Any = None, timeout: float = MEMORY_S, **kwargs: Any) -> None:
        """Workers take their memory back. tags, timeout: as for `sleep`. Graphs wake with the KV cache. Weights that
        were received meanwhile are published when the weights' memory is back, before that of the KV cache."""
        await self._control.wake(memory_tags(args, tags, kwargs), timeout, self._weights.end_sync)

    async def sleep_weights_only(self, timeout: float = MEMORY_S) -> None:
        """`sleep` of the weights alone. Running requests end first, as there; cached prefixes of other weights are
        never used."""
        await self.sleep(tags=["weights"], timeout=timeout)

    async def wake_up_weights_only(self, timeout: float = MEMORY_S) -> None:
        """`wake_up` of the weights alone."""
        await self.wake_up(tags=["weights"], timeout=timeout)

    async def sleep_all(self, timeout: float = MEMORY_S) -> None:
        """`sleep` of all memory."""
        await self.sleep(timeout=timeout)

    async def wake_up_all(self, timeout: float = MEMORY_S) -> None:
        """`wake_up` of all memory."""
        await self.wake_up(timeout=timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Publish received weights, and drop all cached prefixes. Prefixes of other versions are never used anyway.
        reset_running_requests: also drop the KV cache of what runs. It goes on, with a KV cache computed anew."""
        await self._weights.end_sync()
        await self._control.reset_caches(reset_running_requests)

    async def clear_hicache_storage(self) -> bool:
        """Empty the storage of workers' hierarchical caches. Returns True. Raises FeatureUnavailable without one."""
        await self._control.ask("clear_storage")
        return True
