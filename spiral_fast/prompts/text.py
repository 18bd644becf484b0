"""Search and aggregation prompts for text models, put together from token segments.

search        head · problem · instruction · tail
aggregation   head · problem · (`Candidate i:` · the candidate's own ids) for each member · instruction · tail

A control token inside a candidate becomes one ordinary token, so that no candidate grows by being quoted.

Head and tail come from the model's chat template (chat.py) or are plain headings (plain.py). Every segment is encoded
by itself, so both prompts begin with the same tokens, and a candidate is never decoded and encoded again.
"""

from __future__ import annotations

import re

from spiral_fast.config import ConfigError
from spiral_fast.trace import Problem

SYSTEM = "You solve problems carefully."
SEARCH_INSTRUCTION = "\n\nReason step by step, then put the final answer in \\boxed{}."
CANDIDATE = "\n\nCandidate {position}:\n"
AGGREGATION_INSTRUCTION = (
    "\n\nThe candidates above may be wrong. Audit each one: note useful ideas that are supported, errors, and "
    "unsupported leaps. Verify what you keep, combine it into one solution, then put the final answer in \\boxed{}."
)


class TextPrompts:
    """`head` and `tail`: ids of the trusted template, control tokens included; all else is ordinary text."""

    def __init__(self, tokenizer, head: list[int], tail: list[int], max_prompt_tokens: int):
        self.tokenizer = tokenizer
        self.head, self.tail = head, tail
        self.max_prompt_tokens = max_prompt_tokens
        added = tokenizer.added_tokens_decoder
        control = {id for id, token in added.items() if token.special or id in head or id in tail}
        control = {id for id in control if added[id].content.strip()}  # white space opens no turn
        literals = sorted((added[id].content for id in control), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, literals))) if literals else None
        self._stand_in = {id: self._one_ordinary(added[id].content, control) for id in control}
        self._search_end = self.encode_text(SEARCH_INSTRUCTION) + tail
        self._aggregation_end = self.encode_text(AGGREGATION_INSTRUCTION) + tail

    def search(self, problem: Problem) -> list[int]:
        tokens = [*self._start(problem), *self._search_end]
        if len(tokens) > self.max_prompt_tokens:
            raise ConfigError(
                f"rollout.max_prompt_tokens: the search prompt of problem {problem.id!r} has {len(tokens)} tokens, "
                f"above {self.max_prompt_tokens}; raise it or take the problem out of the data"
            )
        return tokens

    def aggregation(self, problem: Problem, candidates: list[list[int]]) -> list[int]:
        """`candidates` are token ids as sampled, in the order of the set."""
        tokens = self._start(problem)
        for position, candidate in enumerate(candidates, start=1):
            tokens += self.encode_text(CANDIDATE.format(position=position))
            tokens += self.quote(candidate)
        return tokens + self._aggregation_end

    def quote(self, candidate: list[int]) -> list[int]:
        """The ids verbatim, at most as many; a last control token (any end of sequence) is dropped.

        Any other control token becomes the first ordinary token of its spelling: `<` for `<|im_start|>`.
        """
        if candidate and candidate[-1] in self._stand_in:
            candidate = candidate[:-1]
        return [self._stand_in.get(token, token) for token in candidate]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def completion(self, text: str) -> list[int]:
        """Ids of a completion that says `text`, end of sequence included."""
        return [*self.encode_text(text), self.tokenizer.eos_token_id]

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text: what spells a control token is cut after its first character and so stays text."""
        pieces = []
        while self._control and (found := self._control.search(text)):
            pieces.append(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        pieces.append(text)
        return [id for piece in pieces if piece for id in self.tokenizer.encode(piece, add_special_tokens=False)]

    def _one_ordinary(self, spelling: str, control: set[int]) -> int:
        for id in self.encode_text(spelling):
            if id not in control and self.tokenizer.decode([id]).strip():
                return id
        raise ConfigError(
            f"model.path: the tokenizer cannot spell its control token {spelling!r} as ordinary text, so a candidate "
            "that holds it cannot be quoted; use another model"
        )

    def _start(self, problem: Problem) -> list[int]:
        return [*self.head, *self.encode_text(problem.question)]
