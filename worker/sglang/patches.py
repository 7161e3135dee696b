"""The one list of everything in SGLang that this package replaces, wraps or subclasses.

Nothing of SGLang is changed elsewhere: every change goes through `replace` or `replace_on`, or subclasses what the list
names. A test reads the package's source and fails for a change that is not in `PATCHES`.

Each entry says what SGLang must still have for the change to mean what it meant. `check` compares that with the release
that is installed, when an engine starts and before anything is changed. All entries were compared with the sources of
0.5.17, 0.5.20 and 0.5.23. Differences between releases are found by attribute or signature, never by version number.

Not in the list: fields of requests and batches that SGLang means to be set (`req.to_finish`, `req.stream`), and the
stand-ins for `sgl_kernel` and for torchvision's operators on a host without a GPU (`worker/cpu_support.py`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

from ...messages.errors import EngineError

RELEASES = "0.5.17 to 0.5.23"
Part = Literal["worker", "scheduler", "cpu", "cpu seeds", "cpu experts", "cpu grammars"]
_SRT = "sglang.srt."


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of SGLang that this package changes.

    what: "module:attribute", the module without "sglang.srt.".
    by: what changes it, in this folder: a subclass of it, or the function or object that replaces it.
    part: where it is changed: in the worker's process, in every scheduler process, or in a scheduler on a CPU, and for
        which purpose.
    has: attributes that it must have, because they are overridden or called. takes: parameters that it must have.
    since: the first release that has it. Older ones are left alone. "" if all RELEASES have it.
    """

    what: str
    by: str
    why: str
    part: Part = "scheduler"
    has: str = ""
    takes: str = ""
    since: str = ""

    def find(self) -> Any:
        """Return the attribute as it is now, or None if this release does not have it.

        Raises EngineError unless it is as expected.
        """
        module, _, path = self.what.partition(":")
        try:
            found: Any = import_module(_SRT + module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            if self.since:
                return None
            raise EngineError(f"{self._name()} is not there ({error}); {self._expected()}") from error
        missing = [name for name in self.has.split() if getattr(found, name, None) is None]
        if missing:
            raise EngineError(f"{self._name()} has no {', '.join(missing)}; {self._expected()}")
        if self.takes:
            known = list(inspect.signature(found).parameters)
            missing = [name for name in self.takes.split() if name not in known]
            if missing:
                raise EngineError(
                    f"{self._name()} takes no {', '.join(missing)}, only {', '.join(known)}; {self._expected()}"
                )
        return found

    def _name(self) -> str:
        return f"SGLang {_release()}: {_SRT}{self.what.replace(':', '.')}"

    def _expected(self) -> str:
        form = f" with {self.has}" * bool(self.has) + f" taking ({self.takes})" * bool(self.takes)
        return f"expected is one{form}, as in {RELEASES}; {self.by} needs it to {self.why}"


PATCHES: tuple[Patch, ...] = (
    Patch(
        "managers.tokenizer_manager:TokenizerManager",
        part="worker",
        by="launch.Manager",
        why="leave the process's signals alone, report a failure instead of ending it, and give logprobs as a list",
        has="auto_create_handle_loop handle_loop add_logprob_to_meta_info generate_request abort_request",
    ),
    Patch(
        "entrypoints.engine:Engine",
        part="worker",
        by="launch.launch",
        why="start our scheduler and manager, no detokenizer, and end only the engine's own processes",
        has="init_tokenizer_manager_func run_scheduler_process_func _launch_detokenizer_subprocesses shutdown",
    ),
    Patch(
        "entrypoints.engine:configure_logger",
        part="worker",
        by="launch.launch",
        why="keep the root logger's handlers, which belong to the host program",
    ),
    Patch(
        "managers.tokenizer_manager:get_mm_processor",
        part="worker",
        by="launch.launch",
        why="keep the tokens of prompts with media, which SGLang would decode and encode anew",
    ),
    Patch(
        "sampling.custom_logit_processor:CustomLogitProcessor",
        part="worker",
        by="calls.ask.Marker",
        why="have the scheduler keep a request's extras beside its row of the batch",
        has="to_str",
    ),
    Patch(
        "managers.scheduler:Scheduler",
        by="inside.scheduler.install",
        why="update weights between batches, run errands, follow stops, grammars and streams, and cache prompts only",
        has="process_batch_result _add_request_to_queue init_request_dispatcher run_event_loop is_fully_idle "
        "process_input_requests",
    ),
    Patch(
        "managers.schedule_batch:Req.update_finish_state",
        by="inside.stops.watch",
        why="look for stops before SGLang's own check, in requests that have some, and for every end before an abort",
    ),
    Patch(
        "managers.schedule_batch:FINISH_MATCHED_STR",
        by="inside.stops",
        why="say which tokens and which text matched",
        has="to_json",
        takes="matched",
    ),
    *(
        Patch(
            f"sampling.penaltylib:Batched{kind}Penalizer",
            by="inside.penalties",
            why="count what earlier legs generated, and what a retracted request had",
            has="_prepare _is_required",
        )
        for kind in ("Frequency", "Presence", "Repetition", "MinNewTokens")
    ),
    Patch(
        "sampling.penaltylib:BatchedPenalizerOrchestrator.__init__",
        by="inside.penalties.install",
        why="apply penalties in one order, where SGLang takes the order of a set",
    ),
    *(
        Patch(
            f"sampling.{module}:apply_scaling_penalties",
            by="inside.penalties.install",
            why="run it uncompiled: all that runs would stand still for 10 s and more while it is compiled",
        )
        for module in ("penaltylib.repetition_penalty", "sampling_batch_info")
    ),
    Patch(
        "managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens",
        by="inside.penalties.install",
        why="take the newest tokens from the device, where overlap scheduling tells them one batch late",
    ),
    Patch(
        "layers.sampler:Sampler",
        by="inside.sampler.RequestSampler",
        why="run logit processors, change temperatures, and make logprobs after temperature",
        has="forward _preprocess_logits _sample_from_probs",
    ),
    Patch(
        "layers.logits_processor:LogitsMetadata",
        by="inside.prompt_logprobs.install",
        why="carry the sampling parameters to where the prompt's logprobs are made",
        has="from_forward_batch",
    ),
    Patch(
        "layers.logits_processor:InputLogprobProcessor",
        by="inside.prompt_logprobs.install",
        why="make a prompt's logprobs after temperature for the requests that ask for them",
        has="forward",
    ),
    Patch(
        "constrained.grammar_manager:GrammarManager.process_req_with_grammar",
        by="inside.grammar.Grammars",
        why="make the grammar backend, which SGLang makes only with a tokenizer of its own",
        takes="req",
    ),
    Patch(
        "constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask",
        by="inside.grammar",
        why="end a request at whose place no token may follow",
        takes="vocab_mask idx",
    ),
    Patch(
        "constrained.base_grammar_backend:BaseGrammarObject.accept_token",
        by="inside.grammar",
        why="end a request whose token does not follow its grammar",
        takes="token",
    ),
    Patch(
        "layers.attention.torch_native_backend:TorchNativeAttnBackend",
        part="cpu",
        by="inside.cpu.BatchedDecodeBackend",
        why="decode all sequences of a batch at once, and compute a token in the same way in every batch",
        has="_run_sdpa_forward_decode _run_sdpa_forward_extend",
    ),
    Patch(
        "batch_invariant_ops:enable_batch_invariant_mode",
        part="cpu seeds",
        by="inside.cpu.seeded_sampling",
        why="leave out kernels in Triton",
    ),
    Patch(
        "layers.sampler:murmur_hash32",
        part="cpu seeds",
        by="inside.cpu.murmur_hash32",
        why="draw by seeds without the operator of sgl_kernel",
    ),
    Patch(
        "layers.sampler:multinomial_with_seed",
        part="cpu seeds",
        by="inside.cpu.seeded_sampling",
        why="run it uncompiled: compiling takes longer at the start than it gives back",
    ),
    Patch(
        "state_capturer.base:ALLOC_MEMORY_FUNCS",
        part="cpu experts",
        by="inside.cpu.recorded_experts",
        why="record which experts tokens go to in memory that no GPU reaches",
        since="0.5.20",
    ),
    *(
        Patch(
            f"constrained.xgrammar_backend:XGrammarGrammar.{name}",
            part="cpu grammars",
            by="inside.cpu.grammar_masks",
            why="apply masks without a GPU, which older releases cannot",
            takes=takes,
        )
        for name, takes in (
            ("allocate_vocab_mask", "vocab_size batch_size device"),
            ("apply_vocab_mask", "logits vocab_mask"),
        )
    ),
)
_KNOWN = {patch.what: patch for patch in PATCHES}


def check(part: Part) -> None:
    """Compare what `part` changes with the release that is installed. Imports SGLang.

    Raises EngineError that names the attribute, the release, and what was expected.
    """
    for patch in PATCHES:
        if patch.part == part:
            patch.find()


def original(what: str) -> Any:
    """Return a listed attribute as it is now, or None if this release does not have it.

    Raises EngineError as `check`.
    """
    return _KNOWN[what].find()


def replace(what: str, value: Any) -> None:
    """Put `value` in the place of a listed attribute, in this process. Raises EngineError as `check` does."""
    patch = _KNOWN[what]
    if patch.find() is None:
        return
    module, _, path = what.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(_SRT + module)
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, value)


def replace_on(thing: Any, what: str, value: Any) -> None:
    """Put `value` in the place of a listed attribute of one object."""
    setattr(thing, _KNOWN[what].what.rpartition(".")[2], value)


def uncompiled(function: Any) -> Any:
    """Return what torch.compile was given, or `function` itself if it is not compiled."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _release() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "of no known release"
