"""An attention made a program: a case's arguments in, its results by name out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import problems
from problems import Arrays

from pallas_flash.testing import UNTUNED, Case

# Takes query, key, value and the options of a problem by `flash_attention`'s names; gives out.
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Compiled:
    """A program that is ready to run.

    Attributes:
      call: takes what `problems.draw` gives; returns "out", and with gradients "dquery" and so on.
      temporary_bytes: what it allocates beyond its arguments and results, by XLA's account; None
        where another runs it.
      result_bytes: what its results take, likewise.
    """

    call: Callable[..., Any]
    temporary_bytes: int | None = None
    result_bytes: int | None = None


def compile_jax(attention: Attention, case: Case, with_gradients: bool, is_tuned: bool) -> Compiled:
    """One jitted function.

    Args:
      attention: what JAX traces.
      case: what it is called with.
      with_gradients: whether to call its gradients too.
      is_tuned: whether XLA may try dozens of kernels for each product on a GPU, as it does for its
        users. What is not timed can do without.
    """
    options = problems.options(case)

    def forward(primals: Arrays, others: Arrays) -> jax.Array:
        return attention(**primals, **others, **options)

    def results(primals: Arrays, others: Arrays, dout: jax.Array) -> Arrays:
        if not with_gradients:
            return {"out": forward(primals, others)}
        out, vjp = jax.vjp(lambda x: forward(x, others), primals)
        return {"out": out, **{f"d{name}": x for name, x in vjp(dout)[0].items()}}

    jitted = jax.jit(results, compiler_options=None if is_tuned else UNTUNED)
    compiled = jitted.lower(*problems.shapes(case)).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        return Compiled(compiled)
    return Compiled(compiled, memory.temp_size_in_bytes, memory.output_size_in_bytes)
