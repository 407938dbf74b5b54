"""How decoding is called: what is refused and how, sizes of nothing, JAX's transforms, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import INTERPRET, name_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from malformed import ints, zeros

from pallas_flash import (
    KVCache,
    PagedKVCache,
    flash_attention,
    flash_attention_with_lse,
    flash_decode,
    flash_decode_with_lse,
)
from pallas_flash.backends.xla import XlaBackend

ON_GPU = ["triton"] if jax.default_backend() == "gpu" else []
XLA = XlaBackend(block_q=16, block_k=16)


@pytest.fixture(params=[XLA, INTERPRET, *ON_GPU], ids=name_of)
def implementation(request):
    return request.param


def base() -> dict[str, object]:
    """B = 2, T = 3, S = 5, N = 4, K = 2, H = 8 and Hv = 6."""
    return {
        "query": zeros(2, 3, 4, 8),
        "key_cache": zeros(2, 5, 2, 8),
        "value_cache": zeros(2, 5, 2, 6),
        "lengths": ints(2),
    }


PAGES = {"key_cache": zeros(7, 16, 2, 8), "value_cache": zeros(7, 16, 2, 6)}

# The arguments, the name that the message begins with, and what is in it.
MALFORMED = [
    ({"query": zeros(4, 8)}, "query", "[B, N, H] or [B, T, N, H], got float32[4, 8]"),
    ({"query": zeros(1, 2, 3, 4, 8)}, "query", "got float32[1, 2, 3, 4, 8]"),
    ({"query": zeros(2, 17, 4, 8)}, "query", "at most 16 tokens"),
    ({"query": zeros(2, 3, 5, 8)}, "key_cache", "divides query's 5, got float32[2, 5, 2, 8]"),
    ({"query": zeros(2, 3, 0, 8)}, "query", "at least one head"),
    ({"query": zeros(2, 3, 4, 16)}, "key_cache", "head dim 16, got float32[2, 5, 2, 8]"),
    ({"query": zeros(3, 3, 4, 8)}, "key_cache", "query's batch 3 first, or a page_table beside it"),
    ({"key_cache": zeros(2, 5, 8)}, "key_cache", "[B, S, K, H], or with a page table"),
    ({"key_cache": zeros(2, 5, 0, 8)}, "key_cache", "at least one head"),
    ({"value_cache": zeros(2, 5, 2)}, "value_cache", "[B, S, K, Hv], or with a page table"),
    ({"value_cache": zeros(2, 6, 2, 6)}, "value_cache", "key_cache's sizes [2, 5, 2, Hv]"),
    ({"value_cache": zeros(2, 5, 2, 0)}, "value_cache", "head dim of at least 1"),
    (
        {"key_cache": zeros(2, 5, 2, 8, dtype="bfloat16")},
        "query, key_cache, value_cache",
        "one dtype for all three, one of float32, bfloat16, float16, got query float32, "
        "key_cache bfloat16, value_cache float32",
    ),
    ({name: x.astype("int32") for name, x in base().items()}, "query, key_cache", "query int32"),
    ({"lengths": ints(3)}, "lengths", "an integer array of shape [2], got int32[3]"),
    ({"lengths": 3}, "lengths", "an integer array of shape [2]"),
    ({"lengths": zeros(2)}, "lengths", "got float32[2]"),
    ({"lengths": zeros(2, dtype="bool")}, "lengths", "got bool[2]"),
    ({"lengths": np.array([5, 6])}, "lengths", "cache's 5 positions for row 1, got 6"),
    ({"lengths": [0, -1]}, "lengths", "from 0 to the cache's 5 positions for row 1, got -1"),
    ({"lengths": None}, "lengths", "an array, got NoneType"),
    ({"page_table": ints(2, 0), **PAGES}, "page_table", "[2, at least 1], got int32[2, 0]"),
    ({"page_table": ints(3, 4), **PAGES}, "page_table", "[2, at least 1], got int32[3, 4]"),
    ({"page_table": ints(2), **PAGES}, "page_table", "[2, at least 1], got int32[2]"),
    ({"page_table": zeros(2, 4), **PAGES}, "page_table", "got float32[2, 4]"),
    (
        {
            "page_table": ints(2, 4),
            "key_cache": zeros(0, 16, 2, 8),
            "value_cache": zeros(0, 16, 2, 6),
        },
        "key_cache",
        "at least one page, got float32[0, 16, 2, 8]",
    ),
    ({"page_table": ints(2, 4), **PAGES, "lengths": [64, 65]}, "lengths", "cache's 64 positions"),
    (
        {"page_table": np.broadcast_to(np.int32(0), (2, 2**25 + 1)), **PAGES},
        "page_table",
        "at most 536870912 positions a row, got 536870928",
    ),
    ({"sinks": zeros(3)}, "sinks", "a float array [N] = [4], got float32[3]"),
    ({"scale": "large"}, "scale", "a real number"),
    ({"local_window_size": -1}, "local_window_size", "got -1"),
    ({"logits_soft_cap": 0}, "logits_soft_cap", "got 0"),
    ({"precision": "exact"}, "precision", "got 'exact'"),
    ({"implementation": "cudnn"}, "implementation", "got 'cudnn'"),
]


def directly(call: dict[str, object]) -> None:
    flash_decode(**call)


def traced(call: dict[str, object]) -> None:
    arrays = {key: x for key, x in call.items() if isinstance(x, jax.Array)}
    rest = {key: x for key, x in call.items() if key not in arrays}
    jax.eval_shape(lambda arrays: flash_decode_with_lse(**arrays, **rest), arrays)


@pytest.mark.parametrize("way", [directly, traced], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("arguments", "name", "message"), MALFORMED)
def test_malformed_call(arguments, name, message, way):
    with pytest.raises(ValueError, match=f"^{name}.*: expected ") as caught:
        way(base() | arguments)
    assert message in str(caught.value)


@pytest.mark.skipif(bool(ON_GPU), reason="triton can run here")
def test_a_named_implementation_does_not_fall_back():
    with pytest.raises(
        NotImplementedError, match="triton: the kernels need an NVIDIA GPU"
    ) as caught:
        flash_decode(**base(), implementation="triton")
    assert "lengths int32[2]" in str(caught.value)


def test_there_is_no_derivative(implementation):
    call = base()
    query = call.pop("query")

    def loss(query):
        return jnp.sum(flash_decode(query, **call, implementation=implementation))

    for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="flash_decode offers no derivatives"):
            transform(loss)(query)


def normal(rng, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def drawn(seed: int, B: int = 3, T: int = 2, S: int = 40) -> tuple[jax.Array, ...]:
    """query, caches, lengths."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T, 4, 8), (B, S, 2, 8), (B, S, 2, 8))
    lengths = jnp.asarray(rng.integers(min(T, S), S, B, endpoint=True), jnp.int32)
    return *(normal(rng, *shape) for shape in shapes), lengths


def as_attention(query, key, value, lengths, **options):
    """What decoding is."""
    return flash_attention_with_lse(
        query,
        key,
        value,
        is_causal=True,
        query_offset=lengths - query.shape[1],
        key_value_seq_lengths=lengths,
        implementation="xla",
        **options,
    )


def close(x, y, tolerance: float = 2e-6) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), x, y
    )


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"S": 0, "T": 1}, "pages"], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("is_wide", [False, True], ids=["", "x64"])
def test_sizes_of_nothing(implementation, sizes, has_sinks, is_wide):
    page_table = None
    if sizes == "pages":
        query, key, value = zeros(0, 2, 4, 8), zeros(4, 16, 2, 8), zeros(4, 16, 2, 8)
        page_table = ints(0, 3)
    else:
        query, key, value, _ = drawn(0, **sizes)
    lengths = ints(query.shape[0])
    sinks = jnp.arange(4.0) if has_sinks else None
    with jax.enable_x64(is_wide):
        got = flash_decode_with_lse(
            query,
            key,
            value,
            lengths,
            sinks=sinks,
            page_table=page_table,
            implementation=implementation,
        )
    assert got.out.shape == query.shape
    for x in got:
        assert x.dtype == jnp.float32
        assert not x.weak_type
    assert not got.out.any()
    expected = jnp.broadcast_to(sinks if has_sinks else -jnp.inf, query.shape[:3])
    np.testing.assert_array_equal(got.lse, expected)


def test_the_last_token_alone_has_no_axis(implementation, seed):
    query, *caches = drawn(seed)
    whole = flash_decode_with_lse(query, *caches, implementation=implementation)
    last = flash_decode_with_lse(query[:, -1], *caches, implementation=implementation)
    close(last, jax.tree.map(lambda x: x[:, -1], whole))
    assert flash_decode(query[:, -1], *caches).shape == (3, 4, 8)


def test_jit_and_eager_agree(implementation, seed):
    decode = functools.partial(flash_decode_with_lse, implementation=implementation)
    arguments = drawn(seed)
    close(jax.jit(decode)(*arguments), decode(*arguments))
    close(decode(*arguments), as_attention(*arguments))


@pytest.mark.parametrize(
    "mapped",
    [(0, 0, 0, 0), (0, None, None, None), (None, None, None, 0), (None, 1, None, None)],
    ids=["all", "query", "lengths", "key"],
)
def test_vmap_is_the_loop(implementation, mapped, seed):
    decode = functools.partial(flash_decode_with_lse, implementation=implementation)
    draws = [drawn(seed + i) for i in range(3)]
    arguments = [
        draws[0][i] if axis is None else jnp.stack([draw[i] for draw in draws], axis)
        for i, axis in enumerate(mapped)
    ]
    got = jax.vmap(decode, mapped)(*arguments)
    for j in range(3):
        each = [
            x if a is None else jnp.take(x, j, a) for x, a in zip(arguments, mapped, strict=True)
        ]
        close(jax.tree.map(lambda x, j=j: x[j], got), as_attention(*each))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "axes", [("data", None, None), ("data", None, "model")], ids=["batch", "batch-and-heads"]
)
def test_sharded_operands(kind, axes, seed, on_cpu):
    arguments = drawn(seed, B=4)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind), devices=devices)
    for backend in (XLA, INTERPRET):
        decode = jax.jit(functools.partial(flash_decode_with_lse, implementation=backend))
        with jax.set_mesh(mesh):
            pattern = NamedSharding(mesh, PartitionSpec(*axes))
            rows = NamedSharding(mesh, PartitionSpec("data"))
            sharded = [jax.device_put(x, pattern) for x in arguments[:3]]
            got = decode(*sharded, jax.device_put(arguments[3], rows))
        close(jax.tree.map(np.asarray, got), as_attention(*arguments))
        if kind is AxisType.Explicit:
            assert got.out.sharding.spec[:3] == axes


def test_inside_shard_map(seed, on_cpu):
    arguments = drawn(seed, B=4)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    for backend in (XLA, INTERPRET):
        each = jax.shard_map(
            functools.partial(flash_decode_with_lse, implementation=backend),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
            # Pallas's interpreter mixes what varies with indices that do not.
            check_vma=backend is not INTERPRET,
        )
        close(jax.tree.map(np.asarray, each(*arguments)), as_attention(*arguments))


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache], ids=lambda kind: kind.__name__)
def test_generation_token_by_token_is_one_prefill(implementation, kind, seed):
    """Of two rows, with a cache as a loop's carry; the last chunk is of four tokens."""
    rng = np.random.default_rng(seed)
    query, key, value = (normal(rng, 2, 30, heads, 8) for heads in (4, 2, 2))
    start = np.array([20, 7], np.int32)
    if kind is KVCache:
        cache = kind.from_prefill(key[:, :20], value[:, :20], start, capacity=32)
    else:
        table = jnp.asarray([[3, 0], [5, 2]], jnp.int32)
        cache = kind.from_prefill(
            key[:, :20], value[:, :20], start, page_table=table, pages=6, page_size=16
        )

    def decode(cache, query, key, value):
        cache = cache.append(key, value)
        out = flash_decode(
            query,
            cache.key,
            cache.value,
            cache.lengths,
            page_table=cache.page_table,
            implementation=implementation,
        )
        return cache, out

    def chunk(x, first, count):
        return jnp.stack([x[row, start[row] + first :][:count] for row in range(2)])

    news = [jnp.moveaxis(chunk(x, 0, 5), 1, 0) for x in (query, key, value)]
    cache, outs = jax.lax.scan(lambda cache, new: decode(cache, *new), cache, tuple(news))
    cache, last = decode(cache, *(chunk(x, 5, 4) for x in (query, key, value)))
    got = jnp.concatenate([jnp.moveaxis(outs, 0, 1), last], axis=1)
    expected = flash_attention(query, key, value, is_causal=True, implementation="xla")
    close(got, chunk(expected, 0, 9))
    np.testing.assert_array_equal(cache.lengths, start + 9)
