"""Prompts for a model with a chat template, any: it is rendered once around a sentinel and cut there."""

from __future__ import annotations

from jinja2 import TemplateError

from spiral_fast.config import ConfigError
from spiral_fast.prompts.text import SYSTEM, TextPrompts

SENTINEL = "SPIRALFASTMESSAGE"
DATE = "26 Jul 2024"  # some templates print today's date unless given one: a resumed run must see the same prompt


def chat_prompts(tokenizer, max_prompt_tokens: int) -> TextPrompts:
    """A begin-of-sequence token is there exactly when the template itself writes it."""
    try:
        rendered = _render(tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SENTINEL}])
    except TemplateError:  # templates without a system role raise
        rendered = _render(tokenizer, [{"role": "user", "content": f"{SYSTEM}\n\n{SENTINEL}"}])
    if rendered.count(SENTINEL) != 1:
        raise ConfigError(
            f"model.path: the chat template shows the user's message {rendered.count(SENTINEL)} times instead of once; "
            "use a model with another template"
        )
    head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in rendered.split(SENTINEL))
    return TextPrompts(tokenizer, head, tail, max_prompt_tokens)


def _render(tokenizer, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string=DATE)
