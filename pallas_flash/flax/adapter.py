"""What a stock attention module of Flax takes as its `attention_fn`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from pallas_flash import backends
from pallas_flash.api import flash_attention
from pallas_flash.spec import Precision
from pallas_flash.validate import arguments, attention, options


@dataclass(frozen=True, kw_only=True)
class AttentionFn:
    """An `attention_fn` with the settings that Flax's modules do not pass: `make_attention_fn`.

    A callable value. Equal ones share what `jax.jit` compiled for a module that holds one.
    """

    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    implementation: str | backends.Backend | None = None

    def __post_init__(self) -> None:
        options.is_causal(self.is_causal)
        window = self.local_window_size
        options.local_window_size(window)
        if window is not None:
            # In one form, that equal ones be equal, and with a hash, which a list has not.
            sides = window if isinstance(window, (tuple, list)) else (window, window)
            object.__setattr__(self, "local_window_size", tuple(sides))
        # No head dim has a larger default scale.
        options.logits_soft_cap(self.logits_soft_cap, 1.0)
        backends.require_known(self.implementation)

    # linen passes only what its signature names, and drops the rest in silence: so every keyword
    # that a module has stands here, and what cannot be honoured is refused. What comes after
    # `module` has one order in linen and another in nnx.
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: ArrayLike | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: str | Precision | None = None,
        module: object = None,
        *,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
        input_positions: object = None,
        **unknown: object,
    ) -> jax.Array:
        """Attention in place of `flax.linen.dot_product_attention` or that of `flax.nnx`.

        Letters are those of `pallas_flash.flash_attention`, and so are all contracts: a query that
        may see nothing gives 0, where Flax gives the mean of all values.

        A decoding step of a module is one query, T = 1, over the whole cache, with a mask that
        hides what is not yet written; its position is not passed. So where T is 1, S is more and a
        mask is given, causality and window are relative to the last key that the mask shows to any
        row or head: the newest token, for a module has one position for all rows. For a window this
        assumes that no mask of the caller's own hides the newest token from every row and head. In
        every other call, query i is at position i, also where T and S differ.

        Args:
          query: [*batch, T, N, H], with any number of batch dims.
          key: [*batch, S, K, H], where K divides N.
          value: [*batch, S, K, Hv].
          bias: floats added to the scaled logits, of a shape that broadcasts to [*batch, N, T, S].
            Differentiable.
          mask: bools or numbers of such a shape; a key may be seen where it is not zero.
          broadcast_dropout: has no effect without dropout.
          dropout_rng: likewise.
          dropout_rate: has no effect where `deterministic`, and must be 0 otherwise.
          deterministic: whether a dropout rate is to be ignored; a static bool.
          dtype: what query, key and value are cast to; by default their common type.
          precision: as in `flash_attention`.
          module: must be None, for there are no attention weights that it could sow.
          is_causal: whether this call is causal; it also is where the settings say so.
          force_fp32_for_softmax: has no effect: the softmax is float32 in any case.
          einsum_dot_general: must be None, as one kernel computes both products.
          qk_attn_weights_einsum: likewise.
          attn_weights_value_einsum: likewise.
          input_positions: must be None: query and key are to be rotated before the call.
          **unknown: what a later Flax may pass; must be None.

        Returns:
          [*batch, T, N, Hv] in `dtype`.

        Raises:
          TypeError: an unknown keyword.
          ValueError: an argument is malformed.
          NotImplementedError: an argument asks for what is not offered, or the implementation
            cannot run this call; the message says why and what to do instead.
        """
        _require_no_dropout(dropout_rate, deterministic)
        _require_none(
            module=module,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            input_positions=input_positions,
            **unknown,
        )
        query, key, value = attention.query_key_value(
            *promote_dtype(query, key, value, dtype=dtype)
        )
        is_causal = options.is_causal(is_causal) or self.is_causal
        query_offset = 0
        if mask is not None:
            mask = arguments.array("mask", mask).astype(bool)
            is_relative = is_causal or self.local_window_size is not None
            if is_relative and query.shape[-3] == 1 < key.shape[-3]:
                query_offset = _newest_position(mask, key.shape[-3])
        return flash_attention(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=is_causal,
            local_window_size=self.local_window_size,
            query_offset=query_offset,
            logits_soft_cap=self.logits_soft_cap,
            precision=precision,
            implementation=self.implementation,
        )


def make_attention_fn(
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | backends.Backend | None = None,
) -> AttentionFn:
    """An `attention_fn` for the stock attention modules of `flax.linen` and `flax.nnx`.

    With what the modules themselves cannot pass. Causality above all: a mask in memory hides keys,
    and this leaves out the work on them.

        layer = linen.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=make_attention_fn(is_causal=True)
        )

    Args:
      is_causal: whether every call is causal. By default those are that say so, as nnx's can.
      local_window_size: as in `pallas_flash.flash_attention`.
      logits_soft_cap: likewise.
      implementation: likewise.

    Returns:
      A callable, whose `__call__` says what it takes and what it refuses; equal settings give equal
      ones, of equal hash.

    Raises:
      ValueError: a setting is malformed; the message says which, what was expected and what came.
    """
    return AttentionFn(
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )


attention_fn = make_attention_fn()


def _require_no_dropout(dropout_rate: object, deterministic: object) -> None:
    given = {"dropout_rate": dropout_rate, "deterministic": deterministic}
    traced = [name for name, x in given.items() if isinstance(x, jax.core.Tracer)]
    if "dropout_rate" not in traced and dropout_rate == 0:
        return
    if "deterministic" not in traced and deterministic:
        return
    for name in traced:
        arguments.fail(name, "a value known when jit traces", given[name])
    raise NotImplementedError(
        f"dropout_rate={dropout_rate}: attention weights are never in memory as a whole and cannot "
        "be dropped; set it to 0, pass deterministic=True, or drop parts of the module's output"
    )


_PRODUCTS = (
    "the two products of attention are made in one kernel and cannot be replaced; leave it None, "
    "or use Flax's own attention"
)

# Why, and what to do instead.
_NOT_OFFERED = {
    "module": "attention weights are never in memory as a whole and cannot be sown; leave "
    "sow_weights False, or use Flax's own attention to look at them",
    "einsum_dot_general": _PRODUCTS,
    "qk_attn_weights_einsum": _PRODUCTS,
    "attn_weights_value_einsum": _PRODUCTS,
    "input_positions": "there is no position embedding here; rotate query and key in a function "
    "that then calls this one without it",
}


def _require_none(**given: object) -> None:
    for name, x in given.items():
        if x is None:
            continue
        if name not in _NOT_OFFERED:
            raise TypeError(f"attention_fn has no argument {name!r}, got {x!r:.80}")
        raise NotImplementedError(f"{name}: {_NOT_OFFERED[name]}")


def _newest_position(mask: jax.Array, key_length: int) -> jax.Array:
    """The last position that the mask shows to any row or head; where there is none, the last."""
    mask = jnp.atleast_1d(mask)
    is_shown = mask.any(axis=tuple(range(mask.ndim - 1)))
    # Of a mask without a key axis, which is 1 long, this is the last of all keys.
    return key_length - 1 - jnp.argmax(is_shown[::-1])
