"""What Math-Verify 0.9.0 reads wrong: numbers rewritten so that it reads them right, and lists told from answers.

Text to text and to yes or no. Runs in the grader's workers, under their limits.
"""

import re
from decimal import Decimal

_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FRACTION = r"\d*\\[dt]?frac\{\d+\}\{\d+\}"
PLAIN = re.compile(rf"-?\$?{_NUMBER}(?:/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!; ]|\{,\}|,\\!|\\!,)(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(-?\d{1,3})((?:\s\d{3})+)")
_MIXED = re.compile(r"(?<![\d./,^])(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})(?!\d|\.\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,15}(?:\.\d{1,15})?)[eE]([+-]?\d{1,2})(?!\w)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LABEL = re.compile(r"(?:[A-Za-z][A-Za-z\s']*[:=]|=|\\approx|about|approximately|approx\.|around)\s*")
_MEASURE = re.compile(
    rf"(-?(?:{_NUMBER}(?:\s*/\s*\d+)?|{_FRACTION}))\s*(/?)\s*([A-Za-z]+)(?:[A-Za-z\s/.'()-]|\^\{{?[23]\}}?)*"
)
_SHORT_UNITS = set("m g l h s cm mm km ft in kg mg ml mi yd oz lb hr am pm mb gb".split())
_NOT_UNITS = set("sin cos tan cot sec csc log exp mod sqrt and".split())
_SEPARATOR = re.compile(
    r"[,;&]|\b(?:or|and|to)\b|\\(?:lor|vee|cup|mid|q?quad|land|wedge)\b|(?<=\d)(?:\s|~|\\[,;: ])+(?=\d)", re.I
)
_EITHER = re.compile(rf"\d(?:\s+[A-Za-z]+)?\s*,?\s*\bor\s+\$?{_NUMBER}", re.I)
_ANSWER_LIST = re.compile(
    rf"answers?\b[^.\n]{{0,60}}?(?:is|are|:|=)[\s*]*\\?\$?{_NUMBER}(?:\s+[A-Za-z]+)?\s*"
    rf"(?:,\s|\band\b|\bor\b)\s*(?:and\s+|or\s+)?\\?\$?{_NUMBER}",
    re.I,
)
_CHARACTERS = str.maketrans({"−": "-", "\u00a0": " ", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"})


def normalise(text: str) -> str:
    """Numbers as Math-Verify reads them right: `1\\,200` -> 1200, `3 1/2` -> 7/2, `1.2e3` -> 1200."""
    text = _THOUSANDS.sub("", text.translate(_CHARACTERS).strip())
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    return _SCIENTIFIC.sub(lambda m: f"{Decimal(m[1]).scaleb(int(m[2])):f}", text)


def bare_number(content: str) -> str:
    """`Total: 20 eggs per day.` -> 20, the number of a labelled or measured one; other content stays.

    Only for a gold that is a plain number: for an expression `5xyz` must stay what it is.
    """
    bare = _WRAPPED.sub(r" \1 ", content).replace("\\$", "").replace("$", "").strip().rstrip(".,;")
    bare = _LABEL.sub("", bare, count=1).strip() if _LABEL.match(bare) else bare
    if match := _MEASURE.fullmatch(bare):
        word = match[3].lower()
        if match[2] or word in _SHORT_UNITS or (len(word) > 2 and word not in _NOT_UNITS):
            return bare if is_list(bare) else match[1]
    return "".join(bare.split()) if _SPACED.fullmatch(bare) else bare


def is_list(content: str) -> bool:
    """Whether several numbers are named: `5, 6`, `5 or 6`, `5 6` (of which Math-Verify makes 11)."""
    content = re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", lambda m: m[0].replace(",", ""), content)
    return sum(any(c.isdigit() for c in piece) for piece in _SEPARATOR.split(content)) > 1


def hedged(text: str) -> bool:
    """Whether an unboxed text ends in a choice of answers; Math-Verify would take the first or the last."""
    lines = [line for line in text.splitlines() if any(c.isdigit() for c in line)]
    return bool(lines and _EITHER.search(lines[-1])) or bool(_ANSWER_LIST.search(text))
