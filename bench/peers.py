"""What is timed: this library, its kernels in other configs, and the attention of others."""

import dataclasses
import importlib
import itertools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from problems import Arrays
from programs import Attention, Compiled, compile_jax

from pallas_flash import flash_attention, flash_decode
from pallas_flash.backends import Backend, Device
from pallas_flash.backends.triton import TritonBackend, config
from pallas_flash.backends.triton.config import Config
from pallas_flash.backends.triton.decode_config import DecodeConfig
from pallas_flash.spec import AttentionSpec, Dims
from pallas_flash.testing import Case
from pallas_flash.validate import options

_CAUSAL = frozenset({"is_causal"})
_NN_OPTIONS = frozenset({"is_causal", "local_window_size", "key_value_seq_lengths"})
_ALL_OPTIONS = _NN_OPTIONS | {"logits_soft_cap"}
_LENGTHS = frozenset({"key_value_seq_lengths"})

CUDNN = "jax-cudnn"
OURS = "ours-triton"
DECODE = "ours-decode"
BASE = "base"


@dataclass(frozen=True)
class Peer:
    """One row of a table.

    Attributes:
      name: as in `--peers`.
      compile: a case's program, with gradients or without, tuned or not as `programs.compile_jax`
        has it. An ImportError where the peer is not installed, and any other where it cannot run
        the case.
      options: which options of a problem it takes.
      has_gradients: whether it has a backward.
    """

    name: str
    compile: Callable[[Case, bool, bool], Compiled]
    options: frozenset[str] = _ALL_OPTIONS
    has_gradients: bool = True

    def missing(self, asked: frozenset[str], with_gradients: bool) -> str:
        """What it has not of what a problem asks for, in words; empty where it has all."""
        lacks = sorted(asked - self.options)
        if with_gradients and not self.has_gradients:
            lacks.append("backward")
        return ", ".join(lacks)


def traced(load: Callable[[], Attention]) -> Callable[[Case, bool, bool], Compiled]:
    """`Peer.compile` of an attention that JAX traces; `load` imports it."""

    def compile_loaded(case: Case, with_gradients: bool, is_tuned: bool) -> Compiled:
        return compile_jax(load(), case, with_gradients, is_tuned)

    return compile_loaded


def _ours(implementation: str | Backend) -> Attention:
    return partial(flash_attention, implementation=implementation)


def _jax_nn(implementation: str) -> Attention:
    return partial(jax.nn.dot_product_attention, implementation=implementation)


def _in_room(name: str) -> Attention:
    """The `attention` of a module beside this one."""
    return importlib.import_module(name).attention


def _pallas_op(name: str) -> ModuleType:
    """One of the kernels that JAX brings along."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is deprecated", DeprecationWarning)
        return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def _mha(*blocks: int) -> Attention:
    module = _pallas_op("attention")
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
    # It warns of each call that its autotuner has not seen, which none has.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return partial(module.dot_product_attention, implementation=implementation)


def _require_one_query(query: jax.Array) -> None:
    """Of several in a row, what decodes lets the earlier see fewer keys than the last."""
    if query.shape[1] != 1:
        raise NotImplementedError(f"it decodes one query a row, not {query.shape[1]}")


def decoding(implementation: str | Backend, page_size: int | None = None) -> Attention:
    """`flash_decode` of a contiguous cache, or of one in pages."""

    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        key_value_seq_lengths: jax.Array,
    ) -> jax.Array:
        _require_one_query(query)
        batch, capacity = key.shape[:2]
        page_table = None
        if page_size is not None:
            # A view of the cache's own memory, which costs nothing. That the table names its pages
            # in order the kernel cannot know.
            pages = capacity // page_size
            page_table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
            key, value = (x.reshape(batch * pages, page_size, *x.shape[2:]) for x in (key, value))
        return flash_decode(
            query,
            key,
            value,
            key_value_seq_lengths,
            page_table=page_table,
            implementation=implementation,
        )

    return attention


def given_lengths(load: Callable[[], Attention]) -> Callable[[Case, bool, bool], Compiled]:
    """`traced`, of an attention that must be told lengths, also where they are all the same.

    They are an argument, as whoever generates has it: a constant of equal numbers XLA would write
    anew in each call, by a kernel of a microsecond.
    """
    compile_loaded = traced(load)

    def compile_told(case: Case, with_gradients: bool, is_tuned: bool) -> Compiled:
        if case.key_value_seq_lengths is not None:
            return compile_loaded(case, with_gradients, is_tuned)
        full = (case.S,) * case.B
        told = dataclasses.replace(case, key_value_seq_lengths=full)
        compiled = compile_loaded(told, with_gradients, is_tuned)
        lengths = {"key_value_seq_lengths": jnp.array(full, jnp.int32)}

        def call(primals: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
            return compiled.call(primals, others | lengths, dout)

        return dataclasses.replace(compiled, call=call)

    return compile_told


def _pallas_decode() -> Attention:
    module = _pallas_op("decode_attention")

    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        key_value_seq_lengths: jax.Array | None = None,
    ) -> jax.Array:
        _require_one_query(query)
        return module.gqa(query[:, 0], key, value, kv_seq_len=key_value_seq_lengths)[:, None]

    return attention


def _torch(backend: str, case: Case, with_gradients: bool, is_tuned: bool) -> Compiled:
    """PyTorch compiles nothing, so that there is nothing to tune."""
    module = importlib.import_module("torch_sdpa")
    return Compiled(module.program(backend, case, with_gradients))


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, traced(partial(_ours, "triton"))),
        Peer("ours-xla", traced(partial(_ours, "xla"))),
        Peer(DECODE, given_lengths(partial(decoding, "triton")), _LENGTHS, has_gradients=False),
        Peer(
            "ours-paged",
            given_lengths(partial(decoding, "triton", 64)),
            _LENGTHS,
            has_gradients=False,
        ),
        Peer(CUDNN, traced(partial(_jax_nn, "cudnn")), _NN_OPTIONS),
        Peer("jax-xla", traced(partial(_jax_nn, "xla")), _NN_OPTIONS),
        Peer("mha", traced(_mha), _CAUSAL),
        # The forward's block_q and block_k, those of its scan for dk and dv, those of that for dq.
        # It needs the second of the former to be the first of the latter.
        Peer("mha-128x64", traced(partial(_mha, 128, 64, 64, 64, 64, 64)), _CAUSAL),
        Peer("mha-128x32", traced(partial(_mha, 128, 32, 64, 128, 128, 64)), _CAUSAL),
        Peer("mha-64x64", traced(partial(_mha, 64, 64, 32, 64, 64, 32)), _CAUSAL),
        Peer("tokamax-triton", traced(partial(_tokamax, "triton"))),
        Peer("tokamax-mosaic", traced(partial(_tokamax, "mosaic"))),
        Peer("pallas-decode", traced(_pallas_decode), _LENGTHS, has_gradients=False),
        Peer("torch-flash", partial(_torch, "flash"), _CAUSAL),
        Peer("torch-cudnn", partial(_torch, "cudnn"), _CAUSAL),
        # What this project's forward is a port of, in Triton itself.
        Peer("triton", traced(partial(_in_room, "triton_flash2")), _CAUSAL, has_gradients=False),
        Peer("flash-1", traced(partial(_in_room, "flash1")), _CAUSAL, has_gradients=False),
        Peer("three-steps", traced(partial(_in_room, "three_steps")), _CAUSAL),
    )
}

# Those that a suite asks by default; the others are parts of one suite, or for a look beside.
DEFAULT = (
    OURS,
    CUDNN,
    "jax-xla",
    "mha-128x64",
    "tokamax-triton",
    "tokamax-mosaic",
    "torch-flash",
    "torch-cudnn",
    "triton",
)
QUICK = (OURS, CUDNN, "jax-xla")


def _grid(block_q: tuple[int, ...], block_k: tuple[int, ...]) -> tuple[Config, ...]:
    return tuple(Config(*sizes) for sizes in itertools.product(block_q, block_k, (4, 8), (2, 3)))


# What `--sweep` tries, by kernel.
GRIDS = {
    "forward": _grid((64, 128, 256), (32, 64, 128)),
    "key_gradient": _grid((32, 64, 128), (64, 128)),
    "value_gradient": _grid((32, 64), (64, 128)),
    "query_gradient": _grid((64, 128), (32, 64, 128)),
}
DECODE_GRID = tuple(
    DecodeConfig(Config(config.SMALLEST, *sizes), splits)
    for *sizes, splits in itertools.product((32, 64, 128), (2, 4), (3, 4), (1, 2, 4, 8, 16, 32))
)

# What a program may have of shared memory on a Hopper.
_SHARED_BYTES = 227 * 1024


def _name(cut: Config) -> str:
    return f"{cut.block_q}x{cut.block_k}-{cut.num_warps}w-{cut.num_stages}s"


def sweep_backends(kernel: str, case: Case) -> dict[str, TritonBackend]:
    """This library with one kernel in each config of its grid, the others as they are picked."""
    dims = Dims(case.B, case.T, case.S, case.N, case.K, case.H, case.value_head_dim)
    capability = Device.of(jnp.zeros(())).compute_capability
    precision = options.precision(None)
    spec = AttentionSpec(logits_soft_cap=case.logits_soft_cap, precision=precision)
    picked = config.pick(spec, dims, jnp.dtype(case.dtype), capability)
    return {
        _name(cut): TritonBackend(configs=dataclasses.replace(picked, **{kernel: cut}))
        for cut in GRIDS[kernel]
    }


def decode_backends(case: Case) -> dict[str, TritonBackend]:
    """This library with the kernel that decodes in each config that fits."""
    row_bytes = (case.H + case.value_head_dim) * jnp.dtype(case.dtype).itemsize
    return {
        f"{_name(cut.tile)}-{cut.splits}p": TritonBackend(decode_config=cut)
        for cut in DECODE_GRID
        if cut.tile.block_k * row_bytes * cut.tile.num_stages <= _SHARED_BYTES
    }


@dataclass(frozen=True)
class Sweep:
    """A kernel of this library in several configs.

    Attributes:
      peer: what runs the kernel, in the config that is picked.
      program: what that runs, of the same attention by a given backend.
      backends: those to try on a case, by name.
      with_gradients: whether they are timed with gradients, or without.
    """

    peer: Peer
    program: Callable[[TritonBackend], Callable[[Case, bool, bool], Compiled]]
    backends: Callable[[Case], dict[str, TritonBackend]]
    with_gradients: bool

    def peers(self, case: Case) -> list[Peer]:
        """A row for each of the backends."""
        return [
            dataclasses.replace(self.peer, name=name, compile=self.program(backend))
            for name, backend in self.backends(case).items()
        ]


SWEEPS = {
    # A forward kernel is best seen without a backward; others have no part without one.
    **{
        kernel: Sweep(
            PEERS[OURS],
            lambda backend: traced(partial(_ours, backend)),
            partial(sweep_backends, kernel),
            with_gradients=kernel != "forward",
        )
        for kernel in GRIDS
    },
    "decode": Sweep(
        PEERS[DECODE],
        lambda backend: given_lengths(partial(decoding, backend)),
        decode_backends,
        with_gradients=False,
    ),
}
