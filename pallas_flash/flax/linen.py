"""The layer of attention in Flax linen."""

from collections.abc import Callable

import jax
from flax import linen

from pallas_flash.api import flash_attention, flash_decode
from pallas_flash.flax.config import AttentionConfig
from pallas_flash.flax.layer import AttentionLayer


class GroupedQueryAttention(AttentionLayer, linen.Module):
    """Attention whose query heads share key/value heads in groups (Ainslie et al., 2023), with all
    of `flash_attention` and `flash_decode` behind it.

    `prefill`, `extend` and `context_cache` go by `layer.apply(variables, ..., method="prefill")`;
    caches come and go as values, and no collection holds one. Parameters are named and shaped as
    those of `pallas_flash.flax.nnx.GroupedQueryAttention`.

    Attributes:
      config: sizes and options.
      attention_fn: takes what `flash_attention` takes and gives what it gives, to compare with.
      decode_fn: likewise for `flash_decode`.
    """

    config: AttentionConfig
    attention_fn: Callable[..., jax.Array] = flash_attention
    decode_fn: Callable[..., jax.Array] = flash_decode

    # Flax looks after the methods that a class itself defines: interceptors and intermediates of
    # these, and their names in a profile.
    __call__ = AttentionLayer.__call__
    prefill = AttentionLayer.prefill
    extend = AttentionLayer.extend
    context_cache = AttentionLayer.context_cache

    def setup(self) -> None:
        config = self.config

        def into_heads(heads: int) -> linen.DenseGeneral:
            return linen.DenseGeneral(
                (heads, config.head_dim),
                use_bias=config.use_bias,
                kernel_init=_named(config, config.kernel_init, "features", "heads", "head_dim"),
                bias_init=_named(config, linen.initializers.zeros_init(), "heads", "head_dim"),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                precision=config.precision,
            )

        self.query = into_heads(config.num_query_heads)
        self.key = into_heads(config.num_key_value_heads)
        self.value = into_heads(config.num_key_value_heads)
        self.out = linen.DenseGeneral(
            config.features,
            axis=(-2, -1),
            use_bias=config.has_output_bias,
            kernel_init=_named(config, config.kernel_init, "heads", "head_dim", "features"),
            bias_init=_named(config, linen.initializers.zeros_init(), "features"),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            precision=config.precision,
        )
        if config.norm_epsilon is not None:
            self.query_norm, self.key_norm = (
                linen.RMSNorm(
                    epsilon=config.norm_epsilon,
                    scale_init=_named(config, linen.initializers.ones_init(), "head_dim"),
                    dtype=config.dtype,
                    param_dtype=config.param_dtype,
                )
                for _ in range(2)
            )
        if config.use_sinks:
            init = _named(config, linen.initializers.zeros_init(), "heads")
            self.sinks = self.param("sinks", init, (config.num_query_heads,), config.param_dtype)

    def query_heads(self, hidden: jax.Array) -> jax.Array:
        query = self.query(hidden)
        return query if self.config.norm_epsilon is None else self.query_norm(query)

    def key_value_heads(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value = self.key(hidden), self.value(hidden)
        return key if self.config.norm_epsilon is None else self.key_norm(key), value

    def output(self, heads: jax.Array) -> jax.Array:
        return self.out(heads)

    def sink_logits(self) -> jax.Array | None:
        return self.sinks if self.config.use_sinks else None


def _named(config: AttentionConfig, init: Callable, *names: str) -> Callable:
    """An initializer whose parameters carry the names of their axes."""
    axes = config.axes(*names)
    return init if axes is None else linen.with_logical_partitioning(init, axes)
