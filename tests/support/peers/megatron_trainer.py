"""What test_megatron_package.py runs under torchrun: Megatron-Core's own GPTModel on two ranks, which publishes.

    torchrun ... megatron_trainer.py <folder> <redis url> <qwen2 or qwen3>

Rank 0 leaves the model's own logits for TOKENS in logits.pt. Megatron wants a GPU for random states and positions
alone, and is given a CPU there.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron_weights.py"
RANKS, VOCABULARY, PADDED = 2, 300, 320
TOKENS = [*range(5, 45, 2)]
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 24, "intermediate_size": 128, "layers": 2}


def gpt_model(kind: str) -> Any:
    """Qwen2 has biases of queries, keys and values, and here a tied head; Qwen3 has norms of queries and keys."""
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415

    parallel_state.initialize_model_parallel(RANKS)
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    config = TransformerConfig(
        num_layers=SHAPE["layers"],
        hidden_size=SHAPE["hidden_size"],
        num_attention_heads=SHAPE["num_attention_heads"],
        num_query_groups=2,
        kv_channels=SHAPE["head_dim"],
        ffn_hidden_size=SHAPE["intermediate_size"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind == "qwen3",
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=RANKS,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=kind == "qwen3", normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=kind == "qwen2",
    ).eval()


def noise(model: Any) -> None:
    """No tensor stays what it begins with: biases are zeros, norms ones."""
    for index, parameter in enumerate(model.parameters()):
        rank = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
        made = torch.Generator().manual_seed(index * RANKS + rank)
        parameter.data.add_(torch.randn(parameter.shape, generator=made), alpha=0.1)


def logits(model: Any) -> torch.Tensor:
    """(tokens, vocabulary), of both ranks."""
    count = len(TOKENS)
    mask = torch.ones(count, count).triu(1).bool()[None, None]
    own = model(torch.tensor([TOKENS]), torch.arange(count)[None], mask)[0].contiguous()
    shares = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(shares, own)
    return torch.cat(shares, -1)[:, :VOCABULARY]


def main(folder: Path, url: str, kind: str) -> None:
    from rolloutmq import WeightPublisher  # noqa: PLC0415

    dist.init_process_group("gloo")
    model = gpt_model(kind)
    with torch.no_grad():
        noise(model)
        found = logits(model)
    if dist.get_rank() == 0:
        torch.save(found, folder / "logits.pt")
    hf_weights = runpy.run_path(str(EXAMPLE))["hf_weights"]
    with WeightPublisher(url) as publisher:
        report = publisher.publish(1, hf_weights(model, VOCABULARY)).wait(60)
        assert report.state == ("committed" if dist.get_rank() == 0 else "delegated"), report
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
