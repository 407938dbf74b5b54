"""A malformed call is refused when it is made, and the message says what was wrong with it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from malformed import CALLS, IMPLEMENTATION, NEAR, PAIR_OF_INTS, SHAPES, WINDOW, base, ints, zeros

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.backends.xla import XlaBackend
from pallas_flash.validate.arguments import FARTHEST


def arrays_of(call: dict[str, object]) -> dict[str, jax.Array]:
    return {name: x for name, x in call.items() if isinstance(x, jax.Array)}


def directly(call: dict[str, object]) -> None:
    flash_attention_with_lse(**call)


def traced(call: dict[str, object]) -> None:
    """Only traced: an error that comes later is not seen."""
    arrays = {name: x for name, x in arrays_of(call).items() if name not in STATIC}
    rest = {name: x for name, x in call.items() if name not in arrays}
    jax.eval_shape(lambda arrays: flash_attention_with_lse(**arrays, **rest), arrays)


def differentiated(call: dict[str, object]) -> None:
    """Only the forward of a gradient, in every float array; the backward is never called."""
    arrays = arrays_of(call)
    floats = {
        name: x
        for name, x in arrays.items()
        if name not in STATIC and jnp.issubdtype(x.dtype, jnp.floating)
    }
    rest = {name: x for name, x in call.items() if name not in floats}
    jax.vjp(lambda floats: flash_attention_with_lse(**floats, **rest), floats)


# Arguments that a tracer is an error for, whatever it holds.
STATIC = ("is_causal", "local_window_size", "logits_soft_cap", "precision", "implementation")
WAYS = (directly, traced, differentiated)


def check_message(message: str, name: str, expected: tuple[str, ...], got: str) -> None:
    start = f"{name}: expected "
    assert message.startswith(start)
    wanted, separator, came = message.removeprefix(start).partition(", got ")
    assert separator
    assert all(part in wanted for part in expected)
    assert got in came


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
def test_malformed_call(case, way):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        way(case.call)
    check_message(str(caught.value), case.name, case.expected, case.got)


def test_case_ids_are_unique():
    assert len({case.id for case in CALLS}) == len(CALLS)


def test_both_functions_check_alike():
    with pytest.raises(ValueError, match=r"^mask: expected a bool array.*, got int32\[3, 5\]$"):
        flash_attention(**base(), mask=ints(3, 5))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("names", [("query",), ("query", "key", "value")], ids="-".join)
def test_float64(names, way):
    with jax.enable_x64(True):
        call = base()
        call |= {name: call[name].astype("float64") for name in names}
        with pytest.raises(ValueError, match=r"^query, key, value: expected one dtype") as caught:
            way(call)
    assert "float32, bfloat16, float16, got query float64, key float" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("is_causal", True, "a bool"),
        ("local_window_size", 3, PAIR_OF_INTS),
        ("logits_soft_cap", 30.0, "a finite number > 0, from 1e-20 to 1e20, or None"),
    ],
)
def test_static_argument_that_is_traced(name, value, expected):
    @jax.jit
    def call(x):
        return flash_attention(**base(), **{name: x})

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        call(value)
    check_message(str(caught.value), name, (expected,), "Trace")


# Arrays whose values are known when the call is made, and fall outside what int32 positions hold.
@pytest.mark.parametrize("value", [2**40, -(2**40), 2**31 - 1, FARTHEST + 1, -FARTHEST - 1])
@pytest.mark.parametrize("form", [np.array, lambda x: np.array([0, x])], ids=["0d", "1d"])
def test_offset_array_too_large(form, value):
    x = form(np.int64(value))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        flash_attention(**base(), query_offset=x)
    check_message(str(caught.value), "query_offset", (NEAR,), str(value))


class Refusing:
    """A backend that runs nothing."""

    name = "refusing"

    def unsupported_reasons(self, spec, operands, device):
        return ("it rains", f"S = {operands.key.shape[1]} is odd")

    def forward(self, spec, operands, *, with_lse, with_statistics):
        raise AssertionError

    def backward(self, spec, residuals, dout, dlse):
        raise AssertionError

    def decode(self, spec, operands, *, with_lse):
        raise AssertionError


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["triton", "interpret"])
def test_implementation_that_cannot_run(name, way):
    call = base() | {"bias": zeros(4, 3, 5, dtype="bfloat16"), "query_seq_lengths": ints(2)}
    with pytest.raises(
        NotImplementedError, match=f"\n  {name}: the kernels do not read a bias yet"
    ) as caught:
        way({**call, "implementation": name})
    inputs = (
        "query float32[2, 3, 4, 8]",
        "key float32[2, 5, 2, 8]",
        "value float32[2, 5, 2, 6]",
        "bias bfloat16[1, 4, 3, 5]",
        "query_seq_lengths int32[2]",
    )
    assert [str(caught.value).count(x) for x in inputs] == [1] * len(inputs)
    assert "xla" not in str(caught.value)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_reason_is_listed_and_nothing_else_runs(way):
    with pytest.raises(NotImplementedError) as caught:
        way({**base(), "implementation": Refusing()})
    message = str(caught.value)
    assert "\n  refusing: it rains\n  refusing: S = 5 is odd" in message
    assert message.count("query float32[2, 3, 4, 8]") == 1


@pytest.mark.parametrize("name", ["triton", "interpret"])
def test_malformed_comes_before_unsupported(name):
    with pytest.raises(ValueError, match=r"^sinks: expected"):
        flash_attention(**base(), sinks=zeros(2), implementation=name)


# Dot algorithms that XLA has on no CPU.
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("precision", ["TF32_TF32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9"])
def test_precision_that_the_device_lacks(precision, way):
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs")
    with pytest.raises(NotImplementedError, match=f"xla: .*{precision}"):
        way({**base(), "precision": precision, "implementation": "xla"})


@pytest.mark.parametrize(
    "name",
    ["return_residual", "segment_ids", "causal", "softmax_scale", "dropout_rate", "q_offset"],
)
@pytest.mark.parametrize("function", [flash_attention, flash_attention_with_lse])
def test_unknown_keyword(function, name):
    with pytest.raises(TypeError, match=f"'{name}'"):
        function(**base(), **{name: True})


def test_options_go_by_name():
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*base().values(), None, None, 0.5)


@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize("size", [0, -16, 2.5, 16.0, True, "16", None, (16,)], ids=repr)
def test_block_size(name, size):
    with pytest.raises(ValueError, match=f"^{name}: expected ") as caught:
        XlaBackend(**{name: size})
    check_message(str(caught.value), name, ("int",), repr(size))


def test_block_sizes_that_do_not_exist():
    with pytest.raises(TypeError, match="block_d"):
        XlaBackend(block_d=16)


def test_nothing_is_left_behind():
    """A refused call must not spoil the next one, as half-entered contexts would."""
    for case in (SHAPES[1], WINDOW[0], IMPLEMENTATION[3]):
        with contextlib.suppress(ValueError, AttributeError):
            directly(case.call)
    assert flash_attention(**base()).shape == (2, 3, 4, 6)
