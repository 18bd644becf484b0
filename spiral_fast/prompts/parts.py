"""Prompts of the task `parts`: the problem, the quoted candidates, and a role token that says what to write next.

search        `<problem> <search>`
aggregation   `<problem> <1> trace <2> trace ... <aggregate>`
"""

from __future__ import annotations

from spiral_fast.config import ConfigError
from spiral_fast.problems import parts
from spiral_fast.trace import Problem

EOS, PAD, UNKNOWN = "<eos>", "<pad>", "<unk>"
SEARCH, AGGREGATE = "<search>", "<aggregate>"
POSITIONS = tuple(f"<{position}>" for position in range(1, 9))  # labels of the candidates
TRACE_WORDS = (*parts.LABELS, *parts.OPERATIONS, *parts.MARKS, *parts.NUMBERS)
VOCABULARY = (PAD, EOS, UNKNOWN, SEARCH, AGGREGATE, parts.FIXED, parts.VARIABLE, *POSITIONS, *TRACE_WORDS)


class PartsPrompts:
    def __init__(self, tokenizer, max_prompt_tokens: int = 64):
        self.max_prompt_tokens = max_prompt_tokens
        self.id_of = {word: tokenizer.convert_tokens_to_ids(word) for word in VOCABULARY}
        self.word_of = {id: word for word, id in self.id_of.items()}
        if len(self.word_of) != len(VOCABULARY):
            raise ConfigError("model.path: this tokenizer does not know the words of the task parts; use builtin:parts")
        self._quotable = {self.id_of[word] for word in TRACE_WORDS}

    def search(self, problem: Problem) -> list[int]:
        tokens = [*self._problem(problem), self.id_of[SEARCH]]
        if len(tokens) > self.max_prompt_tokens:
            raise ConfigError(
                f"rollout.max_prompt_tokens: the search prompt of problem {problem.id!r} has {len(tokens)} tokens, "
                f"above {self.max_prompt_tokens}; raise it"
            )
        return tokens

    def aggregation(self, problem: Problem, candidates: list[list[int]]) -> list[int]:
        """The candidates' ids verbatim, end of sequence dropped; a token that is no word of a trace becomes unknown."""
        if len(candidates) > len(POSITIONS):
            at_most = f"the task parts quotes at most {len(POSITIONS)} candidates"
            raise ConfigError(f"rollout.set_size or evaluate.rsa.set_size: {len(candidates)} cannot be used: {at_most}")
        tokens = self._problem(problem)
        eos, unknown = self.id_of[EOS], self.id_of[UNKNOWN]
        for position, candidate in zip(POSITIONS, candidates, strict=False):
            tokens.append(self.id_of[position])
            tokens += [token if token in self._quotable else unknown for token in candidate if token != eos]
        return [*tokens, self.id_of[AGGREGATE]]

    def decode(self, tokens: list[int]) -> str:
        """Words joined by spaces, end of sequence dropped. Stray control words stay: they make the format wrong."""
        return " ".join(self.word_of[token] for token in tokens if token != self.id_of[EOS])

    def completion(self, text: str) -> list[int]:
        """Ids of a completion that says `text`, end of sequence included."""
        return self.encode([*text.split(), EOS])

    def encode(self, words: list[str]) -> list[int]:
        return [self.id_of[word] for word in words]

    def _problem(self, problem: Problem) -> list[int]:
        return self.encode(problem.question.split())
