"""Small calls in many forms, and whether two of them mean the same."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import flash_attention, flash_attention_with_lse
from pallas_flash.spec import AttentionOutput, AttentionSpec, ForwardOutput, Operands
from pallas_flash.testing import DIFFERENTIABLE, Case, Inputs

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

    def unsupported_reasons(self, spec, operands, device):
        return ()

    def forward(self, spec, operands, *, with_lse, with_statistics):
        self.spec, self.operands = spec, operands
        rows = jnp.zeros(operands.query.shape[:-1])
        out = jnp.zeros((*rows.shape, operands.value.shape[-1]), operands.query.dtype)
        return ForwardOutput(out, rows)

    def backward(self, spec, residuals, dout, dlse):
        raise AssertionError

    def decode(self, spec, operands, *, with_lse):
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
