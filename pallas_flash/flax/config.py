"""What a layer is: its sizes, and how its heads attend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
      param_dtype: of the parameters, one of these too.
      precision: of products of float32 operands, in projections and attention.
      kernel_init: makes the kernels, as in `jax.nn.initializers`.
      kernel_axes: names of the axes (features, heads, head dim), each a string or None, which all
        parameters carry as partitioning metadata; None for no metadata. In linen they are logical
        axes; in nnx, those or a mesh's own, and Flax from 0.12 on may want a mesh to be set where
        the parameters are made, as for its own layers.
      implementation: as in `flash_attention`, which refuses others; what attends in its place may
        have names of its own.
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
        for name in ("use_bias", "use_output_bias", "is_causal", "use_sinks"):
            x = getattr(self, name)
            is_open = x is None and name == "use_output_bias"
            if not isinstance(x, bool) and not is_open:
                arguments.fail(name, "a bool", f"{x!r:.80}")
        if self.rotary is not None:
            if not isinstance(self.rotary, RotaryEmbedding):
                arguments.fail("rotary", "None or a RotaryEmbedding", f"{self.rotary!r:.80}")
            self.rotary.frequencies(self.head_dim)
        epsilon = self.norm_epsilon
        is_fraction = isinstance(epsilon, (float, np.floating)) and 0 < epsilon < 1
        if epsilon is not None and not is_fraction:
            arguments.fail("norm_epsilon", "a number above 0 and below 1", f"{epsilon!r:.80}")
        window = self.local_window_size
        options.local_window_size(window)
        scale, array = options.scale(self.scale, self.head_dim)
        if array is not None:
            arguments.fail("scale", "a number known when the layer is made", f"{self.scale!r:.80}")
        options.logits_soft_cap(self.logits_soft_cap, scale)
        options.precision(self.precision)
        if self.dtype is not None:
            arguments.dtype("dtype", self.dtype)
        arguments.dtype("param_dtype", self.param_dtype)
        if not callable(self.kernel_init):
            arguments.fail("kernel_init", "a function", f"{self.kernel_init!r:.80}")
        axes = self.kernel_axes
        if axes is not None and not _is_named(axes):
            expected = "strings or None, of features, heads and head dim"
            arguments.fail("kernel_axes", expected, f"{axes!r:.80}")
        # In one form, a window as a pair: so equal ones are equal, and all have a hash.
        if window is not None:
            sides = window if isinstance(window, (tuple, list)) else (window, window)
            object.__setattr__(self, "local_window_size", tuple(sides))
        if self.scale is not None:
            object.__setattr__(self, "scale", scale)
        if axes is not None:
            object.__setattr__(self, "kernel_axes", tuple(axes))

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


def _is_named(axes: object) -> bool:
    """Whether there is a name, or None, for each of the three axes."""
    is_three = isinstance(axes, (tuple, list)) and len(axes) == 3
    return is_three and all(isinstance(name, str | None) for name in axes)
