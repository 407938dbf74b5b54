"""The key/value caches under JAX's transforms and on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import (
    CAPACITY,
    LENGTHS,
    NEW,
    PAGES,
    PAGES_PER_ROW,
    B,
    H,
    Hv,
    K,
    T,
    appended,
    assert_holds,
    assert_same_rows,
    both_kinds,
    both_ways,
    full,
    jitted,
    normal,
    padded,
    page_table,
    place,
    prefilled,
    rows_of,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash.cache import KVCache, PagedKVCache


@both_kinds
def test_scan_carry(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    key, value = normal(rng, B, 7)

    @jax.jit
    def decode(cache, key, value):
        steps = (key.swapaxes(0, 1), value.swapaxes(0, 1))
        return jax.lax.scan(lambda cache, new: (cache.append(*new), cache.lengths), cache, steps)

    got, lengths = decode(cache, key, value)
    assert_holds(got, appended(cache, key, value))
    np.testing.assert_array_equal(lengths, np.array(LENGTHS) + np.arange(7)[:, None])


@both_kinds
def test_types_are_never_weak(kind, rng):
    """One program serves every step, and a loop's carry keeps its type."""
    key, value = jnp.full((B, T, K, H), 1.0), jnp.full((B, T, K, Hv), 1.0)
    lengths = jnp.full(B, 3)
    assert key.weak_type
    assert lengths.weak_type
    cache = prefilled(kind, key, value, lengths, page_table(rng))
    traces = []

    @jax.jit
    def step(cache, key, value):
        traces.append(cache)
        return cache.append(key, value)

    for _ in range(3):
        expected = appended(cache, key[:, :1], value[:, :1])
        cache = step(cache, key[:, 0], value[:, 0])
        assert_holds(cache, expected)
    assert len(traces) == 1


@both_kinds
def test_vmap(kind, rng):
    caches = [
        prefilled(kind, *normal(rng, B, T), rng.integers(0, T, B), page_table(rng))
        for _ in range(3)
    ]
    news = [normal(rng, B, 2) for _ in caches]
    stacked, new = (jax.tree.map(lambda *xs: jnp.stack(xs), *trees) for trees in (caches, news))
    got = jax.vmap(kind.append)(stacked, *new)
    for i, (cache, new) in enumerate(zip(caches, news, strict=True)):
        assert_holds(jax.tree.map(lambda x, i=i: x[i], got), appended(cache, *new))


@both_kinds
def test_vmap_of_counts(kind, rng):
    caches = [prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng)) for _ in range(2)]
    counts = [[0, 3, 2], [3, 1, 0]]
    news = [padded(normal(rng, B, 3), x) for x in counts]
    stacked, new = (jax.tree.map(lambda *xs: jnp.stack(xs), *trees) for trees in (caches, news))
    got = jax.vmap(kind.append)(stacked, *new, jnp.asarray(counts))
    for i, cache in enumerate(caches):
        expected = appended(cache, *news[i], counts=counts[i])
        assert_holds(jax.tree.map(lambda x, i=i: x[i], got), expected)
    # As inside `jax.jit`, nothing is refused.
    got = jax.vmap(kind.append)(stacked, *new, jnp.asarray([[4, 0, 0], [0, -1, 3]]))
    assert got.lengths.tolist() == [[CAPACITY + 1, 15, 20], [0, CAPACITY + 1, 23]]


def test_vmap_of_the_contiguous_form(rng):
    caches = [
        prefilled(PagedKVCache, *normal(rng, B, T), LENGTHS, page_table(rng)) for _ in range(2)
    ]
    got = jax.vmap(PagedKVCache.contiguous)(jax.tree.map(lambda *xs: jnp.stack(xs), *caches))
    for i, cache in enumerate(caches):
        assert_same_rows(jax.tree.map(lambda x, i=i: x[i], got), cache)


@both_ways
@both_kinds
def test_x64(kind, way, rng):
    prefill, new, table = normal(rng, B, T), normal(rng, B, 2), page_table(rng)
    with jax.enable_x64(True):
        lengths = jnp.asarray(LENGTHS, "int64")
        cache = prefilled(kind, *prefill, lengths, jnp.asarray(table, "int64"))
        np.testing.assert_array_equal(rows_of(cache)[2][0], prefill[0][2])
        wide = dataclasses.replace(cache, lengths=lengths)
        assert_holds(way(wide, *new), appended(cache, *new))
        counts = [2, 0, 1]
        got = way(wide, *new, jnp.asarray(counts, "int64"))
        assert_holds(got, appended(cache, *new, counts=counts))


@both_kinds
def test_lengths_that_int32_cannot_hold_do_not_wrap(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    with jax.enable_x64(True):
        far = dataclasses.replace(cache, lengths=jnp.asarray([2**32, 2**40 + 1, -(2**32)], "int64"))
        got = jitted(far, *normal(rng, B))
        counts = jnp.asarray([2**32, -(2**40), 1], "int64")
        lengths = jitted(cache, *normal(rng, B, 1), counts).lengths
    np.testing.assert_array_equal(got.key, cache.key)
    np.testing.assert_array_equal(got.value, cache.value)
    assert lengths.tolist() == [CAPACITY + 1, CAPACITY + 1, 21]


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"^key: expected .* float64\["):
        KVCache.empty(B, CAPACITY, K, H, "float32").append(**{**NEW, "key": np.zeros((B, K, H))})


@both_kinds
def test_a_cache_is_a_frozen_pytree(kind, rng):
    cache = prefilled(kind, *normal(rng, B, T), LENGTHS, page_table(rng))
    names = [field.name for field in dataclasses.fields(kind)]
    paths, tree = jax.tree_util.tree_flatten_with_path(cache)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [f".{name}" for name in names]
    # Whatever a transformation puts there.
    held = tree.unflatten(names)
    assert [getattr(held, name) for name in names] == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.lengths = cache.lengths
    shapes = jax.eval_shape(kind.append, cache, **NEW)
    assert shapes.lengths.shape == (B,)
    assert shapes.key.shape == cache.key.shape


@pytest.mark.parametrize("counts", [None, [3, 1, 2]], ids=["all", "counts"])
@both_kinds
def test_gradient(kind, counts, rng):
    """What was written over, or dropped, or is padding, has none."""
    cache = full(kind, rng)
    cotangents = [
        jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (cache.key, cache.value)
    ]

    def loss(held, new, cache):
        got = dataclasses.replace(cache, key=held[0], value=held[1]).append(*new, counts)
        return sum(jnp.vdot(x, y) for x, y in zip((got.key, got.value), cotangents, strict=True))

    arguments = ((cache.key, cache.value), normal(rng, B, 3), cache)
    held, new = jax.jit(jax.grad(loss, (0, 1)))(*arguments)
    for old_grad, new_grad, cotangent in zip(held, new, map(np.array, cotangents), strict=True):
        expected = np.zeros(new_grad.shape, np.float32)
        for row, length in enumerate(cache.lengths.tolist()):
            for i in range(3 if counts is None else counts[row]):
                where = place(cache, row, length + i)
                if where is not None:
                    expected[row, i] = cotangent[where]
                    cotangent[where] = 0
        np.testing.assert_array_equal(new_grad, expected)
        np.testing.assert_array_equal(old_grad, cotangent)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind), devices=devices)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("kind", "prefill_spec", "row_spec", "spec"),
    [
        (KVCache, ("data", None, "model"), ("data",), ("data", None, "model")),
        (KVCache, (None, "data", "model"), (), (None, "data", "model")),
        # A pool has no rows.
        (PagedKVCache, ("data", None, "model"), ("data",), (None, None, "model")),
    ],
    ids=["rows", "length", "paged"],
)
@both_ways
def test_sharded_cache(kind, prefill_spec, row_spec, spec, way, axes, rng):
    batch = 4
    table = np.arange(batch * PAGES_PER_ROW).reshape(batch, PAGES_PER_ROW).astype(np.int32)
    prefill, new = normal(rng, batch, T), normal(rng, batch, 3)
    lengths = np.array([*LENGTHS, 1], np.int32)
    expected = prefilled(kind, *prefill, lengths, table)
    expected_after = appended(expected, *new)
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        prefill = jax.device_put(prefill, NamedSharding(mesh, PartitionSpec(*prefill_spec)))
        rows = NamedSharding(mesh, PartitionSpec(*row_spec))
        new, lengths, table = jax.device_put((new, lengths, table), rows)
        cache = prefilled(kind, *prefill, lengths, table)
        jax.tree.map(np.testing.assert_array_equal, cache, expected)
        got = way(cache, *new)
        in_rows = got.contiguous()
    assert_holds(got, expected_after)
    jax.tree.map(np.testing.assert_array_equal, in_rows, jax.device_get(got).contiguous())
    for x in (cache.key, cache.value, got.key, got.value):
        assert x.sharding.spec[:3] == spec
    if axes is AxisType.Explicit:
        assert in_rows.key.sharding.spec[:3] == prefill_spec


@pytest.mark.usefixtures("on_cpu")
@both_kinds
def test_sharded_counts(kind, rng):
    batch, counts = 4, [3, 0, 2, 1]
    table = np.arange(batch * PAGES_PER_ROW).reshape(batch, PAGES_PER_ROW).astype(np.int32)
    prefill, new = normal(rng, batch, T), padded(normal(rng, batch, 3), counts)
    lengths = np.array([*LENGTHS, 1], np.int32)
    expected = appended(prefilled(kind, *prefill, lengths, table), *new, counts=counts)
    mesh = mesh_of(AxisType.Explicit)
    heads, rows = (
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data", None, "model"), ("data",))
    )
    with jax.set_mesh(mesh):
        prefill, new = jax.device_put((prefill, new), heads)
        lengths, table, counts = jax.device_put((lengths, table, np.array(counts)), rows)
        got = jitted(prefilled(kind, *prefill, lengths, table), *new, counts)
    assert_holds(got, expected)


@pytest.mark.usefixtures("on_cpu")
@both_kinds
def test_inside_shard_map(kind, rng):
    """Every device has rows of its own and, where there are pages, a pool of its own."""
    batch = 4
    table = np.tile(rng.permutation(PAGES)[:PAGES_PER_ROW].astype(np.int32), (batch, 1))
    prefill, new = normal(rng, batch, T), normal(rng, batch, 3)
    lengths = np.array([*LENGTHS, 1], np.int32)

    def decode(prefill, lengths, table, new):
        return prefilled(kind, *prefill, lengths, table).append(*new)

    sharded = jax.shard_map(
        decode,
        mesh=mesh_of(AxisType.Auto),
        in_specs=PartitionSpec(("data", "model")),
        out_specs=PartitionSpec(("data", "model")),
    )
    parts = [
        decode(*jax.tree.map(lambda x, i=i: x[i : i + 1], (prefill, lengths, table, new)))
        for i in range(batch)
    ]
    expected = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    jax.tree.map(np.testing.assert_array_equal, sharded(prefill, lengths, table, new), expected)
