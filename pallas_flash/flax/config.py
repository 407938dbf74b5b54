"""What a layer is: its sizes, and how its heads attend."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_flash.backends import Backend
from pallas_flash.flax.rotary import RotaryEmbedding
from pallas_flash.validate import arguments, options

Initializer = Callable[..., Any]

_KERNEL_INIT = jax.nn.initializers.lecun_normal()


@dataclass(frozen=True)
class AttentionConfig:
    """The settings of a `GroupedQueryAttention`, for nnx and for linen.

    Letters as in `flash_attention`; D is the number of features.

    Attributes:
      features: D, of the hidden states that come in and go out.
      num_query_heads: N.
      num_key_value_heads: K, which divides N.
      head_dim: H.
      context_features: of what keys and values are made of, where that is another sequence
        (cross-attention); None for D.
      use_bias: add a bias to queries, keys and values.
      use_output_bias: add one to what goes out; None for what `use_bias` says.
      rotary: turns queries and keys by their positions; None for none.
      norm_epsilon: of an RMS norm over the head dim of queries and of keys, before they are turned
        (as in Qwen3); None for no norm.
      is_causal: a token sees none after it.
      local_window_size: as in `flash_attention`.
      logits_soft_cap: likewise.
      scale: of the logits, 1 / sqrt(H) by default.
      use_sinks: a learned logit for each query head that joins the softmax's denominator.
      dtype: of the computation, float32, bfloat16 or float16; None for what inputs and parameters
        promote to.
      param_dtype: of the parameters.
      precision: of products of float32 operands, in projections and attention.
      kernel_init: makes the kernels, as in `jax.nn.initializers`.
      kernel_axes: names of the axes (features, heads, head dim), each a string or None, which all
        parameters carry as partitioning metadata; None for no metadata. In linen they are logical
        axes; in nnx, those or a mesh's own.
      implementation: as in `flash_attention`.
    """

    features: int
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    context_features: int | None = None
    use_bias: bool = False
    use_output_bias: bool | None = None
    rotary: RotaryEmbedding | None = None
    norm_epsilon: float | None = None
    is_causal: bool = True
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    scale: float | None = None
    use_sinks: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    precision: str | jax.lax.Precision | None = None
    kernel_init: Initializer = _KERNEL_INIT
    kernel_axes: tuple[str | None, str | None, str | None] | None = None
    implementation: str | Backend | None = None

    def __post_init__(self) -> None:
        for name in ("features", "num_query_heads", "num_key_value_heads", "head_dim"):
            arguments.size(name, getattr(self, name))
        if self.context_features is not None:
            arguments.size("context_features", self.context_features)
        if self.num_query_heads % self.num_key_value_heads:
            expected = f"a divisor of num_query_heads = {self.num_query_heads}"
            arguments.fail("num_key_value_heads", expected, self.num_key_value_heads)
        for field in fields(self):
            x = getattr(self, field.name)
            if field.type in (bool, bool | None) and x is not None and not isinstance(x, bool):
                arguments.fail(field.name, "a bool", f"{x!r:.80}")
        if self.rotary is not None:
            self.rotary.frequencies(self.head_dim)
        if self.norm_epsilon is not None and not 0 < self.norm_epsilon < 1:
            arguments.fail("norm_epsilon", "a number above 0 and below 1", self.norm_epsilon)
        options.local_window_size(self.local_window_size)
        scale, _ = options.scale(self.scale, self.head_dim)
        options.logits_soft_cap(self.logits_soft_cap, scale)
        options.precision(self.precision)
        if self.dtype is not None:
            arguments.dtype("dtype", self.dtype)
        if self.kernel_axes is not None and len(self.kernel_axes) != 3:
            expected = "three names, of features, heads and head dim"
            arguments.fail("kernel_axes", expected, self.kernel_axes)

    @property
    def has_output_bias(self) -> bool:
        """Whether there is a bias on what goes out."""
        return self.use_bias if self.use_output_bias is None else self.use_output_bias

    @property
    def key_value_features(self) -> int:
        """How many features keys and values are made of."""
        return self.features if self.context_features is None else self.context_features

    def axes(self, *names: str) -> tuple[str | None, ...] | None:
        """The metadata of a parameter by its axes, each "features", "heads" or "head_dim"."""
        if self.kernel_axes is None:
            return None
        named = dict(zip(("features", "heads", "head_dim"), self.kernel_axes, strict=True))
        return tuple(named[name] for name in names)
