"""Imported by the process that engines and workers are forked from; see :mod:`.forking`."""

from __future__ import annotations

import gc
import logging

import rolloutmq.ops.cli
import rolloutmq.worker.main
import rolloutmq.worker.sglang.compat
import rolloutmq.worker.sglang.engine
import torch._dynamo
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

from .forking import forward_sigquit

logging.root.handlers.clear()  # some import sets one, and a program that sets its own would be too late
forward_sigquit()
gc.freeze()
