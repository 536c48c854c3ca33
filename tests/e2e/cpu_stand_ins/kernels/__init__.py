"""Stands in for the `kernels` package: variable-length attention in plain torch.

TRL 1.16 (experimental/async_grpo/packing.py) fetches its compiled flash attention through it.
"""

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    **unknown,
):
    """Causal attention of each packed sequence by itself; q is (tokens, heads, size)."""
    if not causal or tuple(window_size) != (-1, -1) or softcap:
        raise NotImplementedError("the stand-in knows plain causal attention only")
    outputs = []
    for i in range(len(cu_seqlens_q) - 1):
        query = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        keys = k[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1)
        values = v[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1)
        # The last query sees every key; one before it, all but the last; and so on.
        sees = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool)
        sees = sees.tril(keys.shape[1] - query.shape[1])
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=sees, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def get_kernel(*_, **__):
    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
