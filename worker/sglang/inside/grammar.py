"""Structured output on SGLang without SGLang's tokenizer: json_schema, regex and ebnf.

SGLang makes its grammar backend only if it has a tokenizer of its own. Here the backend is made with the engine's
tokenizer, in the background after the start. Compiled grammars, masks and the steps of each request stay SGLang's work.
The grammar of a later leg first accepts what earlier legs generated.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any
from weakref import ref

from ....messages.model import GRAMMARS
from .. import patches
from ..wire import GRAMMAR, extras_of, generated_before
from .stops import abort
from .tokenizer import EngineTokenizer, background

logger = logging.getLogger(__name__)
_ATTRIBUTE = "rolloutmq_grammar"


class Grammars:
    """One scheduler's grammars. Makes the backend, and advances each grammar over what its sample has generated."""

    def __init__(self, scheduler: Any, tokenizer: EngineTokenizer) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._backend: Future[Any] | None = None
        manager = scheduler.grammar_manager
        process = manager.process_req_with_grammar

        def process_with_backend(req: Any) -> Any:
            if manager.grammar_backend is None and any(getattr(req.sampling_params, name) for name in GRAMMARS):
                manager.grammar_backend = self._made()
            return process(req)

        patches.replace_on(
            manager, "constrained.grammar_manager:GrammarManager.process_req_with_grammar", process_with_backend
        )

    def make(self) -> None:
        """Begin to make the backend. It takes half a second of a core for a vocabulary of 150,000."""
        self._backend = background(self._make)

    def _make(self) -> Any:
        from sglang.srt.constrained import base_grammar_backend  # noqa: PLC0415 – only in a scheduler process

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
            from .cpu import grammar_masks  # noqa: PLC0415 – imports SGLang's parts for a CPU

            grammar_masks()
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
        """Have the grammar of a request (`Req`) that is about to wait accept what earlier legs generated, once."""
        if req.grammar is None or hasattr(req, _ATTRIBUTE):
            return
        setattr(req, _ATTRIBUTE, True)
        if not req.eos_token_ids:  # without any, SGLang would notice a grammar's end one token late
            req.eos_token_ids = {self._tokenizer.get().eos_token_id} - {None}
        try:
            for token in generated_before(req) if extras_of(req).get(GRAMMAR) else ():
                req.grammar.accept_token(int(token))
        except ValueError as error:
            req.set_finish_with_abort(f"Grammar: what was generated before does not follow it: {error}")
        else:
            _guard(req)


def _guard(req: Any) -> None:
    """End a request whose grammar allows no token, or that draws a token which the grammar does not allow.

    A grammar can reach a state where nothing may follow, not even the end (`root ::= root`). SGLang would draw from
    probabilities that are no distribution, which ends its process. If logit processors forbid what a grammar allows,
    SGLang draws another token, and reports an abort without a reason, or an error of its own.
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

    patches.replace_on(req.grammar, "constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask", fill_or_end)
    patches.replace_on(req.grammar, "constrained.base_grammar_backend:BaseGrammarObject.accept_token", accept_or_end)


def nothing_left(mask: Any, vocab_size: int) -> bool:
    """Whether `mask` allows no token. mask: (ceil(vocab_size / 32),) int32, a bit for each token, lowest first."""
    whole, rest = divmod(vocab_size, 32)
    return not bool(mask[:whole].any()) and not (rest and int(mask[whole]) & ((1 << rest) - 1))
