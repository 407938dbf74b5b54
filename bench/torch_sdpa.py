"""PyTorch's `scaled_dot_product_attention` as a program over JAX arrays.

Both libraries hold memory of one card, of which JAX by default leaves PyTorch a quarter.
"""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np

from pallas_flash.testing import Case

# By the names of this module, those of `torch.nn.attention.SDPBackend`. "math", plain products, is
# for a machine without a GPU.
_BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}

# Which kernels PyTorch may take is one choice for the whole process.
_CHOICE = threading.Lock()


@dataclass(frozen=True)
class Result:
    """One result of a program, to JAX a leaf that it can wait for and to NumPy an array.

    Attributes:
      tensor: a `torch.Tensor`.
    """

    tensor: Any

    def block_until_ready(self) -> "Result":
        """As of a `jax.Array`: `jax.block_until_ready` calls it."""
        if self.tensor.is_cuda:
            importlib.import_module("torch").cuda.synchronize(self.tensor.device)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """In float32, for NumPy has no bfloat16."""
        return np.asarray(self.tensor.detach().float().cpu().numpy(), dtype)


Program = Callable[[dict[str, jax.Array], dict[str, jax.Array], jax.Array], dict[str, Result]]


def program(backend: str, case: Case, with_gradients: bool) -> Program:
    """Attention by one of PyTorch's kernels, and where asked its gradients.

    Args:
      backend: "flash", which is FlashAttention-2, or "cudnn".
      case: of its options `is_causal` alone, with T equal to S.
      with_gradients: whether to run the backward too.

    Returns:
      A function of query [B, T, N, H], key and value [B, S, K, H], by name; of no other arrays; and
      of a cotangent of the output. It returns "out", and with gradients "dquery", "dkey" and
      "dvalue", each in the form of what it belongs to.

    Raises:
      ImportError: PyTorch is not installed.
      NotImplementedError: it has no CUDA.
    """
    torch = importlib.import_module("torch")
    if backend != "math" and not torch.cuda.is_available():
        raise NotImplementedError("this PyTorch finds no CUDA, which its attention kernels need")
    kernel = getattr(importlib.import_module("torch.nn.attention").SDPBackend, _BACKENDS[backend])

    def forward(tensors: dict[str, Any]) -> Any:
        # Views [B, N, T, H], in memory as they were.
        query, key, value = (tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
        with _CHOICE, torch.nn.attention.sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=case.is_causal, enable_gqa=case.N != case.K
            )
        return out.transpose(1, 2)

    def results(
        primals: dict[str, jax.Array], others: dict[str, jax.Array], dout: jax.Array
    ) -> dict[str, Result]:
        # JAX and PyTorch queue work on streams of their own. The arrays were ready before a clock
        # started, so that neither waits for the other.
        tensors = {name: _tensor(torch, x) for name, x in primals.items()}
        if not with_gradients:
            with torch.inference_mode():
                return {"out": Result(forward(tensors))}
        for tensor in tensors.values():
            tensor.requires_grad_()
        out = forward(tensors)
        gradients = torch.autograd.grad(out, list(tensors.values()), _tensor(torch, dout))
        computed = {f"d{name}": x for name, x in zip(tensors, gradients, strict=True)}
        return {name: Result(x.detach()) for name, x in {"out": out, **computed}.items()}

    return results


def _tensor(torch: ModuleType, x: jax.Array) -> Any:
    """The same memory as a tensor."""
    return torch.from_dlpack(x)
