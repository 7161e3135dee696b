"""A tiny model that sees: Qwen2.5-VL's architecture with random weights, its processor and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolloutmq.worker.cpu_support import prepare_transformers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TEXT = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""The language model behind an encoder."""


def byte_tokenizer(special: Sequence[str], template: str) -> tuple[Any, dict[str, int]]:
    """A tokenizer of transformers with a token for each byte and each of `special`, and its vocabulary.

    "ab" is one token, too: the two tokens "a" and "b" are what nobody's encoding gives.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet, "ab"])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    plain.add_special_tokens([AddedToken(token, special=True) for token in special])
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special[1:]),
    )
    tokenizer.chat_template = template
    return tokenizer, vocabulary


def write_tiny_vision(path: Path, full_attention: tuple[int, ...] = (1,)) -> Any:
    """Write checkpoint and processor to `path`; returns the model in transformers, float32 with bfloat16 values.

    full_attention: the vision layers that attend beyond windows. There SGLang lets the frames of a video see each
    other, and transformers does not, so a comparison of videos needs ().
    """
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer, vocabulary = byte_tokenizer(SPECIAL, TEMPLATE)
    limits = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**limits),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**limits),
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    ids = {name: vocabulary[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    config = Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": list(full_attention),
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for the picture to matter to what is said
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
    model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    return model.float().eval()
