"""Structured output on SGLang without SGLang's tokenizer: json_schema, regex and ebnf.

SGLang makes its grammar backend only where it has a tokenizer of its own. Here it is made with the engine's, in the
background after the start, and compiled grammars, masks and the steps of each request are SGLang's affair as always. A
leg that goes on where others stopped has its grammar go through what they generated first.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any
from weakref import ref

from ....messages.errors import RequestRefused
from ....messages.model import GRAMMARS
from ...engine import EngineInfo, EngineRequest
from ..extras import abort, extras_of, generated_before
from .tokenizer import EngineTokenizer, background

logger = logging.getLogger(__name__)
GRAMMAR = "grammar"
_ATTRIBUTE = "rolloutmq_grammar"


def given(request: EngineRequest) -> str | None:
    """The name of the sampling parameter that is a grammar."""
    return next((name for name in GRAMMARS if getattr(request.sampling, name) is not None), None)


def native(request: EngineRequest) -> dict[str, Any]:
    """SGLang's own sampling parameters for it. A grammar says itself where the sample ends: EOS is not ignored."""
    name = given(request)
    return {} if name is None else {name: getattr(request.sampling, name), "ignore_eos": False}


def told(request: EngineRequest) -> dict[str, Any]:
    """A part of the request's extras, for the scheduler's process."""
    return {GRAMMAR: True} if request.generated and given(request) is not None else {}


def check(request: EngineRequest, info: EngineInfo) -> None:
    """Raises RequestRefused for a grammar where there is no backend."""
    name = given(request)
    if name is not None and f"sampling.{name}" not in info.features:
        raise RequestRefused(f"sampling.{name}: this engine has no tokenizer, which a grammar needs")


def refusal(request: EngineRequest, message: str) -> str:
    """SGLang's reason for refusing a request, with the name of the field that it is about, where that is a grammar."""
    name = given(request)
    message = message.strip()
    return f"sampling.{name}: {message}" if name is not None and "grammar" in message.lower() else message


class Grammars:
    """In the scheduler: makes the backend, and brings grammars to where their samples are."""

    def __init__(self, scheduler: Any, tokenizer: EngineTokenizer) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._backend: Future[Any] | None = None
        manager = scheduler.grammar_manager
        process = manager.process_req_with_grammar

        def process_with_backend(req: Any) -> Any:
            if manager.grammar_backend is None and any(getattr(req.sampling_params, name) for name in GRAMMARS):
                manager.grammar_backend = self._made()
            return process(req)

        manager.process_req_with_grammar = process_with_backend

    def make(self) -> None:
        """Begin to make the backend: about half a second of a core for a vocabulary of 150,000."""
        self._backend = background(self._make)

    def _make(self) -> Any:
        from sglang.srt.constrained import base_grammar_backend  # noqa: PLC0415  (only in a scheduler process)

        scheduler = self._scheduler
        began, config = time.monotonic(), scheduler.model_config
        backend = base_grammar_backend.create_grammar_backend(
            scheduler.server_args,
            self._tokenizer.get(),
            config.vocab_size,
            config.hf_eos_token_id,
            think_end_ids=getattr(config, "think_end_ids", None),
        )
        if str(scheduler.device) == "cpu":
            _mask_on_cpu()
        logger.info("grammar backend made in %.2f s", time.monotonic() - began)
        return backend

    def _made(self) -> Any:
        assert self._backend is not None
        try:
            return self._backend.result()
        except Exception:
            logger.exception("the grammar backend could not be made")
            return None  # SGLang then refuses the request

    def catch_up(self, req: Any) -> None:
        """A request (`Req`) that is about to wait: its grammar goes through what earlier legs generated, once."""
        if req.grammar is None or hasattr(req, _ATTRIBUTE):
            return
        setattr(req, _ATTRIBUTE, True)
        if not req.eos_token_ids:  # else a grammar's end is noticed one token late
            req.eos_token_ids = {self._tokenizer.get().eos_token_id} - {None}
        try:
            for token in generated_before(req) if extras_of(req).get(GRAMMAR) else ():
                req.grammar.accept_token(int(token))
        except ValueError as error:
            req.set_finish_with_abort(f"Grammar: what was generated before does not follow it: {error}")
        else:
            _guard(req)


def _guard(req: Any) -> None:
    """Refuse a request that comes to where no token may be drawn.

    A grammar can come to where nothing may follow, not even the end (`root ::= root`): SGLang would draw from
    probabilities that are none, which ends its process. Where logit processors forbid what a grammar allows, it draws a
    token that does not follow, and calls that an abort without a reason, or an error of its own.
    """
    fill, accept = req.grammar.fill_vocab_mask, req.grammar.accept_token
    owner, vocab_size = ref(req), int(req.vocab_size)

    def end(message: str) -> None:
        if (found := owner()) is not None and not found.to_finish:
            found.to_finish = abort(f"Grammar: {message}")

    def fill_or_end(vocab_mask: Any, row: int) -> None:
        fill(vocab_mask, row)
        if nothing_left(vocab_mask[row], vocab_size):
            vocab_mask[row].fill_(-1)
            end("it comes to where no token may follow, not even the last")

    def accept_or_end(token: int) -> None:
        try:
            accept(token)
        except ValueError as error:
            end(f"no token that follows it was left: {error}")

    req.grammar.fill_vocab_mask, req.grammar.accept_token = fill_or_end, accept_or_end


def nothing_left(mask: Any, vocab_size: int) -> bool:
    """Whether `mask` (ceil(vocab_size / 32) int32, a bit for each token, the lowest first) allows no token."""
    whole, rest = divmod(vocab_size, 32)
    return not bool(mask[:whole].any()) and not (rest and int(mask[whole]) & ((1 << rest) - 1))


def _mask_on_cpu() -> None:
    """Masks that need no GPU; older releases know only of those that do."""
    import xgrammar  # noqa: PLC0415
    from sglang.srt.constrained import xgrammar_backend  # noqa: PLC0415

    def allocate(self: Any, vocab_size: int, batch_size: int, device: Any) -> Any:
        return xgrammar.allocate_token_bitmask(batch_size, vocab_size)

    def apply(logits: Any, vocab_mask: Any) -> None:
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    xgrammar_backend.XGrammarGrammar.allocate_vocab_mask = allocate
    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = staticmethod(apply)
