"""What stands between text and a model's tokens, beside the tokenizer."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from weights import WeightsError


def render_chat(template: str, prompt: str, special_tokens: Mapping[str, str]) -> str:
    """The chat template, filled with one user message and opened for the assistant's answer.

    Args:
      template: of Jinja.
      prompt: what the user says.
      special_tokens: such as {"bos_token": "<s>"}, by the names that templates have for them.

    Raises:
      WeightsError: the template is broken.
    """

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    # The template comes with the weights, so it runs in a sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        return environment.from_string(template).render(
            special_tokens,
            # What templates call by custom.
            raise_exception=refuse,
            messages=[{"role": "user", "content": prompt}],
            add_generation_prompt=True,
        )
    except TemplateError as error:
        raise WeightsError(f"the chat template does not work: {error}") from error


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
