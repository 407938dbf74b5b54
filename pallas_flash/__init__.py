"""FlashAttention for JAX."""

from pallas_flash.api import (
    flash_attention,
    flash_attention_with_lse,
    flash_decode,
    flash_decode_with_lse,
)
from pallas_flash.autodiff import LSE_NAME, OUT_NAME
from pallas_flash.backends import DISABLED_EXPORT_CHECKS, IMPLEMENTATIONS
from pallas_flash.cache import KVCache, PagedKVCache
from pallas_flash.spec import AttentionOutput

__all__ = [
    "DISABLED_EXPORT_CHECKS",
    "IMPLEMENTATIONS",
    "LSE_NAME",
    "OUT_NAME",
    "AttentionOutput",
    "KVCache",
    "PagedKVCache",
    "flash_attention",
    "flash_attention_with_lse",
    "flash_decode",
    "flash_decode_with_lse",
]
