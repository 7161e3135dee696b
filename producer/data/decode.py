"""Token ids to text in the trainer's process. No worker is asked.

It needs the small library `tokenizers` (`pip install 'rolloutmq[text]'`) or transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import ConfigError, InvalidField
from ...messages.hub import is_outage, look_up
from ...messages.model import RolloutResult

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


class Decoder:
    """The tokenizer of one model. It is loaded at the first use.

    model: the model's folder, a tokenizer.json, or a name on the hub.
    """

    def __init__(self, model: str | Path) -> None:
        self._model = str(model)
        self._tokenizer: Any = None

    def decode(self, token_ids: Ids | RolloutResult, *, special: bool = False) -> str:
        """The text of token ids, or of a result's generated tokens. special: keep special tokens.

        An id that the tokenizer does not know has no text. Raises ConfigError if neither library is installed or there
        is no tokenizer, and InvalidField for other values than ids.
        """
        return self.decode_many([token_ids], special=special)[0]

    def decode_many(self, sequences: Iterable[Ids | RolloutResult], *, special: bool = False) -> list[str]:
        """The texts of several sequences, in order."""
        ids = [_ids(one) for one in sequences]
        if self._tokenizer is None:
            self._tokenizer = _load(self._model)
        return [str(self._tokenizer.decode(one, skip_special_tokens=not special)) for one in ids]


def _ids(given: Ids | RolloutResult) -> list[int]:
    array = np.asarray(given.token_ids if isinstance(given, RolloutResult) else given)
    if array.ndim != 1 or (
        array.size and (array.dtype.kind not in "iu" or not 0 <= array.min() <= array.max() < 1 << 31)
    ):
        raise InvalidField("token_ids", given, "a flat sequence of token ids, whole numbers from 0 to 2147483647")
    return [int(one) for one in array]


def _load(model: str) -> Any:
    path = Path(model)
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise ConfigError(f"no tokenizer could be loaded from {model}: it is neither a folder nor a file")
    answer = None if path.exists() else look_up(model)
    unreachable = is_outage(answer)
    try:
        return _read(model, path, offline=unreachable)
    except ImportError:
        raise ConfigError(
            f"decoding needs the library tokenizers (pip install 'rolloutmq[text]'), or transformers for {model}, "
            "and neither is installed"
        ) from None
    except Exception as error:  # the libraries raise what they like
        why = str(error)
        if unreachable:
            why = f"the hub does not answer ({answer}), and nothing of that name was fetched from it before"
        if not path.exists():
            why = (
                f"there is no such folder or file, and {why.rstrip('.')}. Give the model's folder or its tokenizer.json"
            )
        raise ConfigError(f"no tokenizer could be loaded from {model}: {why}") from error


def _read(model: str, path: Path, *, offline: bool) -> Any:
    """The tokenizer. offline: only what was fetched from the hub before. Raises ImportError if no library reads it."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_dir() or file.exists():
        try:
            library = importlib.import_module("tokenizers").Tokenizer
        except ImportError:
            pass  # a very old transformers works without it
        else:
            if not file.exists():
                hub = importlib.import_module("huggingface_hub")
                file = hub.hf_hub_download(model, "tokenizer.json", local_files_only=offline)
            return library.from_file(str(file))
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(model, local_files_only=offline)
