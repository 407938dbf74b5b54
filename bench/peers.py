"""What is timed: this library, its kernels in other configs, and the attention of others."""

import dataclasses
import importlib
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_flash import flash_attention, validate
from pallas_flash.backends import Backend, Device
from pallas_flash.backends.triton import TritonBackend, config
from pallas_flash.backends.triton.config import Config
from pallas_flash.spec import AttentionSpec, Dims
from pallas_flash.testing import Case

# Takes query, key, value and the options of a problem by `flash_attention`'s names; gives out.
Attention = Callable[..., jax.Array]

_CAUSAL = frozenset({"is_causal"})
_NN_OPTIONS = frozenset({"is_causal", "local_window_size", "key_value_seq_lengths"})
_ALL_OPTIONS = _NN_OPTIONS | {"logits_soft_cap"}

CUDNN = "jax-cudnn"
OURS = "ours-triton"


@dataclass(frozen=True)
class Peer:
    """One row of a table.

    Attributes:
      name: as in `--peers`.
      load: gives its attention; an ImportError where it is not installed.
      options: which options of a problem it takes.
    """

    name: str
    load: Callable[[], Attention]
    options: frozenset[str] = _ALL_OPTIONS


def _ours(implementation: str | Backend) -> Attention:
    return partial(flash_attention, implementation=implementation)


def _jax_nn(implementation: str) -> Attention:
    return partial(jax.nn.dot_product_attention, implementation=implementation)


def _mha(*blocks: int) -> Attention:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is deprecated", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    block_sizes = module.BlockSizes(*blocks) if blocks else module.BlockSizes.get_default()

    def attention(
        query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False
    ) -> jax.Array:
        # It would read heads that are not there.
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError("it has no grouped queries")
        scale = query.shape[3] ** -0.5
        return module.mha(query, key, value, None, scale, is_causal, block_sizes=block_sizes)

    return attention


def _tokamax(implementation: str) -> Attention:
    module = importlib.import_module("tokamax")
    return partial(module.dot_product_attention, implementation=implementation)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, partial(_ours, "triton")),
        Peer("ours-xla", partial(_ours, "xla")),
        Peer(CUDNN, partial(_jax_nn, "cudnn"), _NN_OPTIONS),
        Peer("jax-xla", partial(_jax_nn, "xla"), _NN_OPTIONS),
        Peer("mha", _mha, _CAUSAL),
        # The forward's block_q and block_k, those of its scan for dk and dv, those of that for dq.
        # It needs the second of the former to be the first of the latter.
        Peer("mha-128x64", partial(_mha, 128, 64, 64, 64, 64, 64), _CAUSAL),
        Peer("mha-128x32", partial(_mha, 128, 32, 64, 128, 128, 64), _CAUSAL),
        Peer("mha-64x64", partial(_mha, 64, 64, 32, 64, 64, 32), _CAUSAL),
        Peer("tokamax-triton", partial(_tokamax, "triton")),
        Peer("tokamax-mosaic", partial(_tokamax, "mosaic")),
    )
}


def _grid(block_q: tuple[int, ...], block_k: tuple[int, ...]) -> tuple[Config, ...]:
    return tuple(Config(*sizes) for sizes in itertools.product(block_q, block_k, (4, 8), (2, 3)))


# What `--sweep` tries, by kernel.
GRIDS = {
    "forward": _grid((64, 128, 256), (32, 64, 128)),
    "key_gradient": _grid((32, 64, 128), (64, 128)),
    "value_gradient": _grid((32, 64), (64, 128)),
    "query_gradient": _grid((64, 128), (32, 64, 128)),
}


def sweep(kernel: str, case: Case) -> list[Peer]:
    """This library with one kernel in each config of its grid, the others as they are picked."""
    dims = Dims(case.B, case.T, case.S, case.N, case.K, case.H, case.H)
    capability = Device.of(jnp.zeros(())).compute_capability
    precision = validate.precision(None)
    spec = AttentionSpec(logits_soft_cap=case.logits_soft_cap, precision=precision)
    picked = config.pick(spec, dims, jnp.dtype(case.dtype), capability)
    configs = {cut: dataclasses.replace(picked, **{kernel: cut}) for cut in GRIDS[kernel]}
    return [
        Peer(
            f"{cut.block_q}x{cut.block_k}-{cut.num_warps}w-{cut.num_stages}s",
            partial(_ours, TritonBackend(configs=configs[cut])),
        )
        for cut in GRIDS[kernel]
    ]
