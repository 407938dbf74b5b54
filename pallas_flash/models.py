"""Attention as real models call it: named shapes, for tests and for the bench."""

from functools import partial

from pallas_flash.testing import Case

_causal = partial(Case, dtype="bfloat16", is_causal=True)
_full = partial(Case, dtype="bfloat16")

# What one layer computes for a batch in training or prefill. Window and cap are those of Gemma 2's
# local layers; DeepSeek's is multi-head latent attention with its keys and values written out.
MODELS = {
    "SmolLM2-135M": _causal(B=8, T=2048, S=2048, N=9, K=3, H=64),
    "Llama-3-8B": _causal(B=1, T=8192, S=8192, N=32, K=8, H=128),
    "Qwen3-0.6B": _causal(B=4, T=4096, S=4096, N=16, K=8, H=128),
    "Qwen3-8B": _causal(B=1, T=16384, S=16384, N=32, K=8, H=128),
    "Gemma-2-9B": _causal(
        B=1, T=8192, S=8192, N=16, K=8, H=256, local_window_size=(4095, 0), logits_soft_cap=50.0
    ),
    "Mixtral-8x7B": _causal(B=1, T=32768, S=32768, N=32, K=8, H=128),
    "DeepSeek-V3": _causal(B=1, T=4096, S=4096, N=128, K=128, H=192, Hv=128),
    "ViT-L-16": _full(B=64, T=197, S=197, N=16, K=16, H=64),
    "Whisper-large-v3-cross": _full(B=16, T=448, S=1500, N=20, K=20, H=64),
}
