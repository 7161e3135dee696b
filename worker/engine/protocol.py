"""What a worker needs from an inference engine: one small protocol, two implementations.

`SGLangEngine` is the real one; `ScriptedEngine` answers from a hash and stands in where the broker is what is being
examined. A request is one sample: prompt in, tokens out. Groups, legs and versions are the worker's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.model import LogitProcessor, LogprobOptions, Medium, SamplingParams
from ...sync.transfer import TransferOrder, TransferReport
from .loaded_adapters import LoadedAdapters
from .tasks import TaskOutput, TaskRequest

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

FinishReason = Literal["stop", "length", "abort"]
MatchedStop = int | str | tuple[int, ...]

_SAMPLED = LogprobOptions()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for beyond tokens and their logprobs; the defaults cost nothing.

    logprobs, hidden_states, routed_experts, logit_processors: as GenerateJob has them. prompt: whether what concerns
        the prompt is still to be delivered; later legs of a sample have it already.
    seed: of this sample, the same in all its legs; None draws freely.
    stream: the engine keeps `progress` up to date with every token.
    """

    logprobs: LogprobOptions = _SAMPLED
    hidden_states: Literal["none", "last", "all"] = "none"
    routed_experts: bool = False
    logit_processors: tuple[LogitProcessor, ...] = ()
    prompt: bool = True
    seed: int | None = None
    stream: bool = False


NOTHING_MORE = Wanted()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate.

    request_id: unique among running requests and of one fixed length (SGLang matches aborts by prefix).
    token_ids: (prompt_len,) int32, the prompt followed by what earlier legs of the same sample generated.
    sampling: as the job has it, except that max_new_tokens below replaces its own.
    max_new_tokens: how many tokens this leg may still generate, >= 1.
    cache_key: the weights version as text, with an adapter followed by "/<name>@<version>"; prefixes are only ever
        reused between requests of the same key.
    adapter, adapter_version: the LoRA adapter to run it with, "" and 0 for the model alone.
    generated: so many of token_ids, at their end, are not prompt but what earlier legs generated: stops, penalties,
        grammars and least lengths are about them, too.
    wanted: what else it asks for.
    media: of the prompt, all with their bytes. `generated` is then 0: SGLang reads such a prompt as text once more,
        which what was generated might not survive, so a sample with media starts over when it is interrupted.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_new_tokens: int
    cache_key: str
    adapter: str = ""
    adapter_version: int = 0
    generated: int = 0
    wanted: Wanted = NOTHING_MORE
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one request generated before it finished or was aborted.

    token_ids: (n,) int32, generated tokens only, the stop token included if one was hit.
    logprobs: (n,) float32, natural log of the probability each token was sampled with, under the weights that
        sampled it: with logit bias and penalties, before temperature and truncation.
    finish_reason: "abort" means the tokens are a valid prefix of a sample that can be continued.
    matched_stop: what ended it, as RolloutResult has it, or None.
    stop_tokens: how many of the sample's last tokens (those of earlier legs counted in) have a part of what was
        matched; 0 if nothing was. stop_text: from where the match begins to the end of them; "" without a text.
    token_arrays, arrays: what was wanted, named as in RolloutResult; one row for each token in the first.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    matched_stop: MatchedStop | None = None
    stop_tokens: int = 0
    stop_text: str = ""
    cached_tokens: int = 0
    token_arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a running request has generated so far: (n,) int32 token_ids, (n,) float32 logprobs as in EngineOutput.

    token_arrays: as there; all that were wanted, a row for each token. An engine that cannot tell them in between
    reports no progress for a request that wants them.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    token_arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is: enough to size the worker, check a job against, and replay a result later.

    context_length: most tokens of prompt and output together.
    gpu: unique id of the GPU, for an engine that runs on exactly one.
    features: optional job fields this engine honours; a job that uses another one is refused by name.
    adapters: the LoRA adapters it has, kept by the worker: changes as they come and go, empty after a start.
    """

    name: str
    version: str
    model: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    tp_size: int = 1
    ep_size: int = 1
    gpu: str = ""
    features: frozenset[str] = field(default_factory=frozenset)
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters, compare=False, repr=False)

    def fingerprint(self) -> Mapping[str, str]:
        """What a replay needs to know, small enough to travel with every result."""
        return {
            "engine": f"{self.name}-{self.version}",
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
        }


class Engine(Protocol):
    """An inference engine. All methods are called from one event loop.

    What a worker awaits raises EngineDead if the engine dies meanwhile, and EngineError if it does not answer or fails
    at something that it need not fail at again. A transfer that fails raises nothing: the report says what happened,
    and whether the engine has a whole version.
    """

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

        Raises RequestRefused if this request can never run here.
        """
        ...

    async def perform(self, request: TaskRequest) -> TaskOutput:
        """Run one input of a job that generates nothing; an abort gives an output that is not finished.

        Raises RequestRefused as `generate` does, and for a task that is not among `info.features`.
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

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        """The first half of an update, while requests run: take part in the transfer `order`.

        The report's phase is "staged" if the version is here and verified, or "ready" if it will be received by
        `commit_weights`. The old weights stay whole.
        """
        ...

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        """The second half: load what was prepared, verified. No request may be running, but with order.mode "in_place".

        In place, `report.switched` tells for every request that was running how many of its tokens the old weights
        sampled.
        """
        ...

    async def send_weights(self, order: TransferOrder) -> TransferReport:
        """Send the version that was loaded last, bit by bit as the trainer sent it, to the group of `order`, as rank 0.

        Requests run meanwhile; neither half of an update may. The report also says if this engine cannot send.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Have one version of a LoRA adapter ready for requests, beside its other versions, while requests run."""
        ...

    async def unload_adapter(self, name: str, version: int) -> None:
        """Give up one version that no request uses. Raises EngineError if one does, at once: try again later."""
        ...

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """One of an engine's rarer duties, which most engines have only some of; plain data in and out.

        "flush_cache": {} forgets cached prefixes; no request may be running. "clear_storage": {} empties the storage of
            a hierarchical cache. "freeze", "thaw": {} stop before the next forward pass, requests and KV as they are.
        "sleep", "wake": {tags} see sleep_states.py; no request may be running, but for a sleep without tags, which does
            nothing but say whether it can. Wake answers {intact} about weights.
        "audit": {version, names} looks at the parameters, see docs/control.md. "export": {path, version} writes them as
            a version of a SnapshotStore, "save_sharded": {path, version} in the engine's own form. The last two keep
            the caller's promise that no version is loaded meanwhile; requests may run.
        "check_sharded", "load_sharded": {path} reads that form; no request may be running for the latter, and an error
            of it leaves weights that are no version.
        "start_profile": {folder, activities, steps}, "stop_profile": {}.

        Raises RequestRefused, with the reason, for what this engine cannot do as it is configured.
        """
        ...

    async def healthy(self) -> bool:
        """False once the engine's processes are gone."""
        ...

    async def close(self) -> None:
        """Stop every process the engine started; safe to call twice."""
        ...
