"""A Qwen2-shaped model and its tokenizer, small enough to be trained and served on two cores, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...worker.cpu_support import prepare_transformers
from .task import BOS, EOS, PAD, UNK, VOCABULARY

WIDTH, LAYERS, HEADS = 64, 2, 4
CONTEXT = 128


def make_model(seed: int) -> Any:
    """A transformers Qwen2ForCausalLM with random float32 weights, about 134 thousand parameters, untied embeddings."""
    prepare_transformers()
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 – seconds of imports

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def make_tokenizer() -> Any:
    """A fast tokenizer of one token per character; encoding adds `<bos>`."""
    prepare_transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=VOCABULARY[UNK]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{VOCABULARY[BOS]} $A", special_tokens=[(VOCABULARY[BOS], BOS)]
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        unk_token=VOCABULARY[UNK],
        model_max_length=CONTEXT,
    )


def save_checkpoint(model: Any, directory: Path) -> None:
    """Model and tokenizer as SGLang and AutoTokenizer load them."""
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # one file of half a megabyte
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def token_logprobs(model: Any, sequences: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, natural and at temperature 1, of every token given those before it.

    sequences: (b, t) int64, right-padded. Returns (b, t - 1) float32; column i belongs to token i + 1. Padding on the
    right needs no mask: attention is causal.
    """
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits.float()
    picked = sequences[:, 1:].unsqueeze(-1)
    return torch.log_softmax(logits, -1).gather(-1, picked).squeeze(-1)
