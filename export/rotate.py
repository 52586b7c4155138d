"""A change of basis of the cache, absorbed by the weights: the same model, a cache that rounds better.

Where nothing position-dependent is applied on read, a cached row c of one key/value head may be
stored as c M for any invertible M: q c^T = (q M^-T)(c M)^T, and what is read back as a value is
undone by W_O M^-T. W_Q, W_K (and W_V) and W_O absorb M, head by head; no operation is added.

With one scale per row the rounding error of a row goes with its largest element, and what it does
goes with the queries and the output projection that read it. M = A U H:

- A balances writer and readers: A A^T = C^-1 # S, the geometric mean that minimises
  tr(A^T C A) tr(A^-1 S A^-T), C the second moment of rows, S that of their readers. Its diagonal form
  is the per-channel equalisation sqrt(S_ii / C_ii) that smoothing methods use;
- U diagonalises A^T C A and the orthogonal H, of elements of equal size, then gives every element
  of a row the same variance, so that no channel sets the scale alone.

C and S need text. Without any, M = H. A query that is the key itself (q=k) leaves M orthogonal.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from edgeqkv.errors import UnsupportedError
from edgeqkv.model import Decoder
from edgeqkv.spec import ModelSpec

BATCH = 8  # windows that are run at a time
RIDGE = 1e-3  # of the mean diagonal, added to C and S: bounds the condition of M


@dataclasses.dataclass
class Moments:
    """Second moments of one layer, float64: q [G, R, D, D], k and v [G, D, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


def check_rotation(spec: ModelSpec) -> None:
    """Raises UnsupportedError where the weights cannot absorb a change of basis."""
    if not spec.is_causal:
        raise UnsupportedError(f"--cache-rotate: {spec.label} is not causal and keeps no cache")
    if spec.query_mode != "projected":
        raise UnsupportedError(
            f"--cache-rotate: query_mode {spec.query_mode} reads the cache with the layer's own "
            "input, not with W_Q times it, so no weight can absorb the inverse; allowed: projected"
        )


def rotate_cache(decoder: Decoder, windows: Tensor | None = None) -> None:
    """Rewrite the weights in place; every logit stays what it was but for float32 rounding.

    windows: [N, T] int64, text to take C and S from; None for the orthogonal H alone.

    Raises:
        UnsupportedError: as :func:`check_rotation`.
    """
    spec = decoder.spec
    check_rotation(spec)
    with torch.no_grad():
        moments = None if windows is None else read_moments(decoder, windows)
        for layer in range(spec.num_hidden_layers):
            attn = decoder.get_submodule(f"h.{layer}.attn")
            found = None if moments is None else moments[layer]
            for group in range(spec.num_key_value_heads):
                _rotate_head(attn, spec, group, found)


def _rotate_head(attn: nn.Module, spec: ModelSpec, group: int, moments: Moments | None) -> None:
    dim = spec.head_dim
    heads = spec.num_attention_heads // spec.num_key_value_heads
    own = slice(group * dim, (group + 1) * dim)
    queries = [slice(h * dim, (h + 1) * dim) for h in range(group * heads, (group + 1) * heads)]
    output: Tensor = attn.get_parameter("o_proj.weight")
    query_is_key = spec.qkv_sharing in ("q=k", "q=k=v")
    as_key: Tensor | None = None
    as_value: Tensor | None = None
    if moments is not None:
        outs = [output[:, q].double() for q in queries]
        reads = [w.T @ w for w in outs]
        # What an error of the score of head h does to the output, in units of an error of the value.
        weights = [spec.attention_scale**2 * (s @ moments.v[group]).trace() for s in reads]
        as_key = torch.stack([w * q for w, q in zip(weights, moments.q[group], strict=True)]).sum(0)
        as_value = torch.stack(reads).sum(0)
    if spec.key_is_value:
        both = None if as_key is None or as_value is None else as_key + as_value
        rows = None if moments is None else moments.k[group]
        plan = [("k_proj", gauge(dim, rows, both, orthogonal=query_is_key), True, True)]
    else:
        k, v = (None, None) if moments is None else (moments.k[group], moments.v[group])
        plan = [
            ("k_proj", gauge(dim, k, as_key, orthogonal=query_is_key), True, False),
            ("v_proj", gauge(dim, v, as_value), False, True),
        ]
    for writer, m, read_as_key, read_as_value in plan:
        inverse = torch.linalg.inv(m)
        _transform_rows(attn, writer, own, m.T)
        for q in queries:
            if read_as_key and not query_is_key:
                _transform_rows(attn, "q_proj", q, inverse)
            if read_as_value:
                output[:, q] = (output[:, q].double() @ inverse.T).to(output.dtype)


def _transform_rows(attn: nn.Module, name: str, rows: slice, matrix: Tensor) -> None:
    """Rows of a linear layer, weight and bias, from the left."""
    for tensor in attn.get_submodule(name).parameters():
        tensor[rows] = (matrix @ tensor[rows].double()).to(tensor.dtype)


def gauge(
    dim: int, rows: Tensor | None = None, readers: Tensor | None = None, *, orthogonal: bool = False
) -> Tensor:
    """M [D, D] float64 from the second moments C of rows and S of their readers, both [D, D]."""
    spread = equal_elements(dim)
    if rows is None or readers is None:
        return spread
    rows = _ridge(rows)
    balance = torch.eye(dim, dtype=torch.float64)
    if not orthogonal:
        root = _sqrt(rows)
        inverse = torch.linalg.inv(root)
        balance = _sqrt(inverse @ _sqrt(root @ _ridge(readers) @ root) @ inverse)
    basis = torch.linalg.eigh(balance @ rows @ balance).eigenvectors
    found: Tensor = balance @ basis @ spread
    return found


def equal_elements(dim: int) -> Tensor:
    """An orthogonal [D, D]: Hadamard for a power of two, else the cosine transform."""
    if dim & (dim - 1) == 0:
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < dim:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        return h / math.sqrt(dim)
    n = torch.arange(dim, dtype=torch.float64)
    cosines = torch.cos(math.pi * (n[:, None] + 0.5) * n / dim) * math.sqrt(2 / dim)
    cosines[:, 0] = 1 / math.sqrt(dim)
    return cosines


def _ridge(x: Tensor) -> Tensor:
    mean = x.diagonal().mean().clamp_min(1e-30)
    return (x + x.T) / 2 + RIDGE * mean * torch.eye(len(x), dtype=x.dtype)


def _sqrt(x: Tensor) -> Tensor:
    """Of a symmetric positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh((x + x.T) / 2)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root


def read_moments(decoder: Decoder, windows: Tensor) -> list[Moments]:
    """Means over all tokens of the windows, one entry per layer."""
    spec, length = decoder.spec, windows.shape[1]
    groups, dim = spec.num_key_value_heads, spec.head_dim
    heads = spec.num_attention_heads // groups
    plain = decoder.eager_attend(length)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dim, dim, dtype=torch.float64)

    found = [
        Moments(zeros(groups, heads), zeros(groups), zeros(groups))
        for _ in range(spec.num_hidden_layers)
    ]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for total, x in ((found[layer].q, q), (found[layer].k, k), (found[layer].v, v)):
            rows = x.flatten(0, 1).transpose(0, 1).double()  # [H or G, tokens, D]
            total += (rows.transpose(1, 2) @ rows).view(total.shape) / windows.numel()
        return plain(layer, q, k, v)

    positions = torch.arange(length)
    for batch in torch.split(windows, BATCH):
        decoder.hidden(batch, positions, attend)
    return found
