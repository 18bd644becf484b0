from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.problems.same_text import normalised

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
RAISED = "".join(map(chr, [0xB2, 0xB3, 0xB9, *range(0xBC, 0xBF), *range(0x2070, 0x208F), *range(0x2150, 0x215F)]))


@given(st.text(st.characters(codec="utf-8", exclude_characters=RAISED), min_size=1, max_size=60))
def test_unicode_form_does_not_count(text):
    forms = {normalised(unicodedata.normalize(form, text)) for form in ("NFC", "NFD", "NFKC", "NFKD")}
    assert len(forms) == 1


@given(st.text("abcXYZ019 +-*/=().,^\\{}$?", min_size=1, max_size=60), st.data())
def test_case_spacing_and_closing_punctuation_do_not_count(text, data):
    blanks = st.sampled_from([" ", "  ", "\t", "\n", "\u00a0", "\u3000"])
    spaced = "".join(data.draw(blanks) if letter == " " else letter for letter in text)
    if not re.sub(r"\\[()]|[ .,?$]", "", text):  # nothing but what does not count: then all of it does
        return
    same = normalised(text)
    assert normalised(spaced) == normalised(spaced.upper()) == same
    assert normalised(f"  {text} .") == normalised(text + " ?") == same


@given(texts)
def test_it_is_stable_and_never_empty(text):
    assert normalised(text)
    question = text.replace("\\", "") + " x"  # `\\.)` would leave a delimiter
    assert normalised(question) == normalised(normalised(question))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $x+1$?", "what is \\(x + 1\\)"),
        ("Find x, y: 4 \u2212 3", "find x y 4-3."),
        ("Let \u201cf\u201d be \uff11.", 'let "f" be 1'),
        ("A-B \u2013 C", "a-b - c"),
        ("f\u2019(x)", "f'(x)"),
        ("\u00bd of it", "1/2 of it"),
        ("f\u2018(x)", "f'(x)"),
        ("in\u00advis\u200bib\u2060le\ufeff", "invisible"),
        ("x\u00b2 + y\u207b\u00b9\u2070", "x^2+y^-10"),
        ("1\u00bd cups", "1 1/2 cups"),
    ],
)
def test_the_same_question(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("4 - 3 =", "4 + 3 ="),
        ("4 - 3 =", "4 3 ="),
        ("x = -3", "x = 3"),
        ("1.5 apples", "15 apples"),
        (".5", "5"),
        ("1,000", "1000"),
        ("1:2", "12"),
        ("4 3", "43"),
        ("(a+b)c", "a+bc"),
        ("f'(x)", "f(x)"),
        ("5! ways", "5 ways"),
        ("a/b", "ab"),
        ("x_1", "x1"),
        ("3\u00b2", "32"),
        ("101\u2082", "1012"),
        ("1\u00bd", "11/2"),
        ("???", "!!!"),
    ],
)
def test_not_the_same_question(one, other):
    assert normalised(one) != normalised(other)
