"""The gradient of attention: one rule for every backend. (And that decoding has none.)

For one query row, with x the logits before the cap, s those after it, and sums over visible keys j:

    x_j = scale * (q . k_j) + bias_j            s_j = cap * tanh(x_j / cap)
    lse = log(exp(sink) + sum_j exp(s_j))       p_j = exp(s_j - lse)
    out = sum_j p_j v_j

Given the cotangents do of out and dl of lse, with d p_j / d s_i = p_j (1[i = j] - p_i) and
d lse / d s_j = p_j:

    dv_j   = p_j do
    dp_j   = do . v_j
    ds_j   = p_j (dp_j - sum_i p_i dp_i + dl) = p_j (dp_j - delta),     delta = do . out - dl
    dx_j   = ds_j (1 - tanh^2(x_j / cap))
    dq     = scale * sum_j dx_j k_j
    dk_j   = scale * dx_j q                     summed over the rows and the group's heads
    dbias_j = dx_j                              summed over the axes along which bias is broadcast
    dscale = sum_j dx_j (q . k_j)               summed over everything
    dsink  = exp(sink - lse) (0 - delta)        summed over batch and rows: its value is zero

The sum over i in ds_j is do . out (FlashAttention, Dao et al. 2022, appendix B.2), so p is the only
quadratic quantity, and it is recomputed block by block from lse (FlashAttention-2, section 3.1.2).
The cotangent of lse costs nothing more than the one subtraction in delta.
"""

import functools
from typing import NamedTuple, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import sharding
from pallas_flash.spec import (
    DIFFERENTIABLE,
    AttentionSpec,
    DecodeOperands,
    ForwardOutput,
    Operands,
    Residuals,
)

OUT_NAME = "flash_attention_out"
LSE_NAME = "flash_attention_lse"


class Kernels(Protocol):
    """What the rule needs of a backend; `pallas_flash.backends.Backend` has it."""

    def forward(
        self, spec: AttentionSpec, operands: Operands, *, with_lse: bool, with_statistics: bool
    ) -> ForwardOutput: ...

    def backward(
        self, spec: AttentionSpec, residuals: Residuals, dout: jax.Array, dlse: jax.Array | None
    ) -> Operands: ...


class Decoder(Protocol):
    """What `decode` needs of one."""

    def decode(
        self, spec: AttentionSpec, operands: DecodeOperands, *, with_lse: bool
    ) -> ForwardOutput: ...


class Output(NamedTuple):
    """`AttentionOutput`, where lse may be None."""

    out: jax.Array
    lse: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attention(kernels: Kernels, spec: AttentionSpec, with_lse: bool, operands: Operands) -> Output:
    """Attention by `kernels`, differentiable once in reverse mode; lse is None unless asked for.

    In a differentiated call out carries the checkpoint name `OUT_NAME`, and `LSE_NAME` stands on
    lse and on its two parts, of which the backward makes use.
    """
    result = _forward(kernels, spec, with_lse, False, operands)
    return Output(result.out, result.lse)


def _attention_fwd(
    kernels: Kernels, spec: AttentionSpec, with_lse: bool, operands: Operands
) -> tuple[Output, Residuals]:
    result = _forward(kernels, spec, with_lse, True, operands)
    out = checkpoint_name(result.out, OUT_NAME)
    lse, m, log_l = (checkpoint_name(x, LSE_NAME) for x in result[1:])
    return Output(out, lse), Residuals(operands, out, m, log_l)


def _attention_bwd(
    kernels: Kernels,
    spec: AttentionSpec,
    with_lse: bool,
    residuals: Residuals,
    cotangents: Output,
) -> tuple[Operands]:
    return (_backward(kernels, spec, residuals, cotangents),)


attention.defvjp(_attention_fwd, _attention_bwd)


# Were the two passes plain calls, a second differentiation would go into a backend's own loops, and
# give an error about them, or through a kernel, and give who knows what.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _forward(
    kernels: Kernels,
    spec: AttentionSpec,
    with_lse: bool,
    with_statistics: bool,
    operands: Operands,
) -> ForwardOutput:
    forward = functools.partial(
        kernels.forward, spec, with_lse=with_lse, with_statistics=with_statistics
    )
    out_like = sharding.forward_like(operands, with_lse, with_statistics)
    return sharding.automatic(forward, out_like)(operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(
    kernels: Kernels, spec: AttentionSpec, residuals: Residuals, cotangents: Output
) -> Operands:
    operands = residuals.operands
    backward = functools.partial(kernels.backward, spec)
    gradients_like = Operands(**{name: getattr(operands, name) for name in DIFFERENTIABLE})
    return sharding.automatic(backward, gradients_like)(residuals, cotangents.out, cotangents.lse)


# As above: there is no backward, and what XLA would make of a backend's own loops is another one
# for each backend.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def decode(
    decoder: Decoder, spec: AttentionSpec, with_lse: bool, operands: DecodeOperands
) -> Output:
    """Decoding by `decoder`, without derivatives; lse is None unless asked for."""
    run = functools.partial(decoder.decode, spec, with_lse=with_lse)
    out_like = sharding.forward_like(operands, with_lse, False)
    result = sharding.automatic(run, out_like)(operands)
    return Output(result.out, result.lse)


def _refuse(*arguments: object):
    raise NotImplementedError(
        "flash_attention offers the first derivative in reverse mode (jax.grad, jax.vjp, "
        "jax.jacrev) and no other: not forward mode (jax.jvp, jax.jacfwd) and not the derivative "
        "of a derivative (jax.hessian). jax.nn.dot_product_attention has both, dense."
    )


def _refuse_decode(*arguments: object):
    raise NotImplementedError(
        "flash_decode offers no derivatives: flash_attention(..., is_causal=True, "
        "query_offset=lengths - T, key_value_seq_lengths=lengths) is the same with them."
    )


_forward.defjvp(_refuse)
_backward.defjvp(_refuse)
decode.defjvp(_refuse_decode)
