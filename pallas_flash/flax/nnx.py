"""The layer of attention in Flax NNX."""

from collections.abc import Callable

import jax
from flax import nnx

from pallas_flash.api import flash_attention, flash_decode
from pallas_flash.flax.config import AttentionConfig
from pallas_flash.flax.layer import AttentionLayer


class GroupedQueryAttention(AttentionLayer, nnx.Module):
    """Attention whose query heads share key/value heads in groups (Ainslie et al., 2023), with all
    of `flash_attention` and `flash_decode` behind it.

    Parameters, where there are such: `query.kernel` [D, N, H], `key.kernel` and `value.kernel`
    [D, K, H] (of context features, in cross-attention), `out.kernel` [N, H, D], biases `query.bias`
    [N, H], `key.bias` and `value.bias` [K, H], `out.bias` [D]; `query_norm.scale` and
    `key_norm.scale` [H], `sinks` [N].
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        attention_fn: Callable[..., jax.Array] = flash_attention,
        decode_fn: Callable[..., jax.Array] = flash_decode,
        rngs: nnx.Rngs,
    ) -> None:
        """Random parameters.

        Args:
          config: sizes and options.
          attention_fn: takes what `flash_attention` takes and gives what it gives, to compare with.
          decode_fn: likewise for `flash_decode`.
          rngs: makes the parameters.
        """
        self.config = config
        self.attention_fn = attention_fn
        self.decode_fn = decode_fn

        def into_heads(features: int, heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                features,
                (heads, config.head_dim),
                use_bias=config.use_bias,
                kernel_init=_named(config, config.kernel_init, "features", "heads", "head_dim"),
                bias_init=_named(config, nnx.initializers.zeros_init(), "heads", "head_dim"),
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                precision=config.precision,
                rngs=rngs,
            )

        self.query = into_heads(config.features, config.num_query_heads)
        self.key = into_heads(config.key_value_features, config.num_key_value_heads)
        self.value = into_heads(config.key_value_features, config.num_key_value_heads)
        self.out = nnx.LinearGeneral(
            (config.num_query_heads, config.head_dim),
            config.features,
            axis=(-2, -1),
            use_bias=config.has_output_bias,
            kernel_init=_named(config, config.kernel_init, "heads", "head_dim", "features"),
            bias_init=_named(config, nnx.initializers.zeros_init(), "features"),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            precision=config.precision,
            rngs=rngs,
        )
        if config.norm_epsilon is not None:
            self.query_norm, self.key_norm = (
                nnx.RMSNorm(
                    config.head_dim,
                    epsilon=config.norm_epsilon,
                    scale_init=_named(config, nnx.initializers.ones_init(), "head_dim"),
                    dtype=config.dtype,
                    param_dtype=config.param_dtype,
                    rngs=rngs,
                )
                for _ in range(2)
            )
        if config.use_sinks:
            init = _named(config, nnx.initializers.zeros_init(), "heads")
            shape = (config.num_query_heads,)
            self.sinks = nnx.Param(init(rngs.params(), shape, config.param_dtype))

    def query_heads(self, hidden: jax.Array) -> jax.Array:
        query = self.query(hidden)
        return query if self.config.norm_epsilon is None else self.query_norm(query)

    def key_value_heads(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value = self.key(hidden), self.value(hidden)
        return key if self.config.norm_epsilon is None else self.key_norm(key), value

    def output(self, heads: jax.Array) -> jax.Array:
        return self.out(heads)

    def sink_logits(self) -> jax.Array | None:
        return self.sinks[...] if self.config.use_sinks else None


def _named(config: AttentionConfig, init: Callable, *names: str) -> Callable:
    """An initializer whose parameters carry the names of their axes."""
    axes = config.axes(*names)
    return init if axes is None else nnx.with_partitioning(init, axes)
