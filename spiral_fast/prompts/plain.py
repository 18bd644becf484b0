"""Prompts for a causal language model without a chat template: plain text headings."""

from __future__ import annotations

from spiral_fast.prompts.text import TextPrompts

HEAD, TAIL = "Problem:\n", "\n\nSolution:\n"


def plain_prompts(tokenizer, max_prompt_tokens: int) -> TextPrompts:
    """A begin-of-sequence token is there exactly when the tokenizer itself puts one before a text."""
    bos = tokenizer.bos_token_id
    begins = [bos] if bos is not None and tokenizer.encode("a")[0] == bos else []
    head = begins + tokenizer.encode(HEAD, add_special_tokens=False)
    return TextPrompts(tokenizer, head, tokenizer.encode(TAIL, add_special_tokens=False), max_prompt_tokens)
