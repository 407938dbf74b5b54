"""Every form of input that the contract allows is taken, and means what the plainest form means."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import judge

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.reference import reference_attention
from pallas_flash.spec import AttentionOutput, AttentionSpec, ForwardOutput, Operands
from pallas_flash.testing import DIFFERENTIABLE, Case, Inputs, make_inputs
from pallas_flash.validate import FARTHEST

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


class Recorder:
    """A backend that keeps what it is given and computes nothing."""

    name = "recorder"

    def unsupported_reasons(self, spec, dims, dtype, device):
        return ()

    def forward(self, spec, operands):
        self.spec, self.operands = spec, operands
        rows = jnp.zeros(operands.query.shape[:-1])
        out = jnp.zeros((*rows.shape, operands.value.shape[-1]), operands.query.dtype)
        return ForwardOutput(out, rows, rows)

    def backward(self, spec, residuals, dout, dlse):
        raise AssertionError


def given_to_backend(**call) -> tuple[AttentionSpec, Operands]:
    recorder = Recorder()
    flash_attention(**call, implementation=recorder)
    return recorder.spec, recorder.operands


def assert_means(given: dict[str, object], same: dict[str, object]) -> None:
    """Both calls ask a backend for the very same."""
    (spec, operands), (same_spec, same_operands) = (given_to_backend(**x) for x in (given, same))
    assert spec == same_spec
    for name, x in same_operands._asdict().items():
        got = getattr(operands, name)
        assert (got is None) == (x is None), name
        if x is not None:
            assert (got.dtype, got.shape) == (x.dtype, x.shape), name
            np.testing.assert_array_equal(got, x, name)


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


def assert_close(got: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    """Float32 sums of some hundred terms, in another order."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].shape == x.shape, name
        np.testing.assert_allclose(got[name], x, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("batch", [(), (2, 3), (1, 6, 1)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_batch_dims(option, batch, seed):
    size = int(np.prod(batch, dtype=int))
    flat = make_inputs(case_of(option, size), seed)
    shaped = with_batch(flat, (size,), batch)
    assert_means({**shaped.arrays, **shaped.options}, {**flat.arrays, **flat.options})


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_batch_dims_of_results(batch, seed):
    size = int(np.prod(batch, dtype=int))
    flat = make_inputs(case_of("all", size), seed)
    shaped = with_batch(flat, (size,), batch)
    got = run(shaped)
    assert got["out"].shape == (*batch, SIZES["T"], SIZES["N"], SIZES["Hv"])
    assert got["lse"].shape == (*batch, SIZES["T"], SIZES["N"])
    for name in set(DIFFERENTIABLE) & set(shaped.arrays):
        assert got[f"d{name}"].shape == shaped.arrays[name].shape, name
    assert_same(got, run(flat))


def test_the_flat_call_is_right(seed):
    _, wrong = judge("xla", make_inputs, case_of("all", 6), seed)
    assert wrong == []


FULL = (2, 3, SIZES["N"], SIZES["T"], SIZES["S"])

BROADCAST = [shape for dims in range(6) for shape in itertools.product("1x", repeat=dims)]


def sizes_of(shape: tuple[str, ...]) -> tuple[int, ...]:
    """Each axis of `FULL` whole (x), 1 or missing."""
    full = FULL[len(FULL) - len(shape) :]
    return tuple(whole if axis == "x" else 1 for axis, whole in zip(shape, full, strict=True))


def draw_pairs(shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal(shape).astype(np.float32)
    return {"bias": bias, "mask": rng.random(shape) < 0.7}


@pytest.mark.parametrize("shape", BROADCAST, ids=lambda x: "".join(x) or "scalar")
def test_bias_and_mask_broadcast(shape, seed):
    """And no axis but the batch's is made whole for it."""
    inputs = with_batch(make_inputs(case_of("plain", 6), seed), (6,), (2, 3)).arrays
    pairs = draw_pairs(sizes_of(shape), seed)
    _, operands = given_to_backend(**inputs, **pairs)
    padded = (1,) * (5 - len(shape)) + sizes_of(shape)
    is_batched = max(padded[:2]) > 1
    for name, x in pairs.items():
        got = getattr(operands, name)
        assert got.shape == (6 if is_batched else 1, *padded[2:])
        whole = np.broadcast_to(x, FULL).reshape(6, *FULL[2:])
        np.testing.assert_array_equal(np.broadcast_to(got, whole.shape), whole, name)


@pytest.mark.parametrize("shape", ["", "1x1x", "x1111", "xx1x1"], ids=lambda x: x or "scalar")
def test_gradient_of_a_broadcast_bias(shape, seed):
    inputs = with_batch(make_inputs(case_of("plain", 6), seed), (6,), (2, 3))
    pairs = draw_pairs(sizes_of(tuple(shape)), seed)
    whole = {name: np.broadcast_to(x, FULL) for name, x in pairs.items()}
    got, expected = (
        run(Inputs({**inputs.arrays, **x}, {}, inputs.dout, inputs.dlse)) for x in (pairs, whole)
    )
    padded = (1,) * (5 - len(shape)) + sizes_of(tuple(shape))
    axes = tuple(i for i, size in enumerate(padded) if size == 1)
    expected["dbias"] = np.sum(expected["dbias"], axes, keepdims=True).reshape(pairs["bias"].shape)
    assert_close(got, expected)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.uint8),
        lambda x: x.astype(np.int8),
        jnp.asarray,
        lambda x: jnp.asarray(x, "uint16"),
        np.ndarray.tolist,
        lambda x: tuple(x) if x.ndim == 1 else tuple(map(tuple, x)),
    ],
    ids=["int64", "uint8", "int8", "jax", "jax-uint16", "list", "tuple-of-numpy"],
)
def test_integer_arrays(form, seed):
    """Lengths, offsets and segment ids, in whatever holds them."""
    inputs = make_inputs(case_of("all", 2), seed)
    integers = {name: form(x) for name, x in inputs.arrays.items() if x.dtype == np.int32}
    assert len(integers) == 5
    assert_means({**inputs.arrays, **integers}, inputs.arrays)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("form", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint8])
def test_lengths_beyond_the_arrays(dtype, form, x64, seed):
    """As large as the dtype allows, which says "all of them"."""
    if form is jnp.asarray and dtype == np.int64 and not x64:
        pytest.skip("such an array does not exist")
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    with jax.enable_x64(x64):
        lengths = form(np.full(2, np.iinfo(dtype).max, dtype))
        _, operands = given_to_backend(
            **arrays, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )
    assert min(operands.query_seq_lengths.tolist()) >= SIZES["T"]
    assert min(operands.key_value_seq_lengths.tolist()) >= SIZES["S"]


def test_lengths_outside_the_arrays(seed):
    """Below zero there is nothing, and past the end there is no more than the array."""
    inputs = make_inputs(case_of("plain", 3), seed)
    least, most = -(2**31), 2**31 - 1
    lengths = {
        "query_seq_lengths": np.array([-1, most, most], np.int32),
        "key_value_seq_lengths": np.array([most, least, most], np.int32),
    }
    got = run(Inputs({**inputs.arrays, **lengths}, {}, inputs.dout, inputs.dlse))
    expected = {
        name: np.where(np.arange(3).reshape(3, *[1] * (x.ndim - 1)) < 2, 0, x)
        for name, x in run(inputs).items()
    }
    expected["lse"][:2] = -np.inf
    assert_close(got, expected)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, np.int8, np.uint64])
def test_scale_and_cap_as_numpy_scalars(number, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means(
        {**arrays, "scale": number(3), "logits_soft_cap": number(2)},
        {**arrays, "scale": 3.0, "logits_soft_cap": 2.0},
    )


@pytest.mark.parametrize(
    "scale", [3, np.array(3), np.array(3.0, np.float16), jnp.bfloat16(3)], ids=repr
)
def test_scale_of_any_real_type(scale, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    spec, operands = given_to_backend(**arrays, scale=scale)
    assert float(spec.scale if operands.scale is None else operands.scale) == 3.0
    assert operands.scale is None or operands.scale.dtype == np.float32


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (np.int64(2), (2, 2)),
        (2, (2, 2)),
        (0, (0, 0)),
        ([1, 3], (1, 3)),
        ((np.uint8(1), np.int32(3)), (1, 3)),
        (2**31 - 1, (2**70, 2**40)),
        ((2**31 - 1, 0), (2**70, 0)),
    ],
    ids=str,
)
def test_window_forms(given, same, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means({**arrays, "local_window_size": given}, {**arrays, "local_window_size": same})


@pytest.mark.parametrize(
    ("offset", "options", "sees_all"),
    [
        (FARTHEST, {}, True),
        (FARTHEST, {"is_causal": True}, True),
        (FARTHEST, {"local_window_size": (3, 3)}, False),
        (FARTHEST, {"local_window_size": (3, 2**31 - 1)}, False),
        (FARTHEST, {"local_window_size": 2**31 - 1}, True),
        (FARTHEST, {"local_window_size": (2**31 - 1, 0)}, True),
        (-FARTHEST, {}, True),
        (-FARTHEST, {"is_causal": True}, False),
        (-FARTHEST, {"local_window_size": (3, 3)}, False),
        (-FARTHEST, {"local_window_size": 2**31 - 1}, True),
    ],
    ids=str,
)
def test_farthest_offsets(offset, options, sees_all, seed):
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    got = flash_attention_with_lse(**arrays, **options, query_offset=offset)
    if sees_all:
        assert_close(got._asdict(), flash_attention_with_lse(**arrays)._asdict())
    else:
        assert np.isneginf(got.lse).all()
        assert not np.any(got.out)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_offset_arrays_beyond_all_keys(dtype, seed):
    """Whatever an array holds, causal queries there see all keys, or none before the first."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    with jax.enable_x64(dtype == "int64"):
        info = jnp.iinfo(dtype)
        offset = jnp.array([info.min, info.max], dtype)
        got = flash_attention_with_lse(**arrays, is_causal=True, query_offset=offset)
    expected = flash_attention_with_lse(**arrays)
    np.testing.assert_allclose(got.out[1], expected.out[1], rtol=1e-4, atol=2e-5)
    if info.min < 0:
        assert np.isneginf(got.lse[0]).all()


@pytest.mark.parametrize("form", [np.int64, np.uint8, jnp.int32, jnp.asarray, np.array])
def test_offset_forms(form, seed):
    """NumPy scalars, 0-d arrays, and weakly typed ones."""
    arrays = make_inputs(case_of("plain", 2), seed).arrays
    assert_means({**arrays, "query_offset": form(2)}, {**arrays, "query_offset": 2})


def test_weakly_typed_floats():
    weak = jnp.full((2, 3, 2, 4), 0.5)
    assert weak.weak_type
    gradients = jax.grad(lambda *x: flash_attention(*x).sum(), argnums=(0, 1, 2, 3))(
        weak, weak, weak, jnp.asarray(0.5)
    )
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("side", ["query", "key_value"])
def test_one_sides_segment_ids_serve_for_both(side, seed):
    arrays = make_inputs(case_of("segments", 2, S=SIZES["T"]), seed).arrays
    ids = arrays.pop("query_segment_ids")
    del arrays["key_value_segment_ids"]
    assert_means(
        {**arrays, f"{side}_segment_ids": ids},
        {**arrays, "query_segment_ids": ids, "key_value_segment_ids": ids},
    )


@pytest.mark.parametrize(
    ("option", "empty"),
    [("plain", "T"), ("plain", "S"), ("all", "B"), ("all", "T"), ("all", "S"), ("all", "BTS")],
)
def test_empty_axes(option, empty, seed):
    sizes = {"B": 2, **dict.fromkeys(empty, 0)}
    batch = sizes.pop("B")
    inputs = make_inputs(case_of(option, batch, **sizes), seed)
    got = run(inputs)
    assert got["out"].shape == inputs.dout.shape
    assert got["lse"].shape == inputs.dlse.shape
    for name, x in inputs.arrays.items():
        if name in DIFFERENTIABLE:
            assert got[f"d{name}"].shape == x.shape
            is_sink_alone = name == "sinks" and empty == "S"
            assert is_sink_alone or not np.any(got[f"d{name}"]), name
    if empty == "S" and option == "all":
        assert_close(got, run(inputs, reference_attention))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_empty_among_several_batch_dims(shape, seed):
    inputs = with_batch(make_inputs(case_of("all", 0), seed), (0,), shape)
    _, operands = given_to_backend(**inputs.arrays, **inputs.options)
    empty = {name for name, x in operands._asdict().items() if np.size(x) == 0}
    assert empty == set(inputs.arrays) - {"sinks", "scale"}
    out = flash_attention(**inputs.arrays, **inputs.options)
    assert out.shape == (*shape, SIZES["T"], SIZES["N"], SIZES["Hv"])


@pytest.mark.parametrize("option", ["plain", "all"])
def test_x64(option, seed):
    """Where JAX's own default is 64 bits: the same dtypes and the same values."""
    inputs = make_inputs(case_of(option, 2), seed)
    # Several blocks each way, the last of them moved back.
    options = {**inputs.options, "implementation": XlaBackend(block_q=2, block_k=3)}
    inputs = Inputs(inputs.arrays, options, inputs.dout, inputs.dlse)
    expected = run(inputs)
    with jax.enable_x64(True):
        got = run(inputs)
    assert {name: x.dtype for name, x in got.items()} == dict.fromkeys(got, np.float32)
    assert_close(got, expected)


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


def mask(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """In which every row sees the first key."""
    x = rng.random(shape) < 0.7
    x[..., 0] = True
    return x


def bias(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


LENGTHS = np.array([3, 7], np.int32)

# For B = 2, N = 4, T = 5 and S = 7, written as `jax.nn.dot_product_attention` wants them.
JAX_NN = {
    "2d": lambda rng: {"bias": bias(rng, 5, 7), "mask": mask(rng, 1, 7), "local_window_size": 6},
    "3d": lambda rng: {"bias": bias(rng, 4, 1, 7), "mask": mask(rng, 1, 5, 7), "is_causal": True},
    "4d": lambda rng: {"bias": bias(rng, 2, 1, 5, 1), "mask": mask(rng, 2, 4, 1, 7), "scale": 0.3},
    "lengths": lambda rng: {
        "query_seq_lengths": LENGTHS - 2,
        "key_value_seq_lengths": LENGTHS,
        "local_window_size": (5, 2),
    },
}


@pytest.mark.parametrize("is_batched", [True, False], ids=["BTNH", "TNH"])
@pytest.mark.parametrize("call", JAX_NN)
def test_like_jax_nn(call, is_batched, seed):
    """Without a batch dim its lengths are [1] all the same, and a bias or mask may be 4-D."""
    inputs = make_inputs(Case(B=2, T=5, S=7, N=4, K=2, H=8), seed)
    arrays, options = inputs.arrays, JAX_NN[call](np.random.default_rng(seed))
    dout = jnp.asarray(inputs.dout)
    if not is_batched:
        arrays, dout = {name: x[0] for name, x in arrays.items()}, dout[0]
        is_per_row = lambda name, x: "lengths" in name or np.ndim(x) == 4  # noqa: E731
        options = {name: x[:1] if is_per_row(name, x) else x for name, x in options.items()}
    primals = {**arrays, **{name: options.pop(name) for name in ("bias",) if name in options}}

    @jax.jit
    def both(primals):
        return [
            {"out": out, **vjp(dout)[0]}
            for out, vjp in (
                jax.vjp(lambda x, f=attention: f(**x, **options), primals)
                for attention in (flash_attention, jax.nn.dot_product_attention)
            )
        ]

    with jax.default_matmul_precision("highest"):
        assert_close(*both(primals))


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
