"""What kernels are cut into: any config gives the same answer, and each that is picked is tried."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from implementations import INTERPRET, judge, truth

from pallas_flash import flash_attention_with_lse
from pallas_flash.backends.triton import TritonBackend, config, schedule
from pallas_flash.backends.triton.config import Config, Configs
from pallas_flash.spec import AttentionSpec, Dims
from pallas_flash.testing import Case, evaluate, make_inputs

CAPABILITIES = [None, "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
DTYPES = [jnp.dtype("float32"), jnp.dtype("bfloat16")]
HEAD_DIMS = [1, 16, 24, 64, 80, 96, 128, 192, 256, 320, 512]


def picked(query_length: int = 8192) -> list[Configs]:
    """All that can be, for long keys."""
    return [
        config.pick(
            AttentionSpec(logits_soft_cap=cap, precision=precision),
            Dims(1, query_length, 8192, 8, 8, head_dim, head_dim),
            dtype,
            capability,
        )
        for head_dim, dtype, precision, capability, cap in itertools.product(
            HEAD_DIMS, DTYPES, jax.lax.Precision, CAPABILITIES, (None, 50.0)
        )
    ]


def each_once() -> list[Configs]:
    """As few as have each config of each kernel that can be picked."""
    kernels = [field.name for field in dataclasses.fields(Configs)]
    columns = [list(dict.fromkeys(getattr(x, kernel) for x in picked())) for kernel in kernels]
    count = max(map(len, columns))
    return [Configs(*(column[i % len(column)] for column in columns)) for i in range(count)]


def configs_id(configs: Configs) -> str:
    """Such as 128x64-4-2 for each kernel."""
    each = [getattr(configs, field.name) for field in dataclasses.fields(configs)]
    return "_".join(f"{c.block_q}x{c.block_k}-{c.num_warps}-{c.num_stages}" for c in each if c)


@pytest.mark.parametrize("configs", each_once(), ids=configs_id)
def test_every_config_that_can_be_picked_gives_the_answer(configs, seed, on_cpu):
    case = Case(B=1, T=150, S=170, N=4, K=2, H=16, is_causal=True, query_offset=(20,))
    backend = TritonBackend(interpret=True, configs=configs)

    def attention(*args, **options):
        return flash_attention_with_lse(
            *args, **options, implementation=backend, precision="highest"
        )

    got = evaluate(attention, make_inputs(case, seed))
    assert truth(make_inputs, case, seed).wrong(got) == []


# 1, 2, 4, 6 and 12 of the 12 query heads, and 1, 1, 2, 3 and 6 of the 6 key heads.
@pytest.mark.parametrize("cached_bytes", [0, 10240, 20480, 40960, 10**6])
def test_any_number_of_heads_is_worked_on_together(cached_bytes, seed, on_cpu, monkeypatch):
    case = Case(B=2, T=40, S=70, N=6, K=3, H=16, is_causal=True)
    monkeypatch.setattr(schedule, "_CACHED_BYTES", cached_bytes)
    # Traces are kept, and do not hang on the module's constants.
    jax.clear_caches()
    _, wrong = judge(INTERPRET, make_inputs, case, seed)
    jax.clear_caches()
    assert wrong == []


@pytest.mark.parametrize(
    ("query_length", "key_length", "block_q", "block_k"),
    [(1, 8192, 16, 64), (17, 40, 32, 64), (8192, 1, 128, 16), (128, 64, 128, 64), (0, 0, 16, 16)],
)
def test_blocks_are_no_larger_than_the_lengths_need(query_length, key_length, block_q, block_k):
    fitted = Config(128, 64, 8, 3).fitted(query_length, key_length)
    assert fitted == Config(block_q, block_k, 8, 3)


@pytest.mark.parametrize("name", ["block_q", "block_k", "num_warps", "num_stages"])
@pytest.mark.parametrize("size", [0, -16, 17, 2.0, True, "16", None, 4096], ids=repr)
def test_configs_validate_themselves(name, size):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got ") as caught:
        dataclasses.replace(Config(64, 64, 4, 2), **{name: size})
    assert repr(size) in str(caught.value)


@pytest.mark.parametrize(
    ("head_dim", "widths"),
    [
        *[(1, (16,)), (16, (16,)), (17, (32,)), (40, (32, 16)), (64, (64,)), (65, (64, 16))],
        *[(72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (112, (128,)), (128, (128,))],
        *[(160, (128, 32)), (192, (128, 64)), (200, (256,)), (256, (256,)), (512, (512,))],
    ],
)
def test_head_dims_are_cut_into_powers_of_two(head_dim, widths):
    assert config.widths(head_dim) == widths
    assert [start for start, _ in config.pieces(head_dim)] == [0, widths[0]][: len(widths)]
