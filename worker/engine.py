"""What a worker needs from an inference engine: one small protocol, two implementations.

`SGLangEngine` is the real one; `ScriptedEngine` answers from a hash and stands in where the broker is what is being
examined. A request is one sample: prompt in, tokens out. Groups, legs and versions are the worker's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..messages.jobs import SamplingParams
from ..sync.transfer import TransferOrder, TransferReport

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate.

    request_id: unique among running requests and of one fixed length (SGLang matches aborts by prefix).
    token_ids: (prompt_len,) int32, the prompt followed by what earlier legs of the same sample generated.
    sampling: as the job has it, except that max_new_tokens below replaces its own.
    max_new_tokens: how many tokens this leg may still generate, >= 1.
    cache_key: the weights version as text; prefixes are only ever reused between requests of the same key.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_new_tokens: int
    cache_key: str


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one request generated before it finished or was aborted.

    token_ids: (n,) int32, generated tokens only, the stop token included if one was hit.
    logprobs: (n,) float32, natural log of the probability each token was sampled with, under the weights that
        sampled it: with logit bias and penalties, before temperature and truncation.
    finish_reason: "abort" means the tokens are a valid prefix of a sample that can be continued.
    matched_stop: the stop token id that ended it, or None.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    matched_stop: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a running request has generated so far: (n,) int32 token_ids, (n,) float32 logprobs as in EngineOutput."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is: enough to size the worker, check a job against, and replay a result later.

    context_length: most tokens of prompt and output together.
    features: optional job fields this engine honours; a job that uses another one is refused by name.
    """

    name: str
    version: str
    model: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    tp_size: int = 1
    features: frozenset[str] = field(default_factory=frozenset)

    def fingerprint(self) -> Mapping[str, str]:
        """What a replay needs to know, small enough to travel with every result."""
        return {
            "engine": f"{self.name}-{self.version}",
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
        }


class Engine(Protocol):
    """An inference engine. All methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    async def start(self) -> None:
        """Bring the engine up with its base weights; after `close` or `EngineDead` it may be called again.

        Must not block the event loop: leases are renewed while an engine restarts. Raises EngineError.
        """
        ...

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Run one request to its end or its abort.

        Raises RequestRefused if this request can never run here, EngineDead if the engine dies meanwhile, and another
        EngineError for a failure that the same request need not meet again.
        """
        ...

    def progress(self, request_id: str, start: int = 0) -> Progress | None:
        """What a running request has generated so far, from token `start` on, a little behind perhaps; None if unknown.

        Costs nothing but the copy: the engine is not asked, and streams nothing for it.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ask one running request to return what it has; unknown ids are ignored."""
        ...

    def abort_all(self) -> None:
        """Ask every running request to return what it has."""
        ...

    async def load_weights(self, order: TransferOrder) -> TransferReport:
        """Receive one weights version as `order` says, verify it, load it. No request may be running.

        Never raises for a failed transfer: the report says what happened and whether the old weights are intact.
        Raises EngineDead if the engine dies meanwhile.
        """
        ...

    async def healthy(self) -> bool:
        """False once the engine's processes are gone."""
        ...

    async def close(self) -> None:
        """Stop every process the engine started; safe to call twice."""
        ...
