"""Log-probabilities of recorded tokens by a plain forward pass of transformers. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....messages.errors import ConfigError, InvalidField, WeightSyncError
from ....messages.model import GenerateJob
from ....worker.cpu_support import prepare_transformers
from .. import Settings

prepare_transformers()
import torch  # noqa: E402

LOGITS_BYTES = 1 << 30
"""Of the logits that exist at once, in float32."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Log-probabilities of tokens `start` to `end` (not included) of a sample.

    prompt: (p,) int32. tokens: (t,) int32, all of the sample. job: says what changes the logits. cache: keys and values
    of everything before the token `start - 1`, by whichever weights; None to compute them anew.
    """

    prompt: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    start: int
    end: int
    job: GenerateJob
    scaled: bool = False
    cache: Any = None

    @property
    def fed(self) -> npt.NDArray[np.int32]:
        """What goes through the model. The logits of its last `end - start` places are of the tokens asked for."""
        before = self.prompt.size + self.start - 1 if self.cache is not None else 0
        return np.concatenate([self.prompt, self.tokens])[before : self.prompt.size + self.end - 1]


class Forward:
    """A version's weights in transformers.

    path: the version's folder of safetensors. settings: dtype and device, as torch names them, and the base model,
    whose configuration is taken if `path` has none.
    Raises InvalidField for a dtype that torch lacks, and WeightSyncError if transformers cannot load the folder, or
    tensors of the model are missing in it.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415

        kind = getattr(torch, settings.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise InvalidField("dtype", settings.dtype, "a torch dtype such as float32 or bfloat16")
        try:
            config = AutoConfig.from_pretrained(path if (path / "config.json").exists() else settings.model)
            model, told = AutoModelForCausalLM.from_pretrained(
                path, config=config, generation_config=GenerationConfig(), dtype=kind, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise WeightSyncError(f"transformers cannot load {path}: {error}") from error
        if missing := sorted(told["missing_keys"]):
            raise WeightSyncError(f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
        self._model = model.eval().to(settings.device)
        self._device = settings.device

    @contextmanager
    def adapted(self, folder: Path) -> Iterator[None]:
        """With a LoRA adapter from a folder of peft's. Raises ConfigError without peft, WeightSyncError."""
        try:
            from peft import PeftModel  # noqa: PLC0415
        except ModuleNotFoundError:
            raise ConfigError("samples of LoRA adapters need peft: pip install 'peft>=0.18'") from None
        plain = self._model
        try:
            self._model = PeftModel.from_pretrained(plain, folder).eval()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise WeightSyncError(f"peft cannot load {folder}: {error}") from error
        try:
            yield
        finally:
            self._model = self._model.unload()

    def logprobs(self, asks: Sequence[Ask]) -> list[npt.NDArray[np.float32]]:
        """(end - start,) of each. They go through the model together, padded on the right, where causal attention
        does not look. Those with a cache of their own have to be asked alone; see `continued`."""
        with torch.no_grad():
            return self._through(asks, keep=False)[0]

    def continued(self, ask: Ask) -> tuple[npt.NDArray[np.float32], Any]:
        """One of them, and the cache for the piece behind it, which may be of other weights."""
        with torch.no_grad():
            (found,), cache = self._through([ask], keep=True)
        return found, cache

    def _through(self, asks: Sequence[Ask], keep: bool) -> tuple[list[npt.NDArray[np.float32]], Any]:
        fed = [ask.fed for ask in asks]
        width, cache = max(map(len, fed)), asks[0].cache
        ids = torch.zeros((len(asks), width), dtype=torch.int64)
        for row, one in enumerate(fed):
            ids[row, : len(one)] = torch.from_numpy(one.astype(np.int64))
        ids = ids.to(self._device)
        begins = [len(one) - (ask.end - ask.start) for one, ask in zip(fed, asks, strict=True)]
        found: list[list[npt.NDArray[np.float32]]] = [[] for _ in asks]
        step = max(1, LOGITS_BYTES // (4 * len(asks) * int(self._model.config.get_text_config().vocab_size)))
        place, first = 0, min(begins)
        while place < width:
            upto = min(width, max(place, first) + step)
            wanted = upto - max(place, first)
            told = self._model(
                input_ids=ids[:, place:upto], past_key_values=cache, use_cache=keep or upto < width or place > 0,
                logits_to_keep=wanted,
            )  # fmt: skip
            cache = told.past_key_values
            for row, ask in enumerate(asks):
                low, high = max(begins[row], upto - wanted), min(len(fed[row]), upto)
                if low < high:
                    logits = told.logits[row, low - (upto - wanted) : high - (upto - wanted)].float()
                    found[row].append(_of_tokens(logits, ask, ask.start + low - begins[row]))
            place = upto
        return [np.concatenate(parts) for parts in found], cache


def _of_tokens(logits: torch.Tensor, ask: Ask, first: int) -> npt.NDArray[np.float32]:
    """logits: (n, vocabulary), of the n tokens from `first` on; changed in place."""
    _change(logits, ask, first)
    tokens = torch.from_numpy(ask.tokens[first : first + len(logits)].astype(np.int64)).to(logits.device)
    chosen = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, -1)
    return np.asarray(chosen.cpu().numpy(), np.float32)


def _change(logits: torch.Tensor, ask: Ask, first: int) -> None:
    """Penalties, bias and temperature, in the engine's order. Penalties see the sample's tokens, not the prompt's."""
    sampling = ask.job.sampling
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    if (frequency, presence, sampling.repetition_penalty) != (0.0, 0.0, 1.0):
        for row in range(len(logits)):
            before, counts = np.unique(ask.tokens[: first + row], return_counts=True)
            seen = torch.from_numpy(before.astype(np.int64)).to(logits.device)
            times = torch.from_numpy(counts.astype(np.float32)).to(logits.device)
            values = logits[row, seen] - frequency * times - presence
            by = sampling.repetition_penalty
            logits[row, seen] = torch.where(values < 0, values * by, values / by)
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[:, biased] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
    if ask.scaled and sampling.temperature > 0:
        logits /= sampling.temperature
