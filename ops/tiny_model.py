"""A model small enough for any machine, with a tokenizer that takes any text, for trials, tests and benchmarks.

Its weights are random, so its answers mean nothing. Its speed and its exactness do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..messages.errors import ConfigError
from ..worker.cpu_support import prepare_transformers
from .files import save_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_model(
    directory: Path,
    *,
    layers: int = 2,
    width: int = 128,
    context: int = 4096,
    dtype: str = "bfloat16",
    tied: bool = False,
) -> None:
    """Write config, safetensors and tokenizer of a Qwen2 model whose tokens are bytes: 259 ids, padded to 320.

    layers, width: of the model. context: its longest sequence, in tokens. dtype: a torch dtype's name.
    tied: whether lm_head is the embeddings. Raises OSError if the folder cannot be written.
    """
    prepare_transformers()
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    ids = {"bos_token_id": vocabulary["<|endoftext|>"], "eos_token_id": vocabulary["<|im_end|>"]}
    more = ids | {"pad_token_id": vocabulary["<|endoftext|>"], "num_key_value_heads": 2, "tie_word_embeddings": tied}
    model = random_qwen2(0, 320, width, layers, max_position_embeddings=context, **more)
    save_model(model.to(getattr(torch, dtype)), directory)


def random_qwen2(seed: int, vocabulary: int, width: int, layers: int, **config: Any) -> Any:
    """A Qwen2ForCausalLM of four heads with random weights. vocabulary: how many ids. config: more of Qwen2Config."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return Qwen2ForCausalLM(Qwen2Config(**(shape | heads | config)))


def load_tiny_model(directory: Path | str) -> Any:
    """The model as a trainer uses it: transformers' Qwen2ForCausalLM in float32, on the CPU.

    It does what `AutoModelForCausalLM.from_pretrained` does, and also works where torch and torchvision are of
    different builds. Raises ConfigError if there is none: transformers would look for it on the hub.
    """
    if not Path(directory, "config.json").exists():
        raise ConfigError(f"{directory} has no model: `rolloutmq tiny-model {directory}` writes one")
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
