"""Everything of SGLang's insides that this package touches, for 0.5.17 up to 0.5.23.

Differences between releases are found by attribute or signature, never by version number:

- `begin_weight_update` and `end_weight_update` exist, and are required around an update, only in newer releases;
- a request that is aborted before it was sent raises in older ones and returns an empty output in newer ones;
- `extra_key` separates prefix caches in all of them (`cache_salt`, in newer ones, is a second such key; not used);
- the launch state travels in attributes of the tokenizer manager or of the engine, whose names all of them share.

Importing this module imports sglang, so only code that runs after :mod:`.cpu_support` could act may do it: this module
calls it itself, first.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...messages.errors import ConfigError, EngineError
from ...messages.nearest import nearest
from ..cpu_support import prepare_engine
from ..engine import EngineRequest
from .arrays import Shapes
from .inside.entry import ChildSetup, run_scheduler
from .loader import loader_request
from .params import generate_arguments

prepare_engine()
_policy = asyncio.get_event_loop_policy()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of every kernel that this host has no use for
    import sglang
    import torch
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

    from .marker import marker

asyncio.set_event_loop_policy(_policy)  # importing sglang replaces it with uvloop's; that is the host program's choice

logger = logging.getLogger(__name__)
VERSION: str = sglang.__version__
_PLAIN_OUTPUT_LOGPROBS = "rolloutmq_output_logprobs"
_PLAIN_INPUT_LOGPROBS = "rolloutmq_input_logprobs"
_STATE = "rolloutmq_state"


class Manager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager as a part of somebody else's program.

    The original installs SIGTERM and SIGQUIT handlers and ends the whole process when something goes wrong. This one
    touches no signals, runs only the task that receives outputs, and reports a failure to `on_lost`.
    """

    event_loop: Any
    on_lost: Callable[[str], None] = staticmethod(lambda reason: None)

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is None:
            self.event_loop = asyncio.get_running_loop()
            self.asyncio_tasks.add(self.event_loop.create_task(self._receive()))

    async def _receive(self) -> None:
        try:
            await self.handle_loop()
        except Exception as error:
            logger.exception("receiving from the SGLang scheduler failed")
            self.on_lost(f"receiving from the scheduler failed: {error!r}")

    def add_logprob_to_meta_info(self, meta_info: dict[str, Any], state: Any, *_args: Any, **_kwargs: Any) -> None:
        """Hand over the sampled tokens' log-probabilities as the list they are in.

        The original makes a tuple (logprob, token id, None) of each token: half of the work per token in this process.
        """
        meta_info[_PLAIN_OUTPUT_LOGPROBS] = state.output_token_logprobs_val
        if state.obj.top_logprobs_num or state.obj.token_ids_logprob or state.input_token_logprobs_val:
            meta_info[_STATE] = state
        if state.input_token_logprobs_val:
            meta_info[_PLAIN_INPUT_LOGPROBS] = state.input_token_logprobs_val


def check_names(extra: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that this release of SGLang does not have."""
    known = inspect.signature(ServerArgs).parameters
    for name in extra:
        if name not in known:
            raise ConfigError(f"extra={name!r}: SGLang {VERSION} has no such argument{nearest(name, known)}")


def launch(arguments: dict[str, Any], setup: ChildSetup, on_lost: Callable[[str], None]) -> Any:
    """A running `sgl.Engine`; blocks until its model is loaded, so call it outside the event loop.

    No detokenizer process is started: without a tokenizer in the engine the scheduler answers the manager directly,
    and that process would only cost its start-up.
    """

    def make_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
        manager, templates = engine_module.init_tokenizer_manager(server_args, port_args, Manager)
        manager.on_lost = on_lost
        return manager, templates

    class _Engine(engine_module.Engine):  # type: ignore[misc]
        init_tokenizer_manager_func = staticmethod(make_manager)
        run_scheduler_process_func = staticmethod(partial(run_scheduler, setup=setup))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_args: object, **_kwargs: object) -> tuple[list[Any], list[str]]:
            return [], []

        def shutdown(self) -> None:
            """The original, also run at exit, kills every child of this process; EngineProcesses ends this engine's."""

    if arguments["device"] == "cpu" and arguments.get("enable_deterministic_inference"):
        _allow_deterministic("torch_native")
    # It would replace the root logger's handlers, which belong to the host program; the children still call theirs.
    engine_module.configure_logger = lambda *_args, **_kwargs: None
    logging.getLogger("sglang").setLevel(arguments["log_level"].upper())
    engine = _Engine(**arguments)
    atexit.unregister(engine.shutdown)  # keeps the engine in memory
    # Sends SIGQUIT to this process when a child ends; this package watches them itself.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def _allow_deterministic(attention_backend: str) -> None:
    """SGLang lists the attention backends for deterministic inference; the CPU's computes each sequence by itself."""
    from sglang.srt import server_args  # noqa: PLC0415

    server_args.add_deterministic_attention_backend_choices([attention_backend])
    server_args.add_radix_supported_deterministic_attention_backend_choices([attention_backend])


def generate_input(request: EngineRequest, *, deterministic: bool = False) -> Any:
    """The request in SGLang's form, see :mod:`.sglang_params`."""
    return io_struct.GenerateReqInput(**generate_arguments(request, marker=marker, deterministic=deterministic))


async def generate(manager: Any, request: EngineRequest, *, deterministic: bool = False) -> dict[str, Any] | None:
    """SGLang's answer to one request, or None if it was aborted before it reached the scheduler.

    deterministic: the engine samples by seeds. Raises what SGLang raises: ValueError for a request that it refuses.
    """
    answer: dict[str, Any] | None = None
    try:
        # To its end, not just the first item: only that gives back the lock that a weight update waits for.
        async for item in manager.generate_request(generate_input(request, deterministic=deterministic), None):
            answer = item
    except ValueError as error:
        if type(error).__name__ == "RequestAbortedError":
            return None
        raise
    except asyncio.CancelledError:
        manager.abort_request(request.request_id)
        raise
    return answer


def logprobs_of(answer: dict[str, Any]) -> tuple[list[float], Any]:
    """Log-probabilities of the generated tokens, none for a request that never ran; and SGLang's state of the request,
    if it asked for more of them.
    """
    meta = answer["meta_info"]
    return meta.get(_PLAIN_OUTPUT_LOGPROBS, []), meta.get(_STATE)


def input_logprobs(answer: dict[str, Any]) -> list[float | None]:
    """Log-probabilities of the prompt's tokens from `logprob_start_len` on, the first of which is None."""
    values: list[float | None] = answer["meta_info"].get(_PLAIN_INPUT_LOGPROBS, [])
    return values


def generated_so_far(manager: Any, request_id: str, start: int) -> tuple[list[int], list[float], Any] | None:
    """Token ids and log-probabilities of a running request from `start` on, as far as they are reported, or None.

    With SGLang's state of it, whose other lists are as long.

    The scheduler reports every SGLANG_FORCE_STREAM_INTERVAL (50) tokens, also of a request that does not stream.
    """
    state = manager.rid_to_state.get(request_id)
    if state is None or state.finished:
        return None
    token_ids, logprobs = state.output_ids, state.output_token_logprobs_val
    count = min(len(token_ids), len(logprobs))
    return token_ids[start:count], logprobs[start:count], state


def fail_pending(manager: Any) -> None:
    """Make every pending `generate` return, because no answer will come any more."""
    for state in list(manager.rid_to_state.values()):
        state.finished = True
        state.out_list.append({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
        state.event.set()
    manager.rid_to_state.clear()


def shapes_of(manager: Any) -> Shapes:
    """Of the model's arrays."""
    model = manager.model_config
    text = getattr(model, "hf_text_config", None) or model.hf_config
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    return Shapes(
        hidden=int(model.hidden_size),
        dtype=str(model.dtype).removeprefix("torch."),
        layers=int(text.num_hidden_layers) if experts else 0,
        experts=experts,
    )


def token_limit(engine: Any) -> int:
    """Most tokens of prompt and output together that the scheduler neither cuts short nor leaves waiting for ever.

    SGLang keeps a few positions for itself (`max_req_input_len` has them taken off, from the context length as well
    as from the KV cache); admission also wants one free page, which counts where pages are larger than a token.
    """
    facts = engine._scheduler_init_result.scheduler_infos[0]
    page = getattr(engine.server_args, "page_size", None) or 1
    return min(int(facts["max_req_input_len"]), int(facts["max_total_num_tokens"]) - 6 - int(page))


def gpu_of(engine: Any) -> str:
    """Unique id of the GPU of an engine that has one; "" for several or none."""
    arguments = engine.server_args
    if arguments.device != "cuda" or arguments.tp_size != 1:
        return ""
    return str(torch.cuda.get_device_properties(arguments.base_gpu_id).uuid)


async def run_loader(manager: Any, loader: str, text: str, tp_size: int) -> None:
    """Call `loader(model, [(text, tensor)])` on every tensor-parallel rank; the tensor's one element is the rank.

    Requests may be running: the scheduler does it between two batches. (SGLang's own way, `update_weights_from_tensor`,
    first waits until none is.) Raises RuntimeError if SGLang says that it did not happen.
    """
    request = loader_request(loader, text, tp_size)
    # A request on its way must not arrive after the update that it belongs before; SGLang tells nobody of its sending.
    while not all(state.dispatched for state in list(manager.rid_to_state.values())):  # noqa: ASYNC110
        await asyncio.sleep(0)
    manager.auto_create_handle_loop()  # else nobody hears the answer on an engine that has had no request yet
    for answer in await manager.update_weights_from_tensor_communicator(request):
        _expect(answer)


async def load_lora(manager: Any, name: str, config: dict[str, Any], payloads: list[bytes]) -> None:
    """Load an adapter under `name`, which is in none of SGLang's paths; one pickled dict of tensors for each rank.

    Nothing happens if there is one of that name. Raises EngineError with what SGLang says.
    """
    if name in manager.lora_registry.get_all_adapters():
        return
    request = io_struct.LoadLoRAAdapterFromTensorsReqInput(
        lora_name=name, config_dict=config, serialized_named_tensors=payloads
    )
    answer = await manager.load_lora_adapter_from_tensors(request, None)
    if not answer.success:
        raise EngineError(f"SGLang refused adapter {name}: {answer.error_message}")


async def unload_lora(manager: Any, name: str) -> None:
    """Unload the adapter of that name. Raises EngineError, also if requests refer to it.

    SGLang would wait for those, under the lock that every other adapter's load needs.
    """
    registry = manager.lora_registry
    known = registry.get_all_adapters().get(name)
    if known is None:
        return
    if registry._counters[known.lora_id].value():
        raise EngineError(f"requests refer to adapter {name}")
    answer = await manager.unload_lora_adapter(io_struct.UnloadLoRAAdapterReqInput(lora_name=name), None)
    if not answer.success:
        raise EngineError(f"SGLang did not unload adapter {name}: {answer.error_message}")
    manager.lora_ref_cache.pop(name, None)  # else it is kept for ever, to load it again from a path that it has not


def release(engine: Any) -> None:
    """Give back what the engine holds in this process; its child processes must be gone. Call it on the event loop."""
    manager = engine.tokenizer_manager
    for task in list(manager.asyncio_tasks):
        task.cancel()
    for socket in (manager.recv_from_detokenizer, manager.send_to_scheduler, engine.send_to_rpc):
        context = socket.context
        socket.close(linger=0)
        context.destroy(linger=0)
    reader = getattr(manager, "load_snapshot_reader", None)
    if reader is not None:
        reader.close()
    transport = getattr(manager, "cuda_vmm_feature_transport", None)  # newer releases
    if transport is not None:
        transport.shutdown()
    if not engine.loop.is_running():
        engine.loop.close()


def leftover_files(engine: Any) -> list[str]:
    """Socket files of the engine's message channels, and its shared-memory file, which SGLang leaves behind."""
    names = [value for value in vars(engine.port_args).values() if isinstance(value, str)]
    files = [name.removeprefix("ipc://") for name in names if name.startswith("ipc://")]
    snapshot = getattr(getattr(engine.tokenizer_manager, "load_snapshot_reader", None), "path", None)
    return [*files, snapshot] if snapshot else files


def _expect(answer: Any) -> None:
    success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise RuntimeError(message)
