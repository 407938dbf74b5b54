"""Every form of input that the contract allows is taken, and means the same as the plainest form."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.reference import reference_attention
from pallas_flash.spec import AttentionOutput
from pallas_flash.testing import DIFFERENTIABLE, Case, Inputs, compare, evaluate, make_inputs

SIZES = {"T": 5, "S": 7, "N": 4, "K": 2, "H": 8, "Hv": 6}

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 3)},
    "offset": {"query_offset": (2,), "is_causal": True},
    "query-lengths": {"query_seq_lengths": (4,)},
    "key-lengths": {"key_value_seq_lengths": (6,)},
    "segments": {"segments": 2},
    "bias": {"bias": "BNTS"},
    "bias-heads": {"bias": "NS"},
    "mask": {"mask": "BNTS"},
    "mask-keys": {"mask": "BS"},
    "cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": "traced"},
    "all": {
        "is_causal": True,
        "local_window_size": (4, 1),
        "query_offset": (2,),
        "query_seq_lengths": (4,),
        "key_value_seq_lengths": (6,),
        "segments": 2,
        "bias": "BNTS",
        "mask": "BTS",
        "logits_soft_cap": 2.0,
        "sinks": True,
        "scale": "traced",
    },
}


def case_of(option: str, batch: int, **sizes: int) -> Case:
    """A case with one option or all; its numbers for each batch row differ."""
    options = {
        name: tuple(x[0] - i % 3 for i in range(batch)) if is_per_row(name) else x
        for name, x in OPTIONS[option].items()
    }
    return Case(**{"B": batch, **SIZES, **sizes}, **options)


def is_per_row(name: str) -> bool:
    return name in ("query_offset", "query_seq_lengths", "key_value_seq_lengths")


def run(inputs: Inputs, attention=flash_attention_with_lse) -> dict[str, jax.Array]:
    """Outputs and gradients. Not jitted as a whole, so that like calls share what is compiled."""
    primals = {name: jnp.asarray(x) for name, x in inputs.arrays.items() if name in DIFFERENTIABLE}
    rest = {name: x for name, x in inputs.arrays.items() if name not in primals}

    def call(primals):
        return attention(**primals, **rest, **inputs.options)

    result, vjp = jax.vjp(call, primals)
    (gradients,) = vjp(AttentionOutput(jnp.asarray(inputs.dout), jnp.asarray(inputs.dlse)))
    return {**result._asdict(), **{f"d{name}": x for name, x in gradients.items()}}


def with_batch(inputs: Inputs, old: tuple[int, ...], new: tuple[int, ...]) -> Inputs:
    """The same arrays, those with the batch dims `old` in front with `new` there."""

    def change(name, x):
        shared = name in ("sinks", "scale") or x.shape[: len(old)] != old
        return x if shared else x.reshape(new + x.shape[len(old) :])

    arrays = {name: change(name, x) for name, x in inputs.arrays.items()}
    return Inputs(arrays, inputs.options, change("dout", inputs.dout), change("dlse", inputs.dlse))


def assert_same(got: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    """Bit for bit, whatever the batch dims."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype, name
        assert got[name].size == x.size, name
        np.testing.assert_array_equal(np.ravel(got[name]), np.ravel(x), name)


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 6, 1)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_batch_dims(option, batch, seed):
    size = int(np.prod(batch, dtype=int))
    flat = make_inputs(case_of(option, size), seed)
    shaped = with_batch(flat, (size,), batch)
    got = run(shaped)
    assert got["out"].shape == (*batch, SIZES["T"], SIZES["N"], SIZES["Hv"])
    assert got["lse"].shape == (*batch, SIZES["T"], SIZES["N"])
    assert all(got[f"d{x}"].shape == shaped.arrays[x].shape for x in ("query", "key", "value"))
    assert_same(got, run(flat))


@pytest.mark.parametrize("option", ["plain", "all"])
def test_the_flat_call_is_right(option, seed):
    wrong = [
        str(c)
        for c in compare(flash_attention_with_lse, case_of(option, 6), seed)
        if not c.is_right
    ]
    assert not wrong


BROADCAST = [
    shape
    for dims in range(6)
    for shape in itertools.product((0, 1), repeat=dims)
    if dims < 5 or sum(shape) in (1, 2, 5)
]


@pytest.mark.parametrize("shape", BROADCAST, ids=lambda x: "".join("1x"[i] for i in x) or "scalar")
def test_pair_arrays_broadcast(shape, seed):
    """A bias and a mask, each axis of [2, 3, N, T, S] whole (x), 1 or missing."""
    inputs = with_batch(make_inputs(case_of("plain", 6), seed), (6,), (2, 3))
    full = (2, 3, SIZES["N"], SIZES["T"], SIZES["S"])
    sizes = tuple(
        whole if axis else 1
        for axis, whole in zip(shape, full[len(full) - len(shape) :], strict=True)
    )
    rng = np.random.default_rng(seed)
    bias, mask = rng.standard_normal(sizes).astype(np.float32), rng.random(sizes) < 0.7
    whole = {"bias": np.broadcast_to(bias, full), "mask": np.broadcast_to(mask, full)}
    got, expected = (
        run(Inputs({**inputs.arrays, **pair}, {}, inputs.dout, inputs.dlse))
        for pair in ({"bias": bias, "mask": mask}, whole)
    )
    assert got["dbias"].shape == sizes
    missing = tuple(range(5 - len(sizes)))
    ones = tuple(i for i, size in enumerate(sizes) if size == 1)
    summed = np.sum(np.sum(expected.pop("dbias"), missing), ones, keepdims=True)
    np.testing.assert_allclose(got.pop("dbias"), summed, rtol=1e-4, atol=1e-5)
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


def forms_of(dtype: str):
    return lambda x: np.asarray(x, dtype)


@pytest.mark.parametrize(
    "form",
    [forms_of("int64"), forms_of("uint8"), forms_of("int8"), jnp.asarray, np.ndarray.tolist, tuple],
    ids=["int64", "uint8", "int8", "jax", "list", "tuple-of-numpy"],
)
def test_integer_arrays(form, seed):
    """Lengths, offsets and segment ids, in whatever holds them."""
    inputs = make_inputs(case_of("all", 2), seed)
    names = [name for name, x in inputs.arrays.items() if x.dtype == np.int32]
    assert len(names) == 5
    arrays = {
        name: x if name not in names else form(x) if x.ndim == 1 or form is not tuple else x
        for name, x in inputs.arrays.items()
    }
    assert_same(run(Inputs(arrays, inputs.options, inputs.dout, inputs.dlse)), run(inputs))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint8])
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_lengths_beyond_the_arrays(dtype, x64, seed):
    """As large as the dtype allows, which says "all of them"."""
    inputs = make_inputs(case_of("plain", 2), seed)
    lengths = np.full(2, np.iinfo(dtype).max, dtype)
    with jax.enable_x64(x64):
        got = run(inputs)
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            arrays = {**inputs.arrays, name: lengths}
            assert_same(run(Inputs(arrays, {}, inputs.dout, inputs.dlse)), got)


def test_negative_lengths_are_none_at_all(seed):
    inputs = make_inputs(case_of("plain", 2), seed)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        arrays = {**inputs.arrays, name: np.array([-1, -(2**31)], np.int32)}
        got = run(Inputs(arrays, {}, inputs.dout, inputs.dlse))
        assert np.isneginf(got.pop("lse")).all()
        assert not any(np.any(x) for x in got.values())


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, np.array, jnp.float32])
def test_scale_and_cap_as_numpy_scalars(number, seed):
    inputs = make_inputs(case_of("bias", 2), seed)
    cap = 2.0 if number in (np.array, jnp.float32) else number(2)
    got, expected = (
        run(Inputs(inputs.arrays, options, inputs.dout, inputs.dlse))
        for options in (
            {"scale": number(0.25), "logits_soft_cap": cap},
            {"scale": 0.25, "logits_soft_cap": 2.0},
        )
    )
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("one", [1, np.int64(1), np.float32(1), jnp.int32(1), jnp.ones(())])
def test_scale_of_any_real_type(one, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    expected = flash_attention(**arrays, scale=1.0)
    np.testing.assert_allclose(flash_attention(**arrays, scale=one), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (np.int64(2), (2, 2)),
        (2, (2, 2)),
        ([1, 3], (1, 3)),
        ((np.uint8(1), np.int32(3)), (1, 3)),
        (2**31 - 1, None),
        (2**70, None),
        ((2**31 - 1, 0), (7, 0)),
    ],
    ids=str,
)
def test_window_forms(given, same, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    got, expected = (
        flash_attention_with_lse(**arrays, local_window_size=x, query_offset=3)
        for x in (given, same)
    )
    assert_same(got._asdict(), expected._asdict())


FARTHEST = 2**30 - 1


@pytest.mark.parametrize("form", [int, np.int32, jnp.int32, lambda x: np.array([x, x])])
@pytest.mark.parametrize(
    ("offset", "options", "sees_all"),
    [
        (FARTHEST, {}, True),
        (FARTHEST, {"is_causal": True}, True),
        (FARTHEST, {"local_window_size": (3, 3)}, False),
        (FARTHEST, {"local_window_size": (3, FARTHEST)}, False),
        (FARTHEST, {"local_window_size": 2**31 - 1}, True),
        (FARTHEST, {"local_window_size": (2**31 - 1, 0)}, True),
        (-FARTHEST, {}, True),
        (-FARTHEST, {"is_causal": True}, False),
        (-FARTHEST, {"local_window_size": (3, 3)}, False),
        (-FARTHEST, {"local_window_size": 2**31 - 1}, True),
    ],
    ids=str,
)
def test_farthest_offsets(offset, options, sees_all, form, seed):
    # The windows that see all reach FARTHEST keys back, T - 1 fewer than the last row is away.
    case = case_of("plain", 2, T=1, S=2) if sees_all else case_of("plain", 2)
    arrays = make_inputs(case, seed).arrays
    out, lse = flash_attention_with_lse(**arrays, query_offset=form(offset), **options)
    if sees_all:
        expected = flash_attention_with_lse(**arrays)
        assert_same({"out": out, "lse": lse}, expected._asdict())
    else:
        assert np.isneginf(lse).all()
        assert not np.any(out)


@pytest.mark.parametrize("form", [np.int64, np.uint8, jnp.int32, jnp.asarray, np.array])
def test_offset_forms(form, seed):
    """NumPy scalars, 0-d arrays, and weakly typed ones."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    got, expected = (
        flash_attention_with_lse(**arrays, query_offset=x, is_causal=True) for x in (form(2), 2)
    )
    assert_same(got._asdict(), expected._asdict())


def test_weakly_typed_floats():
    weak = jnp.full((2, 3, 2, 4), 0.5)
    assert weak.weak_type
    gradients = jax.grad(lambda *x: flash_attention(*x).sum(), argnums=(0, 1, 2, 3))(
        weak, weak, weak, jnp.asarray(0.5)
    )
    assert all(np.isfinite(x).all() for x in gradients)


def test_one_sides_segment_ids_serve_for_both(seed):
    inputs = make_inputs(case_of("segments", 2, S=SIZES["T"]), seed)
    arrays = dict(inputs.arrays)
    ids = arrays.pop("query_segment_ids")
    del arrays["key_value_segment_ids"]
    both, query_only, key_only = (
        run(Inputs({**arrays, **dict.fromkeys(names, ids)}, {}, inputs.dout, inputs.dlse))
        for names in (
            ("query_segment_ids", "key_value_segment_ids"),
            ("query_segment_ids",),
            ("key_value_segment_ids",),
        )
    )
    assert_same(query_only, both)
    assert_same(key_only, both)


@pytest.mark.parametrize("backend", ["xla", XlaBackend(block_q=2, block_k=3)], ids=["xla", "small"])
@pytest.mark.parametrize("empty", ["B", "T", "S", "BTS"])
@pytest.mark.parametrize("option", ["plain", "causal", "segments", "bias-heads", "mask", "all"])
def test_empty_axes(option, empty, backend, seed):
    sizes = {"B": 2, **dict.fromkeys(empty, 0)}
    batch = sizes.pop("B")
    inputs = make_inputs(case_of(option, batch, **sizes), seed)
    options = {**inputs.options, "implementation": backend}
    got = run(Inputs(inputs.arrays, options, inputs.dout, inputs.dlse))
    assert got["out"].shape == inputs.dout.shape
    assert got["lse"].shape == inputs.dlse.shape
    for name, x in inputs.arrays.items():
        if name in DIFFERENTIABLE:
            assert got[f"d{name}"].shape == x.shape
            is_sink_alone = name == "sinks" and empty == "S"
            assert is_sink_alone or not np.any(got[f"d{name}"]), name
    if empty == "S":
        expected = run(inputs, reference_attention)
        for name, x in expected.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_empty_among_several_batch_dims(option, shape, seed):
    inputs = make_inputs(case_of(option, 0), seed)
    got = run(with_batch(inputs, (0,), shape))
    assert got["out"].shape == (*shape, SIZES["T"], SIZES["N"], SIZES["Hv"])
    assert got["dkey"].shape == (*shape, SIZES["S"], SIZES["K"], SIZES["H"])


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64(dtype, option, jitted, seed):
    """16- and 32-bit inputs where JAX's own default is 64 bits: the same dtypes, the same values."""
    case = case_of(option, 2)
    inputs = make_inputs(Case(**{**vars(case), "dtype": dtype}), seed)
    backend = XlaBackend(block_q=2, block_k=3)
    inputs = Inputs(
        inputs.arrays, {**inputs.options, "implementation": backend}, inputs.dout, inputs.dlse
    )
    evaluated = evaluate if jitted else lambda attention, inputs: run(inputs, attention)
    expected = evaluated(flash_attention_with_lse, inputs)
    with jax.enable_x64(True):
        got = evaluated(flash_attention_with_lse, inputs)
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        x, y = np.asarray(x, np.float64), np.asarray(got[name], np.float64)
        np.testing.assert_allclose(y, x, rtol=1e-2 if "b" in dtype else 1e-5, atol=1e-5)


def test_x64_options_in_64_bits(seed):
    """float64 bias, sinks and scale, int64 lengths, offsets and ids, with float32 operands."""
    inputs = make_inputs(case_of("all", 2), seed)
    wide = {"f": np.float64, "i": np.int64, "b": np.bool_}
    main = ("query", "key", "value")
    arrays = {
        name: x if name in main else np.asarray(x, wide[x.dtype.kind])
        for name, x in inputs.arrays.items()
    }
    expected = run(inputs)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
        got = run(Inputs(arrays, inputs.options, inputs.dout, inputs.dlse))
    for name, x in expected.items():
        is_wide = name in ("dbias", "dsinks", "dscale")
        assert got[name].dtype == (np.float64 if is_wide else np.float32), name
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def jax_nn_calls(rng: np.random.Generator) -> dict[str, dict[str, object]]:
    """Keyword arguments for B = 2, T = 5, S = 7, N = 4, in which each row sees some key."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def mask(*shape):
        x = rng.random(shape) < 0.7
        x[..., 0] = True
        return x

    lengths = np.array([7, 3], np.int32)
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "window": {"local_window_size": (2, 4)},
        "window-int": {"local_window_size": 3},
        "window-causal": {"local_window_size": (2, 4), "is_causal": True},
        "bias-2d": {"bias": normal(5, 7)},
        "bias-3d": {"bias": normal(4, 5, 7)},
        "bias-3d-ones": {"bias": normal(1, 1, 7)},
        "bias-4d": {"bias": normal(2, 4, 5, 7)},
        "bias-batch": {"bias": normal(2, 1, 1, 7)},
        "mask-2d": {"mask": mask(5, 7)},
        "mask-1-row": {"mask": mask(1, 7)},
        "mask-3d": {"mask": mask(4, 5, 7)},
        "mask-3d-ones": {"mask": mask(1, 5, 7)},
        "mask-4d": {"mask": mask(2, 4, 5, 7)},
        "bias-mask": {"bias": normal(4, 1, 7), "mask": mask(5, 7), "is_causal": True},
        "key-lengths": {"key_value_seq_lengths": lengths},
        "query-lengths": {"query_seq_lengths": lengths - 2},
        "both-lengths": {
            "query_seq_lengths": lengths - 2,
            "key_value_seq_lengths": lengths,
            "is_causal": True,
        },
    }


def compare_with_jax_nn(arrays: dict, options: dict, dout: np.ndarray) -> None:
    """Values and gradients in query, key, value and bias."""
    primals = {**arrays, **{name: x for name, x in options.items() if name == "bias"}}
    rest = {name: x for name, x in options.items() if name != "bias"}

    def run_one(attention):
        out, vjp = jax.vjp(lambda x: attention(**x, **rest), primals)
        return {"out": out, **vjp(jnp.asarray(dout))[0]}

    def ours(**call):
        return flash_attention(**call, precision="highest")

    def theirs(**call):
        # Its own strictness is not what is tested here.
        with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(**call)

    got, expected = run_one(ours), run_one(theirs)
    for name, x in expected.items():
        assert got[name].shape == x.shape, name
        assert got[name].dtype == x.dtype, name
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("heads", [4, 2, 1], ids=lambda x: f"K{x}")
@pytest.mark.parametrize("option", jax_nn_calls(np.random.default_rng(0)))
def test_like_jax_nn(option, heads, seed):
    inputs = make_inputs(Case(B=2, T=5, S=7, N=4, K=heads, H=8), seed)
    options = jax_nn_calls(np.random.default_rng(seed))[option]
    compare_with_jax_nn(inputs.arrays, options, inputs.dout)


@pytest.mark.parametrize(
    "option", [x for x in jax_nn_calls(np.random.default_rng(0)) if x not in ("mask-4d",)]
)
def test_like_jax_nn_unbatched(option, seed):
    """[T, N, H]: lengths keep a batch axis of one, as bias and mask may."""
    inputs = make_inputs(Case(B=2, T=5, S=7, N=4, K=2, H=8), seed)
    options = {
        name: x[-1:] if np.ndim(x) == 4 or "lengths" in name else x
        for name, x in jax_nn_calls(np.random.default_rng(seed))[option].items()
    }
    arrays = {name: x[0] for name, x in inputs.arrays.items()}
    compare_with_jax_nn(arrays, options, inputs.dout[0])


def test_lists_all_the_way():
    query = [[[1.0, 0.0]], [[0.0, 1.0]]]
    out = flash_attention(
        query, query, query, bias=[[0.0, -1.0]], mask=[[True, False], [True, True]]
    )
    assert out.shape == (2, 1, 2)
    np.testing.assert_array_equal(out[0], query[0])


def test_scalar_bias_and_mask():
    query = jnp.ones((1, 2, 1, 4))
    out, lse = flash_attention_with_lse(query, query, query, 0.5, True)
    np.testing.assert_allclose(lse, 2.5 + np.log(2), rtol=1e-6)
    np.testing.assert_allclose(out, 1.0)
    assert np.isneginf(flash_attention_with_lse(query, query, query, None, False).lse).all()
