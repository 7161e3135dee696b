"""SGLang's own HTTP server, to compare with."""

from __future__ import annotations

import socket
from typing import Any

from rolloutmq.ops.flags import as_config
from rolloutmq.worker.cpu_support import gpu_found, prepare_engine
from rolloutmq.worker.sglang import SGLangConfig
from rolloutmq.worker.sglang.config import server_arguments

prepare_engine()  # SGLang's own processes import this module first


def sglang_server(given: dict[str, Any]) -> None:
    """SGLang's own server with the arguments that the worker gives its engine. It prints its port."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = server_arguments(as_config(SGLangConfig, **given), "cuda" if gpu_found() else "cpu", "")
    del arguments["custom_weight_loader"]
    launch_server(
        ServerArgs(**arguments, port=port),
        run_scheduler_process_func=_scheduler,
        run_detokenizer_process_func=_detokenizer,
        launch_callback=lambda: print(port, flush=True),
    )


def _scheduler(*given: Any, **named: Any) -> None:
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*given, **named)


def _detokenizer(*given: Any, **named: Any) -> None:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*given, **named)
