"""What SGLang's scheduler process needs on a CPU, from published wheels. Nothing here runs where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from .. import patches

# --- attention --------------------------------------------------------------------------------------------------------

MAX_GATHERED_ELEMENTS = 1 << 24  # keys held at once: 64 MB in float32, and as much again for the values


def own_attention(*, invariant: bool) -> None:
    """Let SGLang use :class:`BatchedDecodeBackend` as `torch_native` in this process, or :class:`InvariantBackend`."""
    patches.check("cpu")
    register_attention_backend("torch_native")(InvariantBackend if invariant else BatchedDecodeBackend)


class BatchedDecodeBackend(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with a batched decode step; results differ from the original only by rounding.

    SGLang's backend loops over the batch in Python, with one attention call for each sequence and layer. On a small
    model that loop takes most of the time. This one gathers the keys and values of many sequences into one padded array
    and calls the operator once: 5 times faster at 64 to 256 sequences of 100 tokens. Cases that it does not support
    (cross attention, sliding windows, a KV cache of another dtype) go to the original, and so does prefill.

    block: a multiple of this many keys is gathered of each sequence. any_dtype: whether `_attended` takes a cache of
    another dtype.
    """

    block = 1
    any_dtype = False

    def _run_sdpa_forward_decode(  # noqa: PLR0917  (the signature is SGLang's)
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any = None,
        scaling: float | None = None,
        **others: Any,
    ) -> Any:
        """Fill `output` (num_seqs, heads, value size) for one new token per sequence.

        query (num_seqs, heads, key size); caches (slots, kv heads, size); req_to_token (requests, positions) slots.
        """
        fits = self.any_dtype or query.dtype == k_cache.dtype == v_cache.dtype
        if not fits or _unusual(encoder_lens, others):
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens=encoder_lens,
                scaling=scaling,
                **others,
            )
        longest = _whole_blocks(int(seq_lens.max()), self.block)
        rows = max(1, MAX_GATHERED_ELEMENTS // (longest * k_cache[0].numel()))
        for start in range(0, seq_lens.shape[0], rows):
            part = slice(start, start + rows)
            slots = _slots(req_to_token, req_pool_indices[part], seq_lens[part], self.block)
            output[part] = self._attended(query[part], (k_cache, v_cache), slots, seq_lens[part], scaling)
        return output

    def _attended(self, query: Any, caches: tuple[Any, Any], slots: Any, lengths: Any, scaling: float | None) -> Any:
        """Attention (sequences, heads, value size) of each sequence's last token. slots (sequences, longest) are those
        of its keys, of which the first `lengths` count."""
        mask = torch.arange(slots.shape[1]) < lengths[:, None]
        keys, values = (_gather(cache, slots) for cache in caches)
        return _attend(query, keys, values, mask, scaling)


def _unusual(encoder_lens: Any, others: dict[str, Any]) -> bool:
    """Whether it is another kind of attention: over an encoder's keys, or in a sliding window."""
    window = others.get("sliding_window_size")
    return encoder_lens is not None or bool(others.get("is_cross_attn")) or window is not None


def _whole_blocks(length: int, block: int) -> int:
    return -(-length // block) * block


def _slots(req_to_token: Any, requests: Any, lengths: Any, block: int) -> Any:
    """Return cache slots (sequences, longest), a whole number of blocks. Padding repeats the sequence's last token.

    A slot of another sequence could hold a NaN, and a NaN times a weight of zero is a NaN.
    """
    positions = torch.arange(_whole_blocks(int(lengths.max()), block))
    return req_to_token[requests[:, None], torch.minimum(positions, lengths[:, None] - 1)]


def _gather(cache: Any, slots: Any) -> Any:
    """Gather (sequences, kv heads, longest, size). Copying whole rows is several times faster than fancy indexing."""
    heads, size = cache.shape[1:]
    rows = cache.view(-1, heads * size).index_select(0, slots.view(-1))
    return rows.view(*slots.shape, heads, size).transpose(1, 2)


def _attend(query: Any, keys: Any, values: Any, mask: Any, scaling: float | None) -> Any:
    """Compute grouped-query attention of one token per sequence. A group's heads take the place of query positions."""
    sequences, heads, size = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(sequences, kv_heads, heads // kv_heads, size)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scaling)
    return out.reshape(sequences, heads, values.shape[-1])


# --- the same result in every batch -----------------------------------------------------------------------------------

BLOCK = 64  # keys that attention sums up at a time
ROWS = 16  # rows that a product of matrices has
_aten = torch.library.Library("aten", "IMPL")


class InvariantBackend(BatchedDecodeBackend):
    """Attention in which each token's result depends on its own sequence up to it alone, to the last bit.

    The same token of the same sequence gets the same result in a batch of any size, beside longer sequences, behind a
    prefix from the cache, in a prompt or after one. `scaled_dot_product_attention` rounds differently in each case,
    because it sums in an order that depends on the shapes. Here every token is a matrix of its own in a batched
    product. Its keys are taken in blocks of a fixed size, in order. A block behind its own place changes nothing: its
    weights are exactly 0. Cross attention and sliding windows are left to SGLang's class here, too.
    """

    block = BLOCK
    any_dtype = True

    def _attended(self, query: Any, caches: tuple[Any, Any], slots: Any, lengths: Any, scaling: float | None) -> Any:
        keys, values = (cache[slots] for cache in caches)
        return _attend_in_blocks(query, keys, values, lengths, scaling)

    def _run_sdpa_forward_extend(  # noqa: PLR0917  (the signature is SGLang's)
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        encoder_lens: Any = None,
        scaling: float | None = None,
        causal: bool = False,
        **others: Any,
    ) -> Any:
        """Fill `output` (num_tokens, heads, value size) for the new tokens of each sequence, one after another."""
        if _unusual(encoder_lens, others) or not causal:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens=encoder_lens,
                scaling=scaling,
                causal=causal,
                **others,
            )
        start = 0
        for request, length, count in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            part = slice(start, start + count)
            slots = req_to_token[request, torch.arange(_whole_blocks(length, BLOCK)).clamp(max=length - 1)]
            seen = torch.arange(length - count + 1, length + 1)
            output[part] = _attend_in_blocks(query[part], k_cache[slots][None], v_cache[slots][None], seen, scaling)
            start += count
        return output


def _attend_in_blocks(query: Any, keys: Any, values: Any, seen: Any, scaling: float | None) -> Any:
    """Compute grouped-query attention, (tokens, heads, value size) float32, of tokens that are each on their own.

    query (tokens, heads, key size); keys and values (tokens, or 1 for the same of all, positions, kv heads, size), a
    whole number of blocks; seen (tokens,): a token attends to its first so many positions, at least one.
    """
    tokens, heads, size = query.shape
    kv_heads, positions = keys.shape[2], torch.arange(keys.shape[1])
    group = heads // kv_heads
    output = torch.empty(tokens, heads, values.shape[-1])
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        asked = query[:, mine].float() * (size**-0.5 if scaling is None else scaling)
        best = torch.full((tokens, group, 1), -torch.inf)  # the highest score so far
        total, summed = torch.zeros(tokens, group, 1), torch.zeros(tokens, group, values.shape[-1])
        for start in range(0, keys.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            scores = torch.bmm(asked, keys[:, block, head].float().expand(tokens, -1, -1).transpose(1, 2))
            scores.masked_fill_((positions[block] >= seen[:, None])[:, None], -torch.inf)
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, fading = torch.exp(scores - higher), torch.exp(best - higher)
            total = total * fading + weights.sum(-1, keepdim=True)
            summed = summed * fading + torch.bmm(weights, values[:, block, head].float().expand(tokens, -1, -1))
            best = higher
        output[:, mine] = summed / total
    return output


def invariant_products() -> None:
    """Let each row of a product of float32 matrices be computed in the same way, whatever other rows there are.

    torch's product of a row alone differs by rounding from the same row among others. Here rows are always multiplied
    ROWS at a time. Products of bfloat16 and float16 stay as they are: oneDNN sums each row in the same order anyway.
    """
    _aten.impl("mm", _product, "CPU")
    _aten.impl("addmm", _product_and_sum, "CPU")


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left (n, k) times right (k, m)."""
    if left.dtype is not torch.float32:
        return torch.bmm(left[None], right[None])[0]
    count, size = left.shape
    blocks = -(-count // ROWS)
    rows = left.new_zeros(blocks * ROWS, size)
    rows[:count] = left
    return torch.bmm(rows.view(blocks, ROWS, size), right.expand(blocks, -1, -1)).flatten(0, 1)[:count]


def _product_and_sum(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return beta times bias and alpha times the product of left and right, together."""
    product = _product(left, right)
    return bias * beta + product * alpha if (beta, alpha) != (1, 1) else bias + product


# --- sampling by seeds ------------------------------------------------------------------------------------------------

WORD = 0xFFFFFFFF


def seeded_sampling() -> None:
    """Let SGLang draw by seeds in this process, with the hash below instead of an operator of sgl_kernel.

    SGLang draws a seeded token by a hash of seed, position and column. On a CPU that is an operator of sgl_kernel's CPU
    build, which is not published. This is the same function in torch, bit for bit. So a seed draws the same token as on
    a GPU if the logits are the same. A GPU has kernels of SGLang's that make logits independent of the batch; here
    InvariantBackend and `invariant_products` do that.
    """
    patches.check("cpu seeds")
    patches.replace("batch_invariant_ops:enable_batch_invariant_mode", lambda *_args, **_kwargs: None)
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        patches.replace("layers.sampler:murmur_hash32", murmur_hash32)
        drawn = patches.original("layers.sampler:multinomial_with_seed")
        patches.replace("layers.sampler:multinomial_with_seed", patches.uncompiled(drawn))


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return (n, m) uint32: MurmurHash3 of seed, (n,) 64 bits, positions, (n,), and col_indices, (m,) 32 bits."""
    words = seed.view(torch.int64)
    state = torch.zeros_like(words)
    for block in (words & WORD, (words >> 32) & WORD, positions.long() & WORD):
        state = _mix(state, block)
    state = _mix(state[:, None], col_indices.long()[None, :] & WORD) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & WORD
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products of two 32-bit numbers can have more than 63 bits. Their lower 32 bits are right all the same.
    block = _rotated((block * 0xCC9E2D51) & WORD, 15)
    block = (block * 0x1B873593) & WORD
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD


# --- routed experts and grammars --------------------------------------------------------------------------------------


def recorded_experts() -> None:
    """Let SGLang record routed experts in ordinary memory. 0.5.17 cannot record them on a CPU."""
    funcs = patches.original("state_capturer.base:ALLOC_MEMORY_FUNCS")
    if funcs is not None:
        patches.replace("state_capturer.base:ALLOC_MEMORY_FUNCS", {**funcs, "cpu": _allocate})


def _allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_pinning: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def grammar_masks() -> None:
    """Let SGLang make and apply masks of grammars without a GPU. Older releases cannot."""
    import xgrammar  # noqa: PLC0415

    def allocate(self: Any, vocab_size: int, batch_size: int, device: Any) -> Any:
        return xgrammar.allocate_token_bitmask(batch_size, vocab_size)

    def apply(logits: Any, vocab_mask: Any) -> None:
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    patches.replace("constrained.xgrammar_backend:XGrammarGrammar.allocate_vocab_mask", allocate)
    patches.replace("constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask", staticmethod(apply))
