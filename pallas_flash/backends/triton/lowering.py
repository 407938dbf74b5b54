"""The one door to Pallas and its Triton lowering: how a kernel is launched, and how it reads."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import triton

# JAX means users to move to another lowering. It is this package that will have to, not its users.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

load = triton.load
store = triton.store


def exp2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """2^x of float32 by the chip's own instruction, to which numbers below the normal ones are 0.

    `jnp.exp2` is lowered with three more instructions around it, for the sake of those numbers: a
    quarter of all that the forward's loop issues, and 7 % of its time (H200).

    Args:
      x: float32.
      interpret: whether this is for Pallas's interpreter, which knows no such instruction.
    """
    return jnp.exp2(x) if interpret else _assembly("ex2.approx.ftz.f32 $0, $1;", x)


def logistic(x: jax.Array, *, by_halves: bool, interpret: bool) -> jax.Array:
    """1 / (1 + 2^-x) of float32, likewise, to a few steps in the last place.

    Args:
      x: float32.
      by_halves: reckon every other reciprocal, for one unit of the chip does exponentials and
        reciprocals, an eighth as many a cycle as there are sums and products, and a forward under a
        soft cap waits for it: with that and the block sizes it bears, it takes 11 % less time
        (H200). A backward has more else to do, and takes longer by it.
      interpret: as in `exp2`.
    """
    if interpret:
        return 1.0 / (1.0 + jnp.exp2(-x))
    if not by_halves:
        return _assembly(_LOGISTIC.format(y="$0", x="$1"), x)
    first, second = _LOGISTIC.format(y="$0", x="$2"), _RECKONED_LOGISTIC.format(y="$1", x="$3")
    return _assembly(first + second, x, pack=2)


# In PTX a float32 is written 0f and its bits: these are 1 and 120.
_LOGISTIC = """{{ .reg .f32 d;
neg.f32 d, {x}; ex2.approx.ftz.f32 d, d; add.rn.ftz.f32 d, d, 0f3F800000;
rcp.approx.ftz.f32 {y}, d; }}"""

# The reciprocal of a number by its bits is off by 5.05 % at most (Blinn, "Floating-point tricks",
# 1997; the constant makes both signs of that equal). With e = 1 - d * r a step of Halley takes e to
# e^3, then one of Newton to e^2: 1.7e-8. Below 2^120, for all of it to be finite and normal.
_RECKONED_LOGISTIC = """{{ .reg .f32 d, r, e, f; .reg .b32 bits;
neg.f32 d, {x}; min.NaN.ftz.f32 d, d, 0f42F00000; ex2.approx.ftz.f32 d, d;
add.rn.ftz.f32 d, d, 0f3F800000;
mov.b32 bits, d; sub.s32 bits, 0x7EF311C7, bits; mov.b32 r, bits;
neg.f32 d, d;
fma.rn.ftz.f32 e, d, r, 0f3F800000; fma.rn.ftz.f32 f, e, e, e; fma.rn.ftz.f32 r, r, f, r;
fma.rn.ftz.f32 e, d, r, 0f3F800000; fma.rn.ftz.f32 {y}, r, e, r; }}"""


def fused_difference(x: jax.Array, y: jax.Array, z: jax.Array, *, interpret: bool) -> jax.Array:
    """x * y - z of float32, which broadcast, rounded once: as one instruction.

    XLA forbids the compiler to make one of two.
    """
    if interpret:
        return x * y - z
    return _assembly("{ .reg .f32 n; neg.f32 n, $3; fma.rn.f32 $0, $1, $2, n; }", x, y, z)


def _assembly(ptx: str, *args: jax.Array, pack: int = 1) -> jax.Array:
    """PTX from float32 arguments, which broadcast, to one result.

    Its operands are `pack` elements of the result, $0, $1, ..., then as many of each argument.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    # &: not in the place of an argument, for one element's result is there before the next
    # element's arguments are read.
    constraints = ["=&f"] * pack + ["f"] * pack * len(args)
    (y,) = triton.elementwise_inline_asm(
        ptx,
        args=[jnp.broadcast_to(x, shape) for x in args],
        constraints=",".join(constraints),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return y


def program(*sizes: int) -> tuple[jax.Array, ...]:
    """This program's place in a grid whose first axes have these sizes, and along one axis more.

    Programs that follow one another differ along the first axis.
    """
    rest = pallas.program_id(0)
    place = []
    for size in sizes:
        place.append(lax.rem(rest, jnp.int32(size)))
        rest = lax.div(rest, jnp.int32(size))
    return (*place, rest)


def run_if(condition: jax.Array, body: Callable[[], None]) -> None:
    """Run `body`, which stores and returns nothing, where the condition, bool [], holds."""

    def once(_: jax.Array, nothing: jax.Array) -> jax.Array:
        body()
        return nothing

    # A loop that runs once or never: each branch of a `lax.cond` would have shared memory of its
    # own.
    lax.fori_loop(0, condition.astype(jnp.int32), once, 0)


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    programs: int,
    outputs: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    like: jax.Array,
) -> Callable[..., Any]:
    """A function of arrays that runs `kernel` once for each of `programs`.

    The kernel gets whole arrays as references, first those of the arguments and then those of the
    outputs, in the same structures, and finds its part of the work by `program`. One grid
    axis has room for 2^31 - 1 programs, the others for 65535 only, and the lowering adds axes of
    its own for `jax.vmap`.

    Args:
      kernel: writes every element of the outputs.
      name: of the kernel, in profiles and jaxprs.
      programs: how many there are, > 0.
      outputs: a pytree of `jax.ShapeDtypeStruct`.
      num_warps: as in `Config`.
      num_stages: likewise.
      interpret: run in Pallas's interpreter.
      like: an argument. Inside `jax.shard_map` outputs vary over the mesh axes that it varies over.
    """
    varying = jax.typeof(like).manual_axis_type
    outputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying), outputs
    )
    return pallas.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=outputs,
        # Without them JAX 0.11 lowers to Mosaic.
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )
