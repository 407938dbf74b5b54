"""What stands between text and a model's tokens, beside the tokenizer."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

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
    # Jinja's own is made for HTML, and writes other characters.
    environment.filters["tojson"] = _to_json
    try:
        chat = environment.from_string(template).render(
            special_tokens,
            # What templates call by custom.
            raise_exception=refuse,
            messages=[{"role": "user", "content": prompt}],
            add_generation_prompt=True,
        )
        # Half a surrogate pair is no text.
        chat.encode()
    # A template is a program, and may fail in any way.
    except Exception as error:
        raise WeightsError(f"the chat template does not work: {error}") from error
    return chat


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """What templates are written for."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Decode `tokens` as they come, holding back bytes until their character is complete.

    The joined pieces equal the text of all the tokens decoded at once. (Some tokenizers take back a
    run of bytes whose last character is never completed; what was shown of it stays.)
    """
    seen: list[int] = []
    shown = ""
    for token in tokens:
        seen.append(token)
        # All of them each time: what a token spells may hang on whether it is the first.
        text = tokenizer.decode(seen)
        # The replacement character marks an unfinished byte sequence.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen)[len(shown) :]
