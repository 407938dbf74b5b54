"""The example that trains: its batches, its curve, the same curve by JAX's own attention, and its
command."""

import functools
import io
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax_attention
import matplotlib.image
import numpy as np
import pytest
import train
import training
from corpus import Corpus, CorpusError
from decoder import Decoder
from flax import nnx
from rich.console import Console
from training import TrainConfig, Training

from pallas_flash import flash_attention

# The interpreter runs on a CPU only, and a CPU alone adds in the same order each time.
pytestmark = pytest.mark.usefixtures("on_cpu")

SMALL = {
    "num_layers": 1,
    "features": 32,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "feed_forward_size": 64,
}
# Two blocks of queries and of keys, as the kernels cut them.
CONFIG = TrainConfig(steps=100, batch=3, length=160, learning_rate=1e-2, **SMALL)


@pytest.fixture(autouse=True)
def _promotion_that_optax_needs():
    """It raises floats to the power of an int32, and Flax's norms promote bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def help_text():
    return Corpus.of_python()


def wrong_attention(*arrays, **options):
    return ATTENTIONS["jax"](*arrays, **options) * 1.05


ATTENTIONS = {
    "xla": flash_attention,
    "interpret": flash_attention,
    "jax": jax_attention.attention,
}


def run(name, seed):
    config = replace(CONFIG, seed=seed, implementation=None if name == "jax" else name)
    training = Training(config, help_text(), attention_fn=ATTENTIONS[name])
    return np.array(list(training.run()))


losses_of = functools.cache(run)


def test_entropy_is_that_of_byte_frequencies():
    def entropy(data):
        return Corpus("test", np.frombuffer(data, np.uint8)).entropy

    assert entropy(b"aaaa") == 0
    assert entropy(bytes(range(256)) * 3) == pytest.approx(math.log(256))
    assert entropy(b"aabc") == pytest.approx(1.5 * math.log(2))


def test_a_batch_is_stretches_of_the_text_each_byte_with_the_next(seed):
    # A text in which each byte stands once, so that the first tells the place.
    corpus = Corpus("test", np.arange(256, dtype=np.uint8))
    batch = corpus.batch(64, 10, seed, 3)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(11))
    assert batch.min() >= 0
    assert batch.max() < 256


def test_a_batch_may_take_all_of_the_text(seed):
    corpus = Corpus("test", np.arange(11, dtype=np.uint8))
    np.testing.assert_array_equal(corpus.batch(2, 10, seed, 0), [range(11)] * 2)
    starts = {int(row[0]) for row in corpus.batch(256, 9, seed, 0)}
    assert starts == {0, 1}


def test_seed_and_step_decide_the_batch(seed):
    corpus = help_text()
    batch = corpus.batch(8, 32, seed, 5)
    np.testing.assert_array_equal(batch, corpus.batch(8, 32, seed, 5))
    assert (batch != corpus.batch(8, 32, seed, 6)).any()
    assert (batch != corpus.batch(8, 32, seed ^ 1, 5)).any()


def test_a_text_without_a_next_byte_is_refused():
    corpus = Corpus("short.txt", np.zeros(10, np.uint8))
    with pytest.raises(CorpusError, match=r"length of 10 .* got 10 from short\.txt"):
        corpus.batch(1, 10, 0, 0)


def test_the_loss_falls_below_the_entropy_of_byte_frequencies(seed):
    losses = losses_of("xla", seed)
    entropy = help_text().entropy
    assert losses.shape == (CONFIG.steps,)
    assert losses[0] > entropy
    # It takes pairs of bytes to be much below it.
    assert losses[-20:].mean() < entropy - 0.2


def test_the_same_seed_gives_the_same_curve(seed):
    losses = losses_of("xla", seed)
    np.testing.assert_array_equal(losses, run("xla", seed))
    assert np.abs(losses - run("xla", seed ^ 1)).max() > 0.01


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_the_curve_is_that_of_jax_nn(implementation, seed):
    differences = np.abs(losses_of(implementation, seed) - losses_of("jax", seed))
    assert differences.max() <= 1e-3


def test_bfloat16_is_of_the_computation_alone(seed):
    training = Training(replace(CONFIG, seed=seed, dtype="bfloat16"), help_text())
    losses = np.array(list(training.run()))
    assert {x.dtype for x in jax.tree.leaves(training.model)} == {jnp.dtype("float32")}
    assert (losses != losses_of("xla", seed)).all()
    # A step of bfloat16 is at most 1/128 of a number; a loss is the mean of many that are rounded.
    expected = losses_of("xla", seed)
    assert np.abs(losses / expected - 1).mean() < 1 / 256


@pytest.mark.parametrize(("remat", "runs"), [(training.remat, 1), (jax.checkpoint, 2)])
def test_a_gradient_computes_a_layer_anew_but_not_its_attention(remat, runs, monkeypatch):
    monkeypatch.setattr(training, "remat", remat)
    config = replace(CONFIG, implementation="interpret").decoder
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    texts = jnp.zeros((1, 33), jnp.int32)
    # A new function each time, for traces are kept.
    gradient = jax.make_jaxpr(jax.grad(lambda *x: training.loss_of(*x)))(model, texts)
    assert "remat2[" in str(gradient)
    assert str(gradient).count("name=flash_attention_forward") == runs


def test_what_is_written_is_drawn_from_the_logits_of_all_before_it(seed, rng):
    config = replace(CONFIG, implementation="xla").decoder
    model = jax.jit(lambda key: Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(seed))
    prompt = rng.integers(256, size=80).astype(np.int32)
    key = jax.random.key(seed)
    written = training.write(model, prompt, key, count=80)
    # Without a cache.
    tokens = jnp.concatenate([prompt, written])[None]
    logits = jax.jit(lambda model, tokens: model.logits(model(tokens)))(model, tokens)[0, 79:159]
    expected = jax.vmap(jax.random.categorical)(jax.random.split(key, 80), logits / 0.7)
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", 2**31),
        ("batch", -1),
        ("length", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("num_layers", 0),
        ("num_key_value_heads", 3),
        ("dtype", "float16"),
    ],
)
def test_settings_name_the_bad_value(name, value):
    with pytest.raises(ValueError, match=rf"{name}.* got '?{value}"):
        TrainConfig(**{name: value})


@pytest.fixture
def command(monkeypatch):
    """The command with the settings of `CONFIG`, so that tests share what they compile."""
    defaults = SMALL | {"learning_rate": CONFIG.learning_rate}
    monkeypatch.setattr(train, "TrainConfig", functools.partial(TrainConfig, **defaults))
    sizes = [f"--{name}={getattr(CONFIG, name)}" for name in ("steps", "batch", "length")]
    return lambda *words: train.main([*sizes, *map(str, words)])


@pytest.fixture
def error_of(command, capsys):
    """Runs a command line that must fail with exit code 2; gives its one line of error."""

    def error(*words):
        with pytest.raises(SystemExit) as exit_info:
            command(*words)
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("train.py: ")
        assert error.count("\n") == 1
        return error

    return error


def test_the_words_of_the_command_become_settings(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train, "run", lambda *call: calls.append(call) or True)
    sizes = ["--steps", "7", "--batch", "5", "--length", "33", "--seed", "11"]
    others = ["--dtype", "bfloat16", "--implementation", "interpret"]
    (tmp_path / "text").write_bytes(bytes(40))
    assert train.main([*sizes, *others, "--text", str(tmp_path / "text")]) == 0
    assert train.main([]) == 0
    [(config, corpus, _), (default_config, default_corpus, _)] = calls
    assert config == TrainConfig(7, 5, 33, 11, dtype="bfloat16", implementation="interpret")
    assert bytes(corpus.data) == bytes(40)
    assert default_config == TrainConfig(implementation="xla")
    assert default_corpus.data.tobytes() == help_text().data.tobytes()


def test_the_command_shows_a_text_what_was_learned_of_it_and_a_sample(command, capsys, tmp_path):
    data = b"A :bell: \x07 rings in [this] text. " * 9
    (tmp_path / "text").write_bytes(data)
    assert command("--text", tmp_path / "text", "--plot", tmp_path / "loss.png") == 0
    output = capsys.readouterr().out
    entropy = Corpus.read(tmp_path / "text").entropy
    assert f"{len(data)} bytes, entropy of their frequencies {entropy:.4f} nats" in output
    assert "parameters, float32, flash attention (xla)\n" in output
    prompt, _, written = output.partition("loss.png\n")[2].partition("|")
    shown = "A :bell: \N{REPLACEMENT CHARACTER} rings in [this] text. " * 9
    assert prompt == shown[:80]
    # It knows by heart what it has seen so often, if only for a few words.
    assert written[:10] == shown[80:90]
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[:2] == (675, 1200)


def test_the_command_compares(command, capsys, tmp_path, monkeypatch, seed):
    words = ["--compare", "--seed", seed, "--plot", tmp_path / "curves.svg"]
    assert command(*words) == 0
    output = capsys.readouterr().out
    curves = {
        "flash attention (xla)": losses_of("xla", seed),
        "jax.nn.dot_product_attention": losses_of("jax", seed),
    }
    for title, losses in curves.items():
        for step in (1, 10, 100):
            line = f"{title}, step {step} of 100: loss {losses[step - 1]:.4f}, "
            [rate] = [x.removeprefix(line) for x in output.splitlines() if x.startswith(line)]
            assert rate.endswith(" tokens/s")
    assert "compare passed: over 100 steps the losses differ by at most " in output
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    monkeypatch.setattr(jax_attention, "attention", wrong_attention)
    assert command(*words) == 1
    assert "compare FAILED: over 100 steps " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "passed"), [(2.0009, True), (1.9991, True), (2.0011, False), (math.nan, False)]
)
def test_curves_agree_within_a_thousandth(other, passed, capsys):
    losses = np.array([3.0, 2.0, 1.0])
    others = np.array([3.0, other, 1.0])
    assert train.compare(losses, others, Console(width=120)) == passed
    assert ", at step 2 (limit 1e-03)" in capsys.readouterr().out


def test_a_plot_has_both_curves_and_their_difference():
    curves = {"one": np.array([3.0, 2.0, 1.0]), "other": np.array([3.0, 2.5, 1.0])}
    above, below = train.draw(curves, 1.5).axes
    one, other, entropy = above.lines
    np.testing.assert_array_equal(one.get_xydata(), [[1, 3], [2, 2], [3, 1]])
    np.testing.assert_array_equal(other.get_ydata(), curves["other"])
    assert set(entropy.get_ydata()) == {1.5}
    np.testing.assert_array_equal(below.lines[0].get_ydata(), [0, 0.5, 0])


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_loss_is_shown_ten_times_or_so_on_a_terminal_with_a_bar(is_terminal):
    values = [9.0, *np.linspace(8, 1, 99)]
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, highlight=False, width=120)
    found = SimpleNamespace(config=CONFIG, run=lambda: iter(values))
    np.testing.assert_array_equal(train.train(found, "test", console), values)
    assert ("\x1b" in file.getvalue()) == is_terminal
    for step in (1, 10, 20, 100):
        assert f"test, step {step} of 100: loss {values[step - 1]:.4f}, " in file.getvalue()


def test_a_loss_that_is_no_number_ends_the_training():
    found = SimpleNamespace(config=CONFIG, run=lambda: iter([2.0] * 15 + [math.nan] * 85))
    with pytest.raises(SystemExit, match=r"train\.py: the loss is nan at step 20"):
        train.train(found, "test", Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "steps must be from 1 to 2^31 - 1, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--batch", "-2"], "batch must be from 1 to 2^31 - 1, got -2"),
        (["--length", "0"], "length must be from 1 to 2^31 - 1, got 0"),
        (["--length", "99999999"], "a length of 99999999 needs a text of more bytes, got "),
        (["--seed", "-1"], "seed must be from 0 to 2^32 - 1, got -1"),
        (["--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["--dtype", "bfloat16", "--compare"], "argument --compare: its limit is one of float32"),
        (["--implementation", "cudnn"], "argument --implementation: invalid choice: 'cudnn'"),
        (["--implementation", "triton"], "triton: "),
        (["--text", "/none/text"], "cannot read /none/text: No such file or directory"),
        (["--text", "/"], "cannot read /: Is a directory"),
        (["--plot", "loss"], "expected a name that ends in one of "),
        (["--plot", ""], ", got ''"),
        (["--plot", "/none/loss.png"], "cannot write '/none/loss.png': No such file or directory"),
    ],
)
def test_the_command_refuses_in_one_line(words, message, error_of):
    assert message in error_of(*words)


def test_a_plot_is_not_written_over_a_folder(error_of, tmp_path):
    (tmp_path / "loss.png").mkdir()
    assert "loss.png': it is a folder" in error_of("--plot", str(tmp_path / "loss.png"))
