"""Units of answers: whether two quantities that both name a unit name different ones.

Parsers of mathematics drop units, so `12 cm` would equal `12 m`. Nothing is converted: only answers with equal numbers
are compared here. A unit that is not known in full (`apples`, `square units`) is different from none, so that no right
answer is refused for a name that is missing here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import product

from rlhfless.rewards.math_text import CACHED, as_latex, from_unicode, with_units, without_delimiters

Unit = tuple[Fraction, frozenset[tuple[str, int]]]
"""A factor, and the exponents of the names in `_BASES`."""

_BASES = {
    "m": "1 m meter metre; .001 mm millimeter millimetre; .01 cm centimeter centimetre; .1 dm decimeter decimetre; "
    "1000 km kilometer kilometre; 1e-6 um micrometer micrometre micron; 1e-9 nm nanometer nanometre; "
    ".0254 in inch inches; .3048 ft foot feet; .9144 yd yds yard; 1609.344 mi mile",
    "s": "1 s sec secs second; .001 ms msec millisecond; 60 m min mins minute; 3600 h hr hrs hour; 86400 d day; "
    "604800 wk wks week",
    "month": "1 month; 12 yr yrs year; 120 decade; 1200 century centuries",
    "kg": "1 kg kgs kilogram; .001 g gram gm; .000001 mg milligram; .45359237 lb lbs pound; .028349523125 oz ounce",
    "USD": "1 usd dollar buck; .01 cent",
    "EUR": "1 eur euro",
    "GBP": "1 gbp pound; .01 pence penny",
    "INR": "1 inr rupee",
    "JPY": "1 jpy yen",
    "degree": "1 deg degree",
    "degree of Celsius": "1 C celsius degree deg centigrade",
    "degree of Fahrenheit": "1 F fahrenheit degree deg",
    "K": "1 K kelvin",
    "radian": "1 rad radian",
    "A": "1 A amp ampere",
    "mol": "1 mol mole",
    "gallon": "1 gal gallon; .25 quart qt; .125 pint; .0625 cup",
}
_DERIVED = {
    "mph": "mi h^-1", "kmh kph kmph": "km h^-1", "cc": "cm^3", "ml mL milliliter millilitre": "cm^3",
    "cl cL centiliter centilitre": "10 cm^3", "dl dL deciliter decilitre": "100 cm^3", "l L liter litre": "dm^3",
    "N newton": "kg m s^-2", "J joule": "kg m^2 s^-2", "kJ kilojoule": "1000 kg m^2 s^-2", "W watt": "kg m^2 s^-3",
    "kW kilowatt": "1000 kg m^2 s^-3", "Pa pascal": "kg m^-1 s^-2", "kPa kilopascal": "1000 kg m^-1 s^-2",
    "Hz hz hertz": "s^-1", "kHz khz kilohertz": "1000 s^-1", "MHz mhz megahertz": "1000000 s^-1", "C coulomb": "A s",
    "V volt": "kg m^2 s^-3 A^-1",
}  # fmt: skip
_CURRENCIES = {"$": "usd", "\\$": "usd", "US$": "usd", "€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "Rs": "inr"}
_CURRENCY = re.compile(r"^(?:\\text\s*\{)?\s*-?\s*(\\?\$|US\\?\$|[€£¥₹]|Rs)[\s.}]*(?=-?[\d.]|\\frac)")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
# Of a unit that is no nonsense; more could be made to take long.
_MOST_PARTS, _MOST_POWER = 5, 9
_TOKEN = re.compile(r"\^\s*-?\s*\d+|[A-Za-z]+|\d+|\S")


def differ(one: frozenset[Unit], other: frozenset[Unit]) -> bool:
    """Whether two answers name units that cannot be the same; False where one of them names none that is known."""
    return bool(one and other) and not one & other


@lru_cache(maxsize=CACHED)
def units_of(text: str) -> frozenset[Unit]:
    """What the unit at the end of an answer may mean, `m` a meter or a minute; empty if there is none, or if some part
    of it is not known."""
    bare, whole = as_latex(text), with_units(text).strip()
    if found := _CURRENCY.match(without_delimiters(from_unicode(text))):
        return _meanings(_CURRENCIES[found[1].replace("US\\", "US")]) if whole == bare else frozenset()
    return _meanings(whole[len(bare) :]) if bare and whole.startswith(bare) else frozenset()


def _meanings(text: str) -> frozenset[Unit]:
    """The meanings of a unit as it is written: `cm^2`, `\\text{ miles per hour}`, `kg m s^-2`."""
    text = re.sub(r"\^\s*\{?\s*\\circ", " degree ", text)
    text = re.sub(r"\\(?:text|mathrm|cdot|times|[,;:! ])|[{}()*~]", " ", text)
    text = re.sub(r"\bdeg(?:ree)?s?\s+(?=(?:C|F|celsius|fahrenheit)\b)", "", text, flags=re.IGNORECASE)
    parts: list[tuple[list[Unit], int]] = []
    power, sign, closed = 1, 1, False
    for token in _TOKEN.findall(text):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif parts and (token in _POWERS_BEHIND or token.startswith("^")):
            exponent = _POWERS_BEHIND.get(token) or int(re.sub(r"[\s^]", "", token))
            parts[-1] = parts[-1][0], parts[-1][1] * exponent
        elif found := _named(token):
            if closed and sign > 0:  # J/mol K: is K above or below?
                return frozenset()
            closed = closed or sign < 0
            parts.append((found, sign * power))
            power, sign = 1, 1
        else:
            return frozenset()
    powers = [exponent for _, exponent in parts]
    if len(powers) > _MOST_PARTS or any(abs(power) > _MOST_POWER for power in powers):
        return frozenset()
    return frozenset(
        _product(zip(units, powers, strict=True)) for units in product(*(each for each, _ in parts)) if units
    )


def _product(units: Iterable[tuple[Unit, int]]) -> Unit:
    scale, exponents = Fraction(1), Counter[str]()
    for (factor, names), power in units:
        scale *= Fraction(factor**power)
        for name, exponent in names:
            exponents[name] += exponent * power
    return scale, frozenset((name, exponent) for name, exponent in exponents.items() if exponent)


def _named(token: str) -> list[Unit]:
    known = _known()
    lower = token.lower() if len(token) > 2 else token
    return next((known[each] for each in (token, lower, lower.removesuffix("s")) if each in known), [])


@lru_cache(maxsize=1)
def _known() -> dict[str, list[Unit]]:
    """The meanings of each name."""
    known: dict[str, list[Unit]] = {}
    for base, names in _BASES.items():
        for entry in names.split("; "):
            size, *each = entry.split()
            for name in each:
                known.setdefault(name, []).append((Fraction(size), frozenset({(base, 1)})))
    for names, definition in _DERIVED.items():
        first, *others = definition.split()
        scale = Fraction(first) if first.isdecimal() else Fraction(1)
        pairs = [each.partition("^") for each in (others if first.isdecimal() else (first, *others))]
        factor, bases = _product((known[name][0], int(power or 1)) for name, _, power in pairs)
        for name in names.split():
            known.setdefault(name, []).append((scale * factor, bases))
    return known
