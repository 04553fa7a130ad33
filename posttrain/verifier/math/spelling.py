"""Gives every notation one spelling before it is read: Unicode, LaTeX layout, spaces, fractions and text commands."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 1000
"""The most characters of an answer. Longer text is no answer."""

_SYMBOLS = {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **dict.fromkeys("×✕✖", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("“”„‟", '"'),
    **dict.fromkeys("’‘′", "'"),
    "＋": "+", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm ", "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "θ": r"\theta ",
    "≈": r"\approx ", "≃": r"\approx ", "…": "...", "。": ".", "α": r"\alpha ", "β": r"\beta ", "∠": r"\angle ",
}  # fmt: skip
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
# An alignment of several lines: `\begin{align*}x&=1+2\\&=3\end{align*}`. Group 2: its lines.
_ALIGNED = re.compile(r"\\begin\{(aligned|align\*?|split|gathered|gather\*?|equation\*?)\}(.*)\\end\{\1\}", re.DOTALL)
_ARROW = re.compile(r"(?:\\(?:Rightarrow|Longrightarrow|implies|therefore)(?![A-Za-z])|[⇒⟹∴])")  # `\Rightarrow`, `∴`
_WRITTEN = (
    (re.compile(r"no (?:real )?solutions?|(?:the )?empty set", re.IGNORECASE), r"\emptyset"),
    (re.compile(r"all real numbers|all reals|every real number", re.IGNORECASE), r"\mathbb{R}"),
)
"""Sets that are written as words."""
# Commands of upright or bold text, which all become `\text{`: `\mathrm{`, `\textbf {`, `\operatorname{`, `\hbox{`.
_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)|bm|boldsymbol|pmb|[hm]box|math(?:rm|bf|it|sf)|operatorname\*?|emph|rm|bf)\s*\{"
)
_LAYOUT = re.compile(
    # `\displaystyle`, `\limits`, `\large`, `\bfseries`, `\mathstrut`.
    r"\\(?:(?:display|text|script)style|(?:no)?limits|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|(?:bf|rm|it|sf|tt)(?:series|family|shape)?|(?:math)?strut)(?![A-Za-z])"
    r"|\\(?:underline|framebox|ensuremath|bold)(?=\s*\{)"  # `\underline` before a brace, whose content stays
    # `\color{red}`, `\textcolor[rgb]{1,0,0}`, `\fcolorbox{red}{blue}`.
    r"|\\(?:(?:text)?color|colorbox)\s*(?:\[\w+\])?\s*\{[^{}]*\}|\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}"
)
"""Commands of layout, which become a space. The last two kinds go with the names of their colours."""
# The one name of commands that mean the same: `\dfrac` becomes `\frac`.
_RENAMED = {
    **dict.fromkeys(("simeq", "thickapprox", "doteq"), r"\approx"), **dict.fromkeys(("leq", "leqslant"), r"\le"),
    **dict.fromkeys(("geq", "geqslant"), r"\ge"), **dict.fromkeys(("dbinom", "tbinom"), r"\binom"), "neq": r"\ne",
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "sfrac", "nicefrac"), r"\frac"), "varnothing": r"\emptyset",
    "lbrace": r"\{", "rbrace": r"\}", "lt": "<", "gt": ">",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# Patterns and what replaces them, in an order that counts. From `_TEXT_COMMAND` on every command of upright text is
# `\text{`. Labels (`Answer: `) are cut off after brackets and spaces have their one form.
_NAMES = (
    # The space behind a line break: `1\\[2pt]2` is `1\\2`.
    (re.compile(r"(?<!\\)\\\\\s*\[-?[\d.]+\s?(?:pt|em|ex|mm|cm)\]"), r"\\\\"),
    # `\log_{\text{e}} 2` is `\ln 2`.
    (re.compile(r"(?:\\|(?<![\\A-Za-z]))log\s*_\s*\{?\s*(?:\\(?:text|mathrm)\s*\{\s*)?e(?![A-Za-z])[\s}]*"), r"\\ln "),
    # A dot above a digit, like a bar above it, repeats that digit: `0.1\dot{6}` is `0.1\overline{6}`.
    (re.compile(r"\\dot\s*\{?(\d)\}?"), r"\\overline{\1}"),
    # `1_000_000` is `1000000`.
    (re.compile(r"(?<![\w.])(\d{1,3}(?:_\d{3})+)(?![\w.])"), lambda m: m[1].replace("_", "")),
    # `\left(1,2\right)` is `(1,2)`; a bracket that is a point is left out.
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?"), ""),
    # `30^{\circ}` and `30\degree` are `30^\circ `.
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])"), r"^\\circ "),
    (_TEXT_COMMAND, r"\\text{"),  # `\mathrm{cm}` is `\text{cm}`.
    (_LAYOUT, " "),  # `\displaystyle x` is `x`.
    # Braces that belong to nothing: `{5}` is `5`.
    (re.compile(r"(?<![\w\\\]}^])\{\s*([\w.]+)\s*\}"), r"\1"),
    # `1\quad 2`, `1\,2` and `1~2` have a space.
    (re.compile(r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[,;:! ]|~"), " "),
    # A joining word leaves the text before it: `\text{red, and}` is `\text{red}\text{ and }`.
    (re.compile(r"\\text\{([^{}]*[^{}\s,]),?\s+(and|or)\s*\}"), r"\\text{\1}\\text{ \2 }"),
    (re.compile(r"\{\s*([,:])\s*\}"), r"\1"),  # `1{,}234` is `1,234`.
    # `\text{km h^{-1}}` is `\text{km/h}`.
    (re.compile(r"(\\text\{[^{}]*?[A-Za-z])[ ]([A-Za-z]+)\^\{-1\}\s*\}"), r"\1/\2}"),
    # Labels: `\text{The answer is }5` is `5`.
    (re.compile(r"^\\text\{[^{}]*(?::|\bis|\bare|=)\s*\}\s*(?=\S)"), ""),
    (re.compile(r"^[A-Za-z][A-Za-z ]{2,40}:\s+(?=[-+$\\\d])"), ""),  # `The total cost: $5` is `$5`.
    (re.compile(r"^(\d{1,9}) to (\d{1,9})$"), r"\1:\2"),  # `3 to 4` is the ratio `3:4`.
    # The letter U between intervals: `(1,2) U (3,4)` is `(1,2)\cup (3,4)`.
    (re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[]|\\\{)"), r"\\cup "),
    # `2 and a half` is `2\frac{1}{2}`.
    (re.compile(r"(?<![\d.,])(\d+) and a half(?![A-Za-z])"), r"\1\\frac{1}{2}"),
    (re.compile(r"\\([%$&#_])"), r"\1"),  # `50\%` is `50%`.
)
_PLAIN = (
    (re.compile(r"\*\*"), "^"),  # `x**2` is `x^2`.
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),  # `2^(x+1)` is `2^{x+1}`.
    (re.compile(r"\^\s*(-?\d{2,}|-\d)"), r"^{\1}"),  # `2^10` is `2^{10}`.
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),  # `sqrt(2)` is `\sqrt{2}`.
    # `2pi` is `2\pi `.
    (re.compile(r"(?<![\\A-Za-z{])(sin|cos|tan|log|ln|exp|pi|theta|alpha|beta)(?![A-Za-z])"), r"\\\1 "),
)
"""Notation of programs."""
# A regular expression cannot count braces, so the text of a group may have one level of braces inside it.
_GROUP = r"((?:[^{}]|\{[^{}]*\})*)"
# `{1\over 2}`, `{n\choose k}`. Groups: what stands before the command, the command, what stands after it.
_INFIX = re.compile(rf"\{{{_GROUP}\\(over|choose)(?![A-Za-z]){_GROUP}\}}")
_PREFIX = {"over": "frac", "choose": "binom"}
# The argument of a command, in two groups: one character or command without braces (`1`, `\pi`), or a group in them.
_ARGUMENT = r"\s*(?:(\d|[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+)|(\{(?:[^{}]|\{[^{}]*\})*\}))"
# `\frac12`, `\frac\pi 2`, `\binom n2`
_SHORT_FRACTION = re.compile(rf"\\(frac|binom)(?![A-Za-z]){_ARGUMENT}{_ARGUMENT}")
# `\sqrt2`, `\sqrt[3]8`, `\bar x`
_SHORT_ROOT = re.compile(r"\\(sqrt\s*(?:\[\d+\])?|bar|vec|hat|overline)\s*(\d+|[A-Za-z])")
# `5^{\text{th}}`, `5^\text{th}`, `5^{th}`, `5th`. Group 1: the digits; one of the others: the ending.
_ORDINAL = re.compile(
    r"(?<!\d)(\d+)\s?(?:\^\s?\{\s?\\text\{\s?(st|nd|rd|th)\s?\}\s?\}"
    r"|\^?\\text\{\s?(st|nd|rd|th)\s?\}|\^\{(st|nd|rd|th)\}|(st|nd|rd|th)(?![A-Za-z]))"
)
_POWER = re.compile(r"([\^_])\s*\{\s*([^{}\s])\s*\}")  # One character in braces: `x^{2}` is `x^2`.


def spelled(text: str) -> str:
    """The one spelling; empty if nothing is left or the text has more than 1000 characters.

    >>> spelled(r"$\\dfrac12$."), spelled("１２½"), spelled(r"\\left(\\, 1,\\;2 \\right)"), spelled(r"5\\mathrm{ cm}")
    ('\\\\frac{1}{2}', '12\\\\frac{1}{2}', '(1,2)', '5\\\\text{cm}')
    """
    if len(text) > LONGEST:
        return ""
    # The answer stands after the last arrow or `therefore`.
    if arrows := list(_ARROW.finditer(text)):
        text = text[arrows[-1].end() :]
    text = _stripped(_last_line(text))
    # `_ascii` may have made a full stop or a dollar sign of another character.
    text = _stripped(_ascii(text))
    text = _COMMAND.sub(lambda m: _RENAMED.get(m[1], m[0]), text)
    for pattern, replacement in _NAMES:
        text = pattern.sub(replacement, text)
    text = _stripped(text)
    # A set in words is recognised with or without a text command around it: `\text{no solution}`.
    bare = re.sub(r"^\\text\{([^{}]*)\}$", r"\1", text).strip()
    text = next((name for pattern, name in _WRITTEN if pattern.fullmatch(bare)), text)
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = _ORDINAL.sub(_cardinal, text)
    # `\over` takes all of the group around it. The whole text may be that group, so it is put in braces first.
    if "\\over" in text or "\\choose" in text:
        text = _INFIX.sub(lambda m: rf"{{\{_PREFIX[m[2]]}{{{m[1]}}}{{{m[3]}}}}}", f"{{{text}}}")
    text = _SHORT_FRACTION.sub(lambda m: rf"\{m[1]}{_in_braces(m[2], m[3])}{_in_braces(m[4], m[5])}", text)
    text = _SHORT_ROOT.sub(r"\\\1{\2}", text)
    text = _POWER.sub(r"\1\2", text)
    text = re.sub(r"\\text\{\s*([^{}]*?)\s*\}", r"\\text{\1}", text)
    text = re.sub(r"\s+", " ", text)
    # Only spaces around operators and brackets are removed. Other spaces may mean something: `1 1/2` is a mixed number,
    # `2 h` is two hours.
    text = re.sub(r"\s*([-+*/^_=<>(){}\[\],;:|!])\s*", r"\1", text)
    return _unwrapped(text.strip())


def _last_line(text: str) -> str:
    """The last line of an alignment, with the earlier lines that it continues. Other text is returned as it is."""
    match = _ALIGNED.fullmatch(_stripped(text))
    if match is None:
        return text
    lines = [line.replace("&", "").strip() for line in re.split(r"\\\\(?:\[[^\]\n]{0,9}\])?", match[2])]
    chain = ""
    # A line that begins with an equals sign continues the line above it: `x=1+2` and `=3` are one chain.
    for line in reversed([line for line in lines if line]):
        chain = f"{line} {chain}"
        if not line.startswith("="):
            break
    return chain.strip()


def _cardinal(match: re.Match[str]) -> str:
    """`5` for `5^{\\text{th}}`. A number with a wrong ending stays as it is."""
    digits, ending = match[1], next(e for e in match.groups()[1:] if e)
    # A number with the tens digit 1 always ends in `th`: 11th, 12th and 13th, but 21st, 22nd and 23rd.
    right = "th" if digits[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(digits[-1], "th")
    return digits if ending == right else match[0]


def _in_braces(bare: str | None, braced: str | None) -> str:
    """The argument of a command in braces. Exactly one of the two is given."""
    return braced or "{" + (bare or "") + "}"


def _ascii(text: str) -> str:
    """The text with digits of every script, fractions such as `½`, superscripts and symbols as LaTeX writes them."""
    pieces: list[str] = []
    in_exponent = False
    for c in text:
        # Superscripts side by side are one exponent: `x¹⁰` becomes `x^{10}`.
        if c in _SUPER:
            pieces.append(_SUPER[c] if in_exponent else "^{" + _SUPER[c])
            in_exponent = True
            continue
        if in_exponent:
            pieces.append("}")
            in_exponent = False
        pieces.append(c if c < "\x80" else _character(c))
    return "".join([*pieces, "}" if in_exponent else ""])


def _character(c: str) -> str:
    """One character that is neither ASCII nor a superscript, as LaTeX writes it."""
    if c in _SYMBOLS:
        return _SYMBOLS[c]
    if c in _SUB:
        return "_" + _SUB[c]
    if (digit := unicodedata.digit(c, None)) is not None and unicodedata.category(c) == "Nd":
        return str(digit)
    # NFKC writes ½ as 1⁄2 with a fraction slash, and every full-width character as its ordinary one.
    wide = unicodedata.normalize("NFKC", c)
    if "⁄" in wide:
        above, _, below = wide.partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    return wide


def _stripped(text: str) -> str:
    """The text without white space, math delimiters and final punctuation around it."""
    previous = None
    # Delimiters may be nested, with punctuation between them: `**$5$.**`.
    while previous != text:
        previous = text
        # The punctuation of `\,` is a part of the command. Removed alone, it would leave a backslash.
        ends_with_space = text.rstrip().endswith((r"\,", r"\;", r"\:"))
        text = text.rstrip()[:-2] if ends_with_space else text.strip().rstrip(".,;:").strip()
        for left, right in _DELIMITERS:
            if len(text) > len(left) + len(right) - 1 and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : len(text) - len(right)]
                # `$1$ and $2$` is two formulas, so its delimiters stay. An escaped dollar sign is a currency.
                if left not in inner.replace("\\$", ""):
                    text = inner
    return text


def _unwrapped(text: str) -> str:
    """The text without braces or a box around all of it. `\\text{...}` stays, because it is a word and no product."""
    while text.startswith("{") and text.endswith("}") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    if text.startswith("\\boxed{") and closing(text, 6) == len(text) - 1:
        return _unwrapped(text[7:-1].strip())
    return text


def closing(text: str, at: int) -> int:
    """The position at which the bracket at `at` is closed, by any closing bracket of its family (`[` may end with `)`);
    -1 if it is not closed."""
    stack: list[str] = []
    for bracket in re.compile(r"[()\[\]{}]").finditer(text, at):
        if bracket[0] in "([{":
            # On the stack: the closing brackets that the opening one accepts.
            stack.append("}" if bracket[0] == "{" else ")]")
        elif not stack or bracket[0] not in stack.pop():
            return -1
        elif not stack:
            return bracket.start()
    return -1
