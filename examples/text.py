"""What stands between text and a model's tokens, beside the tokenizer."""

from collections.abc import Iterable, Iterator

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


def render_chat(template: str, prompt: str) -> str:
    """The chat template, filled with one user message and opened for the assistant's answer."""
    # The template comes with the weights, so it runs in a sandbox.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=[{"role": "user", "content": prompt}], add_generation_prompt=True
    )


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Decode `tokens` as they come, holding back bytes until their character is complete.

    The joined pieces equal the text of all the tokens decoded at once.
    """
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        # The replacement character marks an unfinished byte sequence.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            pending.clear()
    yield tokenizer.decode(pending)
