from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiral_fast.rewards.child.normalise import normalise, without_unit


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("１ 000°.", "1000^\\circ"),
        ("٤٢", "42"),
        ("\u2212\u20134", "--4"),
        ("½", "\\frac{1}{2}"),
        ("2¾", "2\\frac{3}{4}"),
        ("x²", "x^{2}"),
        ("10⁻¹²", "10^{-12}"),
        ("x₁₀", "x_{10}"),
        ("2√13", "2\\sqrt{13}"),
        ("√(x+1)", "\\sqrt{(x+1)}"),
        ("12\u200b3", "123"),
        ("a~b", "a b"),
        ("7, ", "7"),
        ("7...", "7"),
        ("7!", "7!"),
        ("7\\,", "7\\,"),
        ("7\\;.", "7\\;"),
        ("\\left.x\\right.", "\\left.x\\right."),
        ("**7**", "7"),
        ("`7`", "7"),
        ("****", "****"),
        ("= 7", "7"),
        ("\\approx 7", "7"),
        ("1 000 000", "1000000"),
        ("1\\,000", "1000"),
        ("1 000 00", "1 000 00"),
        ("1 2 3", "1 2 3"),
        ("1,000", "1,000"),  # math-verify's own
        ("1 1/2", "1\\frac{1}{2}"),
        ("1 100/3", "1\\frac{100}{3}"),
        ("1.5e3", "1.5 \\times 10^{3}"),
        ("2e+x", "2e+x"),
        ("\\left\\langle 1,2\\right\\rangle", "\\left( 1,2\\right)"),
        ("\\degrees", "\\degrees"),  # only whole commands
        ("\\mathrm{e}^2", "e^2"),
        ("5\\mathrm{m}", "5\\mathrm{m}"),
        ("", ""),
        ("...", ""),
    ],
)
def test_one_spelling(text, normal):
    assert normalise(text) == normal


@given(whole=st.integers(0, 999), fixed=st.from_regex(r"\A[0-9]{0,3}\Z"), period=st.from_regex(r"\A[0-9]{1,4}\Z"))
def test_repeating_decimals_are_exact(whole, fixed, period):
    above, below = normalise(f"{whole}.{fixed}\\overline{{{period}}}").removeprefix("\\frac{").rstrip("}").split("}{")
    tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(fixed)
    assert Fraction(int(above), int(below)) == whole + Fraction(int(fixed or 0), 10 ** len(fixed)) + tail


@given(st.text())
def test_any_text_is_normalised_and_once_is_enough_for_what_is_plain(text):
    assert isinstance(normalise(text), str)
    if text.isascii() and text.isalnum() and "e" not in text.lower():
        assert normalise(text) == text


@pytest.mark.timeout(30)  # what takes a square of the length takes minutes
@pytest.mark.parametrize(
    "part", ["1", "1 ", "1.", "1\\,", "1i", "(", "a", "a b ", "\\\\", "\\pi", "\\frac{", ".\\overline{1}"]
)
def test_long_texts_take_time_in_proportion(part):
    for end in ("", "!"):
        text = normalise("12 " + part * (200_000 // len(part)) + end)
        assert isinstance(without_unit(text), str)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 cm^{2}", "12"),
        ("12 dollars per hour", "12"),
        ("-1/2 cup", "-1/2"),
        ("\\frac{1}{2} inch", "\\frac{1}{2}"),
        ("12 \\, m/s^2", "12"),
        ("5 million", "5 million"),
        ("5 or none", "5 or none"),
        ("5 + apples", "5 + apples"),
        ("5x", "5x"),
        ("2 xyz", "2 xyz"),
        ("5 apples 6", "5 apples 6"),
        ("apples", "apples"),
        ("x^{2} apples", "x^{2} apples"),
    ],
)
def test_a_number_without_its_unit(text, number):
    assert without_unit(text) == number
