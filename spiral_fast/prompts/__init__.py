"""Problems and candidates as prompt tokens."""

from __future__ import annotations

from typing import Protocol

from spiral_fast.config import Config
from spiral_fast.prompts.chat import chat_prompts
from spiral_fast.prompts.parts import PartsPrompts
from spiral_fast.prompts.plain import plain_prompts
from spiral_fast.trace import Problem


class Prompts(Protocol):
    def search(self, problem: Problem) -> list[int]:
        """Prompt ids of a search trace. Raises ConfigError above rollout.max_prompt_tokens, naming the problem."""

    def aggregation(self, problem: Problem, candidates: list[list[int]]) -> list[int]:
        """Prompt ids of an aggregation trace. Begins with the same ids as `search` up to and including the problem."""

    def decode(self, tokens: list[int]) -> str:
        """A completion as text, end of sequence dropped."""

    def completion(self, text: str) -> list[int]:
        """Ids of a completion that says `text`, end of sequence included (for supervised examples)."""


def make_prompts(config: Config, tokenizer) -> Prompts:
    if config.problems.source == "parts":
        return PartsPrompts(tokenizer, config.rollout.max_prompt_tokens)
    if tokenizer.chat_template:
        return chat_prompts(tokenizer, config.rollout.max_prompt_tokens)
    return plain_prompts(tokenizer, config.rollout.max_prompt_tokens)
