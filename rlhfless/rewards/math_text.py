# ruff: noqa: RUF001 (characters that look like others are what it is about)
"""Rewrite answers of mathematics into plain LaTeX before a library parses them.

Parsers silently drop what they do not know: `2√3` becomes 2, `1e-05` becomes e - 5, `12 345` becomes 12 + 345.
`as_latex` rewrites such forms, and `unreadable` names what a parser would still drop or misread.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi",
    "χ": "chi", "ψ": "psi", "ω": "omega", "λ": "lambda", "Δ": "Delta", "Σ": "Sigma", "Π": "Pi",
    "Ω": "Omega", "Θ": "Theta", "Φ": "Phi", "Γ": "Gamma",
}  # fmt: skip
_SYMBOLS = {
    **dict.fromkeys("−–—‒‐‑﹣－", "-"),
    **dict.fromkeys("·⋅∙•", "*"),
    "∞": "\\infty ", "×": "\\times ", "✕": "\\times ", "÷": "\\div ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ",
    "⩾": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ",
    "∈": "\\in ", "°": "^\\circ ", "º": "^\\circ ", "⁄": "/", "∕": "/", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}",
    "ℚ": "\\mathbb{Q}", "ℕ": "\\mathbb{N}", "ℂ": "\\mathbb{C}", "％": "%", "⟨": "\\langle ", "⟩": "\\rangle ",
    "‘": "'", "’": "'", "′": "'", "“": '"', "”": '"', "…": "...", "≈": "\\approx ", "→": "\\to ", "∠": "\\angle ",
    "△": "\\triangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "∖": "\\setminus ",
    "\u200b": "", "\u2061": "", "\u2062": "", "\ufeff": "",
}  # fmt: skip
UNICODE_MATHS = re.compile("[√∛∜πθ∞²³⁰-₉½⅓⅔¼¾⅐-⅞×÷·⋅−±≤≥≠∪∩∅∈]")
"""A character of mathematics that no plain-text parser reads."""

FUNCTIONS = [
    "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan",
    "cot", "sec", "csc", "log", "ln", "exp", "gcd", "lcm", "max", "min", "det", "lim",
]  # fmt: skip
_KNOWN = frozenset(
    [
        *FUNCTIONS, *GREEK.values(), "frac", "sqrt", "infty", "times", "cdot", "div", "pm", "mp", "le", "leq", "ge",
        "geq", "lt", "gt", "ne", "neq", "cup", "cap", "in", "notin", "emptyset", "varnothing", "mathbb", "mathcal",
        "mathbf", "begin", "end", "binom", "circ", "vec", "overline", "bar", "hat", "angle", "triangle", "lfloor",
        "rfloor", "lceil", "rceil", "lbrace", "rbrace", "lvert", "rvert", "vert", "mid", "setminus", "to", "iff", "int",
        "sum", "prod", "text", "operatorname", "over", "langle", "rangle", "subset", "subseteq", "land", "lor",
        "varepsilon", "varphi", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
        "imath", "approx", "equiv", "perp", "parallel", "tilde", "iota", "upsilon", "pmod", "bmod", "mod", "ldots",
        "dots", "cdots", "prime", "Re", "Im", "arg", "partial", "nabla", "limits", "wedge", "vee", "neg", "ell", "deg",
    ]
)  # fmt: skip
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_ZEROS = 400
"""Largest exponent of ten that is written out."""
CACHED = 64
"""Texts cached while one answer is compared."""

_UNITS = (
    "mm|cm|dm|km|nm|um|ft|in|inches|yd|mi|mg|kg|lb|lbs|oz|ml|cl|dl|hr|hrs|min|mins|sec|ms|mph|kmh|rpm|hz|khz|mhz|ghz|"
    "pa|kpa|kw|kj|kJ|mj|mL|wk|wks|mol|rad|deg|cc|sq|cu|cents|usd|eur|gbp|pm|am|kb|mb|gb|tb|ohms"
)
_SHORT_UNITS = "m|g|s|h|l|L|V|W|N|J|K|A|C|F|Hz"
_UNIT = rf"(?:(?:{_UNITS})(?![A-Za-z])|(?!and\b|or\b|mod\b)[A-Za-z]{{3,}}|(?:{_SHORT_UNITS})(?![A-Za-z]))"
_POWER = r"(?:\s*\^\s*(?:\d|\{-?\d\}))?"
# What stands behind a quantity: `cm^2`, `m/s`, `square feet`, `miles per hour`.
_TRAILING_UNITS = re.compile(
    rf"(?:(?<=[\d}})%!])|(?<=\\pi))(?:\s+{_UNIT}{_POWER}|(?<=\d)(?:{_UNITS})(?![A-Za-z]){_POWER})"
    rf"(?:\s*(?:/|\s|\bper\b)\s*{_UNIT}{_POWER})*\s*$"
)
_TRAILING_TEXT = re.compile(r"\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\d|\{-?\d\}|\\circ))?\s*$")
_TRAILING_COMPOUND = re.compile(
    r"(?<=[\d}\s])\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:-?\d|\{\s*-?\d\s*\}))?"
    r"(?:\s*(?:/|\\cdot|\*)?\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:-?\d|\{\s*-?\d\s*\}))?)+\s*$"
)
_NAMES_AFTER_BACKSLASH = re.compile(rf"(?<![A-Za-z\\])({'|'.join(FUNCTIONS)})(?![A-Za-z])(?=\s*[\d(\\^_{{A-Za-z])")

_LABEL = re.compile(
    r"^\s*\\text\s*\{(?:[^{}]*[A-Za-z]{3}[^{}]*[:=]\s*\}|\s*(?:approximately|approx\.?|about|exactly|a total of)\s*\}"
    r"|[^{}]*\b(?:is|are|equals)\s*\}"
    r"|[^{}]*[A-Za-z]{3}[^{}]*\}\s*[:=](?!=))\s*(?=\S)"
)
_NAMES = re.compile(r"\\(?:operatorname|mathbb|mathcal|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
_MISREAD = [
    ("the character", re.compile(r"[^\x20-\x7e]|[#@`\"?~$]|(?<!\\)\\(?![A-Za-z{}%|\\])")),
    ("two numbers side by side,", re.compile(rf"(?<!\\frac)(?<!\\frac\s)(?<![\d.]){_NUMBER}\s+{_NUMBER}")),
    ("the number", re.compile(r"\d*\.\d+\.[\d.]*|\d*\.\.+")),
    ("the line over", re.compile(r"\\(?:overline|bar)\s*\{\d+\}?")),
    ("the subscript of", re.compile(r"\d_")),
    ("the exponent of", re.compile(r"\d[eE][+-]?\d+")),
    ("the zeros of", re.compile(r"(?<=\d),0\d+")),
    ("a choice and its value,", re.compile(r"^\(?[A-Z](?:\)|[.:])\s*(?:-?\d|\\).*")),
]


@lru_cache(maxsize=CACHED)
def as_latex(text: str) -> str:
    """Rewrite an answer as LaTeX without delimiters, currency, units and number formats."""
    return _without_units(with_units(text)).strip()


def with_units(text: str) -> str:
    """Like `as_latex`, keeping units."""
    text = without_delimiters(from_unicode(text))
    text = _tidied(text)
    text = _structures(text)
    text = _numbers(text)
    text = _NAMES_AFTER_BACKSLASH.sub(r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*\(", r"\\sqrt(", text)
    return _braced(text, "\\sqrt(")


def unreadable(latex: str) -> str:
    """Name what a parser would drop or misread in LaTeX from `as_latex`; empty if nothing."""
    if label := re.match(r"\\text\s*\{\s*\(?[A-Z][).:]\s*\}\s*\S", latex):
        return f"a choice and its value, `{label[0]}`"
    if said := re.search(r"(?<!_)(?<!_\{)\\text\s*\{[^{}]*[A-Za-z]{3}[^{}]*\}", latex):
        return f"the words `{said[0]}`"
    latex = re.sub(r"(\\log\s*)_\s*(?:\w|\{\w+\})", r"\1 ", latex)
    bare = re.sub(r"\\text\s*\{[^{}]*\}|\\(?:begin|end)\{[a-z]*matrix\}", " ", latex)
    unknown = next((name for name in re.findall(r"\\([A-Za-z]+)", bare) if name not in _KNOWN), None)
    if unknown is not None:
        return f"the command `\\{unknown}`"
    for what, pattern in _MISREAD:
        if found := pattern.search(bare):
            return f"{what} `{found[0]}`"
    word = re.search(r"(?<![A-Za-z])(?!and\b|or\b)[A-Za-z]{3,}", re.sub(_NAMES, " ", bare))
    if word and not word[0].isupper():
        return f"the word `{word[0]}`"
    return "" if bare.count("{") == bare.count("}") else "braces that do not match"


def from_unicode(text: str) -> str:
    """Convert mathematical characters to LaTeX."""
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴-⁾ⁿⁱˣ]+", lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀-₎]+", lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    parts = []
    for char in text:
        kind, *code = unicodedata.decomposition(char).split() or [""]
        if kind == "<fraction>" and len(code) >= 3:
            top, _, bottom = "".join(chr(int(each, 16)) for each in code).partition("⁄")
            parts.append(f"\\frac{{{top}}}{{{bottom}}}")
        elif char.isdecimal():
            parts.append(str(unicodedata.decimal(char)))
        elif char in GREEK:
            parts.append(f"\\{GREEK[char]} ")
        else:
            parts.append(_SYMBOLS.get(char, char))
    text = "".join(parts)
    for sign, root in (("√", "\\sqrt"), ("∛", "\\sqrt[3]"), ("∜", "\\sqrt[4]")):
        text = re.sub(rf"{sign}\s*({_NUMBER}|\\?[A-Za-z]+\b|[A-Za-z])", lambda found: f"{root}{{{found[1]}}}", text)  # noqa: B023
        text = _braced(re.sub(rf"{sign}\s*\(", lambda _: f"{root}(", text), f"{root}(").replace(sign, root)  # noqa: B023
    return unicodedata.normalize("NFKC", text)


def without_delimiters(text: str) -> str:
    """Strip `$`, `\\(` and the like, Markdown's stars, and a full stop."""
    before = None
    while text != before:
        before, text = text, text.strip()
        for start, end in (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")):
            if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
                text = text[len(start) : -len(end)]
        if text.startswith("$") and text.endswith("$") and len(text) > 2 and not text.endswith("\\$"):
            text = text[1:-1]
        if re.search(r"(?<!\.)\.$", text):
            text = text[:-1]
    return text


def _tidied(text: str) -> str:
    text = re.sub(r"\\!|^\s*\\approx", "", text)
    text = re.sub(r"\\(?:textcolor\s*\{[^{}]*\}|underline|bm|boldsymbol)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\{\s*\\(?:color\s*\{[^{}]*\}|bf(?![A-Za-z]))\s*([^{}]*)\}|\\color\s*\{[^{}]*\}", r"\1", text)
    text = re.sub(r"^\(?([A-Z])[).:]$", r"\1", text)
    text = re.sub(r"\\(?:dfrac|tfrac|cfrac)", r"\\frac", text)
    text = re.sub(r"\\[dt]binom", r"\\binom", text)
    text = re.sub(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lrm]?)(?=[\s()\[\]|.\\{}]|$)\s*\.?", "", text)
    text = re.sub(r"\\(leq|geq|eq)slant(?![A-Za-z])", r"\\\1", text).replace("\\langle", "(").replace("\\rangle", ")")
    text = re.sub(r"\\(?:mathrm|text|rm)\s*\{\s*([ie])\s*\}", r"\1", text)
    text = re.sub(r"\\overrightarrow(?![A-Za-z])", r"\\vec", text)
    text = re.sub(r"\\(?:displaystyle|textstyle|limits|phantom\{[^{}]*\})", "", text)
    text = re.sub(r"\\(?:mbox|textbf|textit|textrm|textnormal|mathrm|mathit|rm|hbox)(?=[\s{])", r"\\text", text)
    text = re.sub(r"\{\\text\s+([^{}]*)\}", r"\\text{\1}", text)
    # Labels before a value, and the range of a name behind an equation.
    text = re.sub(_LABEL, "", text)
    text = re.sub(r",?\s*(?:\\text\s*\{\s*)?\bfor (?:all|any|every|each)\b.*$", "", text)
    text = re.sub(r"^\s*\\text\s*\{([^{}]*[\d,][^{}]*|\s*)\}\s*$", r"\1", text)
    text = re.sub(r"(?<=\d)(?:\\[,!; ]|~|\u2009|\u202f|\xa0)+(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<!\\)\\(?:[,!;: ]|q?quad(?![A-Za-z]))", " ", text)
    text = re.sub(r"(?<!\\)~|[\u2009\u202f\xa0]", " ", text)
    text = text.replace("{,}", ",").replace("\\lbrack", "[").replace("\\rbrack", "]").replace("\\lbrace", "\\{")
    text = text.replace("\\rbrace", "\\}").replace("\\%", "%").replace("**", "^").replace("\\varnothing", "\\emptyset")
    text = re.sub(r"^(-?)\s*(?:Rs\.?|INR|USD|EUR|GBP|US(?=\\?\$))\s*(?=\\?[$\d])", r"\1", text)
    text = re.sub(
        r"^((?:\\text\{)?-?)\s*(?:\\\$|\$|[€£¥₹]|\\pounds|\\euro)\s*(?:\})?\s*(?=-?[\d.]|-?\\frac)", r"\1", text
    )
    text = re.sub(r"(?<=\d)\s*(?:\\\$|\$|[€£¥₹])\s*$", "", text)
    text = re.sub(r"(?:\\\$|\$)(?=\d)", "", text)
    text = re.sub(r"\s*\\text\s*\{\s*(?:percent|percentage|%)\s*\}|(?<=\d)\s*(?:percent|percentage|pct)\b", "%", text)
    text = re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+", ", ", text)


def _structures(text: str) -> str:
    """Normalise matrices, sets, ratios and double signs."""
    array = r"[\[(]\s*\\begin\{array\}\s*(?:\{[^{}]*\})?(.*?)\\end\{array\}\s*[\])]"
    text = re.sub(array, r"\\begin{pmatrix}\1\\end{pmatrix}", text, flags=re.DOTALL)
    built = re.fullmatch(r"\\\{\s*([a-z])\s*(?:\\mid|\||:)\s*([^,]*(?:<|>|\\[lg]e)[^,]*)\\\}", text.strip())
    if built and "\\in" not in built[2]:
        text = built[2]
    if re.fullmatch(r"\s*[^:,]+(?::[^:,]+){2,}", text):
        first, *others = text.split(":")
        shares = [f"\\frac{{{each.strip()}}}{{{first.strip()}}}" for each in others]
        text = f"({', '.join(shares)})"
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text) and "\\ne" not in text:
        text = ", ".join(_both_signs(part) for part in _parts(text))
    return text


def _both_signs(part: str) -> str:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", part):
        return part
    plus = re.sub(r"\\(pm|mp)(?![A-Za-z])", lambda found: "+" if found[1] == "pm" else "-", part)
    minus = re.sub(r"\\(pm|mp)(?![A-Za-z])", lambda found: "-" if found[1] == "pm" else "+", part)
    return f"{plus}, {minus}"


def _parts(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _numbers(text: str) -> str:
    """Normalise numbers: no thousands separators, no exponents, no `...`."""
    text = re.sub(r"(?<![\d.,_(\[{])\d{1,3}(?:,\d{3})+(?!\d|,\d)", lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"(?<![\d.,_(\[{])\d{1,2}(?:,\d\d)+,\d{3}(?!\d|,\d)", lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"(?<![\d.,_^{])\d{1,3}(?:[ ]\d{3})+(?![\d/])", lambda found: found[0].replace(" ", ""), text)
    text = re.sub(r"(?<![\d.,_])\d{1,3}(?:_\d{3})+(?!\d)", lambda found: found[0].replace("_", ""), text)
    text = re.sub(rf"(?<![\w.])({_NUMBER})[eE]([+-]?\d+)(?![\w.])", _written_out, text)
    text = re.sub(rf"(?<![\w.])({_NUMBER})\s*(?:\\text\s*\{{\s*)?({'|'.join(_LARGE)})\b(\s*\}})?", _large, text)
    ten = rf"({_NUMBER})\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*([+-]?\d+)\s*\}}|([+-]?\d+))(?!\d)"
    text = re.sub(rf"(?<![\w.]){ten}", _written_out, text)
    text = re.sub(r"(?<=\d)\.(?=\s*[-+*/)^])", "", text)
    text = re.sub(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating, text)
    text = re.sub(r"(\d*)\.(\d*)\((\d+)\)(?!\d)", _repeating, text)
    text = re.sub(r"(\d*)\.(\d+)\s*(?:\.\.\.|\\[lc]?dots)", _ellipsis, text)
    text = re.sub(r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", text)
    return re.sub(r"(?<![\d.])(\d+)_(?:\{(\d+)\}|(\d+))(?!\d)|(?<![\w.])(\d+)_\{?\\text\{(\w+)\}\}?", _in_base, text)


def _written_out(found: re.Match[str]) -> str:
    """Write a power of ten as digits: `1.5e-3` is 0.0015."""
    exponent = int(next(group for group in found.groups()[1:] if group is not None))
    return found[0] if abs(exponent) > _ZEROS else _shifted(found[1], exponent)


def _large(found: re.Match[str]) -> str:
    """Write `1.36 million` as digits."""
    number = _shifted(found[1], _LARGE[found[2]])
    return f"{number}\\text{{" if "\\text" in found[0] and not found[3] else number


def _shifted(number: str, exponent: int) -> str:
    """Multiply a decimal number by a power of ten."""
    digits, _, decimals = number.partition(".")
    point, digits = len(digits) + exponent, digits + decimals
    if point <= 0:
        digits, point = "0" * (1 - point) + digits, 1
    digits = digits.ljust(point, "0")
    whole, rest = digits[:point].lstrip("0") or "0", digits[point:].rstrip("0")
    return f"{whole}.{rest}" if rest else whole


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, period = found[1] or "0", found[2], found[3]
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), (10 ** len(period) - 1) * 10 ** len(fixed))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _ellipsis(found: re.Match[str]) -> str:
    """Convert `0.1666...`, whose digits repeat at least once before the dots."""
    whole, digits = found[1], found[2]
    for fixed in range(len(digits)):
        for length in range(1, (len(digits) - fixed) // 2 + 1):
            period, rest = digits[fixed : fixed + length], digits[fixed:]
            if (period * len(rest))[: len(rest)] == rest and len(rest) >= max(2 * length, 3):
                repeating = re.match(r"(\d*)\.(\d*)\((\d+)\)", f"{whole}.{digits[:fixed]}({period})")
                return _repeating(repeating) if repeating else found[0]
    return found[0]


_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}


def _in_base(found: re.Match[str]) -> str:
    """Convert `2516_8` to decimal; unchanged if its digits do not fit the base."""
    digits, base = found[1] or found[4], found[2] or found[3] or found[5]
    try:
        return str(int(digits, _BASES.get(base) or int(base)))
    except ValueError:
        return found[0]


def _braced(text: str, opening: str) -> str:
    """Rewrite `\\sqrt(a(b))` as `\\sqrt{a(b)}`."""
    start = text.find(opening)
    while start >= 0:
        depth, first = 1, start + len(opening)
        for place in range(first, len(text)):
            depth += {"(": 1, ")": -1}.get(text[place], 0)
            if depth == 0:
                text = f"{text[: first - 1]}{{{text[first:place]}}}{text[place + 1 :]}"
                break
        start = text.find(opening, first)
    return text


def _without_units(text: str) -> str:
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):  # there an angle in degrees is another number
        degrees = rf"({_NUMBER})\s*\^\s*(?:\\circ|\{{\s*\\circ\s*\}})"
        return re.sub(degrees, r"(\\frac{\1\\pi}{180})", text)
    stripped = re.sub(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?:C|F|\\text\{[CF]\})?\s*$", "", text)
    stripped = re.sub(r"(?<=[\d)}])\s*(?:degrees?|deg)\s*$|(?<=\d)(?:st|nd|rd|th)$", "", stripped)
    stripped = re.sub(r"(?<=\d)\s*\^\s*\{?\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}{,2}\s*$", "", stripped)
    stripped = re.sub(r"^(-?)(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}\s*%$", r"\1(\2+\\frac{\3}{\4})%", stripped)
    if unit := _TRAILING_TEXT.search(stripped):  # of each of several values
        stripped = re.sub(rf"\s*{re.escape(unit[0].strip())}(?=\s*,)", "", stripped)
    for pattern in (_TRAILING_COMPOUND, _TRAILING_TEXT, _TRAILING_UNITS):
        shorter = pattern.sub("", stripped)
        stripped = shorter if re.search(r"[\dA-Za-z\\]", shorter) else stripped
    return stripped
