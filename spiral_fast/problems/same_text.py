"""When two questions are the same: for duplicates, for the split and for the check between training and evaluation."""

from __future__ import annotations

import re
import unicodedata

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")  # soft hyphens, zero widths, marks
_MARKED = [  # numbers that NFKC would join to the one before: 3\u00b2 is 3^2, not 32
    (re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+"), r"^\g<0>"),
    (re.compile("[\u2080-\u208e]+"), r"_\g<0>"),
    (re.compile(r"(?<=\d)[\u00bc-\u00be\u2150-\u215e]"), r" \g<0>"),
]
_DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_DELIMITERS = re.compile(r"\$|\\[()\[\]]")  # of mathematics in a text
_PUNCTUATION = re.compile(r"""[.,;:?](?!\d)|["\u201c-\u201f\u00ab\u00bb\u2026\u3001\u3002]""")  # 1.5 is not 15
_LOOSE_SPACE = re.compile(r"(?<!\w) | (?!\w)")  # `x + 1` is `x+1`, but `4 3` is not `43`


def normalised(question: str) -> str:
    """What is left for comparison: case, spacing, punctuation of sentences, dollar signs and Unicode variants are not.

    Signs, brackets and decimal points stay, since questions that differ in them have other answers.
    """
    marked = question
    for pattern, replacement in _MARKED:
        marked = pattern.sub(replacement, marked)
    whole = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", marked).casefold())
    text = _DASHES.sub("-", _INVISIBLE.sub("", whole)).replace("\u2044", "/")
    text = text.replace("\u2018", "'").replace("\u2019", "'")
    text = _PUNCTUATION.sub(" ", _DELIMITERS.sub(" ", text))
    text = " ".join(text.split())
    return unicodedata.normalize("NFC", _LOOSE_SPACE.sub("", text)) or whole
