"""One spelling for what means the same, before math-verify reads it. Each rule: docs/rewards.md."""

from __future__ import annotations

import re
import unicodedata

CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff€£¥₹", ""),
    **{"°": r"^\circ ", "∞": r"\infty ", "√": r"\sqrt ", "∅": r"\emptyset "},
    **{"·": r"\cdot ", "⋅": r"\cdot ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
    "~": " ",  # LaTeX's unbreakable blank
}
COMMANDS = {
    r"\degree": r"^\circ ",
    r"\varnothing": r"\emptyset ",
    r"\langle": "(",
    r"\rangle": ")",
    r"\bm": r"\mathbf",
    r"\boldsymbol": r"\mathbf",
}
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
BARE = r" *(\\(?!text|sqrt|[dtc]?frac|left)[A-Za-z]+|[A-Za-z0-9])"  # an argument without braces
# A number in any form, and the words after it. Some words are no unit: they change the number, or add another.
NUMBER = re.compile(
    r"((?:[\d.,/+\-(){}^ π]|\\(?:[dtc]?frac|sqrt|pi|cdot|times)(?![A-Za-z]))*(?:[\d)}π]|\\pi))(?: |\\[,;:! ])*"
)
NO_UNIT = (
    "and|or|to|not|plus|minus|times|over|mod|percent(?:age)?|pct|squared|cubed|factorial|infinity|dozen|hundred|"
    "thousand|[mbtr]+illion|(?:sin|cos|tan|log|sqrt|exp|abs)[a-z]?"
)
SHORT = "[cmdkn]?m|ft|in|yd|mi|[kmn]?g|[mc]?l|lbs?|oz|sq|cu|hrs?|mins?|secs?|ms|[mk]ph|men|day|cup|egg|pie"
UNIT = re.compile(
    rf"(?!(?:{NO_UNIT})\b)(?:(?:{SHORT})\b|[a-z]{{4,}}+)(?:[a-z .]|/[a-z]|\^\d|\^{{\d}})*|\^\\circ [CF]", re.IGNORECASE
)
GAP = r"(?:\\[,;:! ]| )"  # a thin or plain blank between groups of three digits


def normalise(text: str) -> str:
    r"""The content of a box or a reference answer in the one spelling, for example "１ 000°." as "1000^\circ"."""
    text = re.sub(f"[{''.join(map(chr, RAISED))}]+", lambda m: f"^{{{m.group().translate(RAISED)}}}", text)
    text = re.sub(f"[{''.join(map(chr, LOWERED))}]+", lambda m: f"_{{{m.group().translate(LOWERED)}}}", text)
    text = "".join(_character(character) for character in text)
    text = re.sub(r"\\[A-Za-z]+", lambda m: COMMANDS.get(m.group(), m.group()), text)
    text = re.sub(r"\\sqrt +(\d+|\([^()]*\))", r"\\sqrt{\1}", text)
    text = re.sub(r"\\mathrm\{([ei])\}", r"\1", text)  # the constants, set upright
    text = re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text)  # math-verify tells 4i from the i of \frac{4}{5}i
    text = re.sub(rf"(\\[dtc]?frac)(?![A-Za-z]){BARE}", r"\1{\2}", text)  # \frac\pi2
    text = re.sub(rf"(\\[dtc]?frac\{{[^{{}}]*\}}){BARE}", r"\1{\2}", text)
    text = " ".join(text.split()).removeprefix("=").removeprefix(r"\approx").strip()
    while text.endswith("\\\\"):  # a line break
        text = text[:-2].rstrip()
    bare = text.rstrip(".,;:? ")  # punctuation after the answer
    text = text[: len(bare) + 1] if bare.endswith(("\\", r"\right")) else bare  # but for that of a command
    for mark in ("**", "`"):  # markdown bold and code
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)]
    return _numbers(text)


def without_unit(text: str) -> str:
    """A normalised number without the plain words after it: "12" for "12 cm^{2}" and "12 dollars per hour"."""
    number = NUMBER.match(text)
    return number.group(1) if number and UNIT.fullmatch(text, number.end()) else text


def _character(character: str) -> str:
    if character in CHARACTERS:
        return CHARACTERS[character]
    if character.isascii():
        return character
    if character.isspace():
        return " "
    if "\uff01" <= character <= "\uff5e":  # full width
        return chr(ord(character) - 0xFEE0)
    digit = unicodedata.decimal(character, None)  # of any script
    if digit is not None:
        return str(digit)
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if kind == "<fraction>" and len(parts) >= 3:  # one half as a single character
        above, below = "".join(chr(int(part, 16)) for part in parts).split("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"
    return character


def _numbers(text: str) -> str:
    text = re.sub(
        rf"(?<![\d.])\d{{1,3}}(?:{GAP}\d{{3}})+(?! ?[\d/])", lambda m: re.sub(GAP, "", m.group()), text
    )  # 1 000
    text = re.sub(r"^([+-]?[\d.]+)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", text)  # 1.5e3
    text = re.sub(r"^([+-]?\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)  # 1 1/2
    return re.sub(r"(?<!\d)(\d*)\.(\d*)\\overline{(\d{1,50})}", _repeating, text)


def _repeating(match: re.Match) -> str:
    """0.1\\overline{6} as the exact fraction (16 - 1) / 90."""
    whole, fixed, period = match.groups()
    above = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{above}}}{{{'9' * len(period) + '0' * len(fixed)}}}"
