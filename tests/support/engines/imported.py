"""Imported by the process that engines and workers are forked from; see :mod:`.forking`."""

from __future__ import annotations

import gc
import importlib
import logging

from support.engines.forking import forward_sigquit

for _name in (
    "rolloutmq.worker.sglang.launch",  # before transformers, which it prepares
    "rolloutmq.ops.cli",
    "rolloutmq.worker.main",
    "rolloutmq.worker.sglang.engine",
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
):
    importlib.import_module(_name)
logging.root.handlers.clear()  # some import adds one, and then a program that sets its own would be too late
forward_sigquit()
gc.freeze()
