r"""The one extraction rule: the answer is the content of the completion's last \boxed{...}."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""Content of the box that opens last among those that are closed; None without a box.

    Nested braces are matched, escaped ones (``\{``) are text; of nested boxes the inner one counts. `text` is a
    completion, never a prompt: aggregation prompts quote the boxed answers of candidates. One pass over the text.
    """
    open_braces: list[int] = []  # content start of each open brace; -1 where it does not belong to a box
    start, end = -1, -1
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "}":
            opened = open_braces.pop() if open_braces else -1
            if opened > start:
                start, end = opened, match.start()
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if len(token) > 1 else -1)
    return None if start < 0 else text[start:end].strip()


def same_spacing(answer: str) -> str:
    """`answer` with each run of white space as one blank: all that exact answers and majority votes normalise."""
    return " ".join(answer.split())


def boxed_answer(text: str) -> str | None:
    """The answer of a completion; None without a box or with an empty one, which is no answer and has no vote."""
    return same_spacing(last_box(text) or "") or None
