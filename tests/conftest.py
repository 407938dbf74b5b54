"""Strict JAX for every test, and a fresh seed for each run."""

import os

import jax
import numpy as np
import pytest

from pallas_flash.backends.triton import TritonBackend

# Several processes may test on one card, and each would take three quarters of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A GPU would multiply float32 as TF32, and half the digits that tests compare would be gone.
jax.config.update("jax_default_matmul_precision", "highest")
# Several devices without a GPU, for what runs on a mesh.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """What one worker has compiled another need not, nor the same one after it forgot.

    Most of the suite's time is compilation; kept in pytest's own cache, for the next run too.
    """
    if config.pluginmanager.hasplugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


SEED = int(np.random.SeedSequence().generate_state(1)[0])


@pytest.fixture
def seed() -> int:
    """Another one each run: a result must not hang on lucky numbers. Shown where a test fails."""
    print(f"seed {SEED}")
    return SEED


@pytest.fixture
def rng(seed) -> np.random.Generator:
    """Of that seed."""
    return np.random.default_rng(seed)


@pytest.fixture
def on_cpu():
    """Pallas's interpreter makes programs for any machine, and for a GPU needlessly slow ones."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def _interpreter_on_cpu(request):
    params = getattr(request.node, "callspec", None)
    values = params.params.values() if params else ()
    if any(isinstance(x, TritonBackend) and x.interpret for x in values):
        request.getfixturevalue("on_cpu")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code():
    """Compiled code keeps memory maps; a process that needs more than 65530 of them crashes."""
    yield
    jax.clear_caches()
