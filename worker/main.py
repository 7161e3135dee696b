"""A worker as a process: signals in, exit code out."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..messages import tracing
from ..messages.errors import ConfigError
from ..messages.hub import is_outage, is_unknown, look_up, was_fetched
from .commands import beside
from .config import WorkerConfig
from .engine import Engine
from .garbage import settle
from .sglang import SGLangConfig
from .text import ModelTokenizer, Tokenizer
from .worker import Worker

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)
COMPILED = {
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variables that say where something is kept that was compiled, and its folder's name below `cache_dir`."""


def run_worker(config: WorkerConfig, engine: SGLangConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second SIGINT ends it at once. Raises what Worker.run and
    check_model raise."""
    log.info("a worker of pool %s starts with model %s", config.pool, engine.model)
    keep_compiled(engine.cache_dir)
    check_model(engine.model)
    asyncio.run(_run(config, engine))


def check_model(model: str) -> None:
    """Raises ConfigError for a model that is neither here nor on the hub. SGLang would look for it for a minute and a
    half. What only SGLang can find (a URL, a name on ModelScope) is left to SGLang."""
    if Path(model).exists() or "://" in model or os.environ.get("SGLANG_USE_MODELSCOPE"):
        return
    answer = look_up(model)
    if is_unknown(answer):
        why = "the hub has no such model, or none for this user (HF_TOKEN says who that is)"
    elif is_outage(answer) and not was_fetched(model, "config.json"):
        why = f"the hub does not answer ({answer}), and nothing of that name was fetched from it before"
    else:
        return
    raise ConfigError(
        f"model={model!r}: there is no such folder or file, and {why}. Give a folder with the model, or its name on "
        "the hub; `rolloutmq tiny-model DIRECTORY` writes one for a trial"
    )


def keep_compiled(folder: str | None) -> None:
    """Have torch, SGLang and others keep what they compile below `folder`. A variable that is set already wins.

    Raises ConfigError if the folder cannot be made or written.
    """
    if folder is None:
        return
    at = Path(folder).expanduser().absolute()
    try:
        at.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=at):
            pass
    except OSError as error:
        raise ConfigError(f"cache_dir={folder!r}: it must be a folder that can be written: {error}") from None
    for variable, name in COMPILED.items():
        os.environ.setdefault(variable, str(at / name))


def exit_at_once() -> NoReturn:
    """End this process. Its worker must have left, and its engine must be closed.

    Python's own way out takes seconds under torch and SGLang, and a pod's grace period may not have them.
    """
    tracing.flush()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def with_metrics(
    config: WorkerConfig, engine: Engine, tokenizer: Tokenizer
) -> tuple[Worker, AbstractContextManager[object]]:
    """A worker, and what serves its metrics and probes inside a `with` block: nothing if `metrics_port` is None.

    Raises ConfigError if the port cannot be had, or prometheus_client is not installed.
    """
    worker = Worker(config, engine, tokenizer)
    if config.metrics_port is None:
        return worker, nullcontext()
    try:
        from .metrics import MetricsServer, worker_families  # noqa: PLC0415 – an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"metrics_port needs {error.name}: pip install 'rolloutmq[worker,metrics]'") from None
    vitals = worker.vitals
    probes = {"/live": lambda: vitals.live, "/ready": lambda: vitals.ready}

    def collect() -> Iterable[Metric]:
        return worker_families(vitals, time.monotonic())

    return worker, MetricsServer(config.metrics_host, config.metrics_port, collect, probes)


async def settled_once_up(worker: Worker) -> None:
    """For a process that does nothing but serve: see :mod:`.garbage`."""
    await worker.joined.wait()
    settle()


async def _run(config: WorkerConfig, engine: SGLangConfig) -> None:
    from .sglang.engine import SGLangEngine  # noqa: PLC0415 – seconds of imports, after the settings were checked

    worker, metrics = with_metrics(config, SGLangEngine(engine), ModelTokenizer(engine.model))
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        log.info("%s: draining, %g s at most; Ctrl-C ends it at once", signal.Signals(number).name, config.drain_s)
        worker.drain()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    with metrics:
        async with beside(settled_once_up(worker)):
            await worker.run()
