"""Starting SGLang in the worker's process, and giving back what it holds there. Works with 0.5.17 up to 0.5.23.

Importing this module imports SGLang, which takes seconds. :mod:`.run` does it on the thread that launches the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...messages.errors import ConfigError
from ...messages.nearest import nearest
from ..cpu_support import prepare_engine
from ..engine import EngineInfo
from . import patches
from .calls.answer import INPUT_LOGPROBS, LOGPROBS, STATE, Shapes
from .calls.media import KEPT, has_own_places, keep_tokens, let_go
from .config import SGLangConfig
from .inside import ChildSetup, run_scheduler

prepare_engine()
_policy = asyncio.get_event_loop_policy()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about every kernel that this host lacks and does not need
    import sglang
    import torch
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

asyncio.set_event_loop_policy(_policy)  # importing sglang replaces it with uvloop's; that is the host program's choice

logger = logging.getLogger(__name__)
VERSION: str = sglang.__version__
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names that models' configurations have for the number of a layer's experts."""


class Manager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager inside a program that is not SGLang's own.

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

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort a request, or all. SGLang itself says it once, which may miss one whose prompt is just being read."""
        if (state := self.rid_to_state.get(rid)) is not None:
            state.abort_sent = False
        super().abort_request(rid, abort_all)

    def add_logprob_to_meta_info(self, meta_info: dict[str, Any], state: Any, *_args: Any, **_kwargs: Any) -> None:
        """Return the sampled tokens' log-probabilities as the list that SGLang has.

        The original makes a tuple (logprob, token id, None) for each token. That is half of this process's work per
        token.
        """
        meta_info[LOGPROBS] = state.output_token_logprobs_val
        if state.obj.top_logprobs_num or state.obj.token_ids_logprob or state.input_token_logprobs_val:
            meta_info[STATE] = state
        if state.input_token_logprobs_val:
            meta_info[INPUT_LOGPROBS] = state.input_token_logprobs_val


def check_names(extra: Mapping[str, Any]) -> None:
    """Check names of server arguments. Raises ConfigError for one that this release of SGLang does not have."""
    known = inspect.signature(ServerArgs).parameters
    for name in extra:
        if name not in known:
            raise ConfigError(f"extra={name!r}: SGLang {VERSION} has no such argument{nearest(name, list(known))}")


class Launched:
    """A running `sgl.Engine`. manager: its tokenizer manager, which takes requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.manager = engine.tokenizer_manager

    def describe(self, config: SGLangConfig) -> EngineInfo:
        """Return what the engine is. Its features are not set yet."""
        model, arguments = self.manager.model_config, self._engine.server_args
        cuda = arguments.device == "cuda"
        return EngineInfo(
            name="sglang",
            version=VERSION,
            model=config.model,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(arguments.device),
            vocab_size=int(model.vocab_size),
            context_length=self._token_limit(),
            tp_size=config.tp_size,
            pp_size=config.pp_size,
            dp_size=config.dp_size,
            ep_size=config.ep_size,
            kv_tokens=int(self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]),
            gpu_model=torch.cuda.get_device_name(arguments.base_gpu_id) if cuda else "",
            deterministic=config.deterministic,
            startup=self._startup(),
        )

    def _startup(self) -> dict[str, float]:
        """Return the phases of the schedulers' start, in seconds of the slowest rank, as SGLang counts them."""
        told = [info.get("startup_time") or {} for info in self._engine._scheduler_init_result.scheduler_infos]
        model = max((float(one.get("load_weight", 0.0)) for one in told), default=0.0)
        graphs = max((sum(map(float, one.get("cuda_graph", {}).values())) for one in told), default=0.0)
        whole = max((float(one.get("scheduler_e2e", 0.0)) for one in told), default=0.0)
        return {"model": model, "graphs": graphs, "engine": max(0.0, whole - model - graphs)}

    def _token_limit(self) -> int:
        """Return the most tokens of prompt and output together that the scheduler neither cuts off nor leaves waiting.

        SGLang keeps a few positions of the context length and of the KV cache for itself. `max_req_input_len` does not
        include them. Admission also needs one free page, which matters if a page is larger than a token.
        """
        facts = self._engine._scheduler_init_result.scheduler_infos[0]
        page = getattr(self._engine.server_args, "page_size", None) or 1
        return min(int(facts["max_req_input_len"]), int(facts["max_total_num_tokens"]) - 6 - int(page))

    def shapes(self) -> Shapes:
        """Return the shapes of the model's arrays."""
        model = self.manager.model_config
        text = getattr(model, "hf_text_config", None) or model.hf_config
        experts = int(getattr(text, "num_experts_per_tok", None) or 0)
        among = (getattr(text, name, None) for name in EXPERT_COUNTS)
        return Shapes(
            hidden=int(model.hidden_size),
            dtype=str(model.dtype).removeprefix("torch."),
            layers=int(text.num_hidden_layers) if experts else 0,
            experts=experts,
            among=next((count for count in among if isinstance(count, int)), 0) if experts else 0,
        )

    def fail_pending(self) -> None:
        """Make every pending request return, because no answer will come any more."""
        for state in list(self.manager.rid_to_state.values()):
            state.finished = True
            state.out_list.append({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
            state.event.set()
        self.manager.rid_to_state.clear()

    def release(self) -> None:
        """Give back what the engine holds in this process, and remove the files that SGLang leaves behind.

        Its child processes must be gone. Call it on the event loop.
        """
        engine, manager = self._engine, self.manager
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
        # The socket files of its message channels, and its shared-memory file.
        names = [value for value in vars(engine.port_args).values() if isinstance(value, str)]
        files = [name.removeprefix("ipc://") for name in names if name.startswith("ipc://")]
        for name in filter(None, (*files, getattr(reader, "path", None))):
            with contextlib.suppress(OSError):
                Path(name).unlink()


def launch(arguments: dict[str, Any], setup: ChildSetup, on_lost: Callable[[str], None]) -> Launched:
    """Start an engine. Blocks until its model is loaded, so call it outside the event loop.

    No detokenizer process is started. It would do nothing, because without a tokenizer in the engine the scheduler
    answers the manager directly. Raises EngineError if this release of SGLang is not as expected.
    """
    patches.check("worker")

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
            """Do nothing. SGLang's own kills every child of this process, also at exit.

            EngineProcesses ends the engine.
            """

    _keep_tokens_of_processors()
    if arguments["device"] == "cpu" and arguments.get("enable_deterministic_inference"):
        _allow_deterministic("torch_native")
    # SGLang's would replace the root logger's handlers, which belong to the host program. Its child processes still
    # call it.
    patches.replace("entrypoints.engine:configure_logger", lambda *_args, **_kwargs: None)
    logging.getLogger("sglang").setLevel(arguments["log_level"].upper())
    engine = _Engine(**arguments)
    atexit.unregister(engine.shutdown)  # keeps the engine in memory
    # SGLang's watchdog sends SIGQUIT to this process when a child ends. This package watches them itself.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return Launched(engine)


def _keep_tokens_of_processors() -> None:
    """Have SGLang keep a prompt's tokens. It is done before SGLang copies the processor for its threads."""
    make = patches.original("managers.tokenizer_manager:get_mm_processor")

    def make_kept(hf_config: Any, server_args: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = getattr(processor, "tokenizer", processor)
        if not hasattr(tokenizer, "get_added_vocab"):
            return make(hf_config, server_args, processor, *args, **kwargs)
        keep_tokens(tokenizer)
        made = make(hf_config, server_args, processor, *args, **kwargs)
        if has_own_places(made, tokenizer):
            setattr(made, KEPT, True)
            return made
        let_go(tokenizer)
        return make(hf_config, server_args, processor, *args, **kwargs)

    patches.replace("managers.tokenizer_manager:get_mm_processor", make_kept)


def _allow_deterministic(attention_backend: str) -> None:
    """Allow the CPU's attention backend for deterministic inference. It computes each sequence by itself."""
    from sglang.srt import server_args  # noqa: PLC0415

    server_args.add_deterministic_attention_backend_choices([attention_backend])
    server_args.add_radix_supported_deterministic_attention_backend_choices([attention_backend])
