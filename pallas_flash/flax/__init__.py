"""For Flax: what its stock attention modules take as their attention, and a layer of our own.

`pallas_flash.flax.nnx` and `pallas_flash.flax.linen` have each a `GroupedQueryAttention`.
"""

try:
    import flax as _flax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "pallas_flash.flax needs Flax, which is not installed: pip install 'pallas-flash[flax]'",
        name="flax",
    ) from None

from pallas_flash.flax.adapter import AttentionFn, attention_fn, make_attention_fn
from pallas_flash.flax.config import AttentionConfig
from pallas_flash.flax.rotary import (
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    RotaryScaling,
    YarnScaling,
)

__all__ = [
    "AttentionConfig",
    "AttentionFn",
    "LinearScaling",
    "Llama3Scaling",
    "RotaryEmbedding",
    "RotaryScaling",
    "YarnScaling",
    "attention_fn",
    "make_attention_fn",
]
