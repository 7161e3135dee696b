"""A tiny model that hears: Qwen2-Audio's architecture with random weights, its processor and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.specimens.tiny_vision import TEXT, byte_tokenizer

from rolloutmq.worker.cpu_support import prepare_transformers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEL_BINS = 128


def write_tiny_audio(path: Path) -> Any:
    """Write checkpoint and processor to `path`; returns the model in transformers, float32 with bfloat16 values."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer, vocabulary = byte_tokenizer(SPECIAL, TEMPLATE)
    Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS), tokenizer=tokenizer, chat_template=TEMPLATE
    ).save_pretrained(path)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 1500,
        },
        text_config=TEXT | {"model_type": "qwen2"},
        audio_token_index=vocabulary["<|AUDIO|>"],
    )
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # large enough for the sound to matter to what is said
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.normal_(0.0, 0.08)
    model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    # Published checkpoints, and SGLang, have other names than what transformers writes now.
    tensors = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return model.float().eval()
