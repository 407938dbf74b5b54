"""The bench of a whole decoder: its three stages, who gets a figure, and what is published."""

import dataclasses
import json

import jax
import numpy as np
import optax
import publish
import pytest
import stages
import whole_model
from clock import wall_clock
from flax import nnx

from pallas_flash import flash_attention, flash_decode
from pallas_flash.flax import AttentionConfig, RotaryEmbedding

SEED = 5


@pytest.fixture(autouse=True)
def _promotion_that_flax_needs():
    """Its norms promote bfloat16 to float32 without a word."""
    # For the threads that compile, too.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module")
def config():
    """A layer of Qwen3's kind, whose programs compile fast."""
    attention = AttentionConfig(
        features=32,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary=RotaryEmbedding(),
        norm_epsilon=1e-6,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    return dataclasses.replace(
        stages.shape_of_qwen3_8b(),
        vocabulary_size=64,
        num_layers=1,
        feed_forward_size=48,
        attention=attention,
    )


def test_the_shape_is_that_of_the_real_model():
    shapes = nnx.eval_shape(
        lambda: stages.attentions("xla")["ours-xla"].decoder(
            stages.shape_of_qwen3_8b(), nnx.Rngs(0)
        )
    )
    leaves = jax.tree.leaves(shapes)
    # Of Qwen3-8B's published 8.2 billion parameters.
    assert sum(np.prod(x.shape) for x in leaves) == 8_190_735_360
    assert {str(x.dtype) for x in leaves} == {"bfloat16"}


def wrong_attention(*arrays, **options):
    return flash_attention(*arrays, **options) * 1.1


def wrong_decode(*arrays, **options):
    return flash_decode(*arrays, **options) * 1.1


def run(config, stage):
    found = dict(stages.attentions("xla"))
    found["wrong"] = stages.Attention(wrong_attention, wrong_decode, "xla")
    stage = dataclasses.replace(stage, batch=2, length=24)
    rows = whole_model.measure(stage, config, found, wall_clock(1.0, "test"), 2, SEED)
    return whole_model.record(stage, rows)


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_a_stage_has_figures_of_what_is_right(stage, config, monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "reduced", lambda config: config)
    monkeypatch.setattr(whole_model, "_JUDGED_LENGTH", 24)
    record = run(config, stage)
    rows = {row["peer"]: row for row in record["rows"]}
    assert rows["wrong"]["reason"].startswith("wrong: error ")
    assert "ms" not in rows["wrong"]
    if jax.default_backend() != "gpu":
        assert rows["jax-cudnn"]["reason"].startswith("refused: ")
    assert ("ours-xla-kept" in rows) == isinstance(stage, stages.Train)
    for name in ("ours-xla", "jax-xla"):
        row = rows[name]
        assert row["reason"] == ""
        assert 0 < row["errors"]["answer"] < 0.1
        assert len(row["times"]) == 2
        assert row["tokens_per_second"] == pytest.approx(1e3 * record["tokens"] / row["ms"])
    assert rows["jax-xla"]["times_jax-xla"] == 1
    header = {"card": "?", "jax": "?", "driver": "?", "date": "?", "commit": "?", "decoder": "?"}
    path = tmp_path / "whole-model.json"
    path.write_text(json.dumps({"header": header, "stages": [record]}))
    text = publish.text(publish.load(tmp_path), tmp_path)
    assert f"| {stage.name}: batch 2, length 24 | {rows['ours-xla']['ms']:.4g} |" in text
    assert f"wrong at {stage.name}: wrong: error " in text


def test_a_step_goes_on_from_the_one_before(config, monkeypatch):
    # The bench's own moves bfloat16 by less than a step.
    monkeypatch.setattr(stages, "_ADAM", optax.adamw(1e-2))
    ours = stages.attentions("xla")["ours-xla"]
    for stage in (stages.Train(2, 8), stages.Decode(2, 8)):
        config = dataclasses.replace(config, is_scanned=stage.is_scanned)
        program = whole_model.compiled(stage, config, ours, SEED)
        runner = whole_model.Runner(
            lambda stage=stage, config=config: stage.inputs(
                config, stages.parameters(config, SEED), SEED
            )
        )
        step = runner.call(program)
        first = jax.tree.map(np.array, step())
        second = jax.tree.map(np.array, step())
        if isinstance(stage, stages.Train):
            # One batch over and over: the loss falls.
            assert second[1] < first[1]
        else:
            caches, _ = second[0]
            assert (caches.lengths == stage.length - 1).all()
            # The last position is the step's own.
            before, after = (x[0][0].pairs[0][0] for x in (first, second))
            np.testing.assert_array_equal(before[:, :-1], after[:, :-1])


def test_the_command_refuses_what_there_is_not(capsys):
    for arguments, message in (
        (["--stage", "sleep"], "invalid choice: 'sleep'"),
        (["--rounds", "0"], "'0'"),
        (["--out", ""], "expected a folder"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            whole_model.parse(arguments)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err
