"""Numbers formatted for people. An unmeasured value (None) is a dash."""

from __future__ import annotations

_DASH = "-"


def count(value: float | None) -> str:
    """Format a count: `1,234`."""
    return _DASH if value is None else f"{value:,.0f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a decimal: `0.412`. Values that round to zero have no sign."""
    return _DASH if value is None else f"{value:z,.{digits}f}"


def parameter_count(parameters: float) -> str:
    """Format a number of parameters: `0.5 M`, `33.4 M`, `0.494 B`."""
    unit, name = (1e9, "B") if parameters >= 1e8 else (1e6, "M")
    return f"{parameters / unit:.3g} {name}"


def money(usd: float | None) -> str:
    """Format US dollars, to the cent from $1 up and to four digits below: small runs cost little."""
    if usd is None:
        return _DASH
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def clock(seconds: float) -> str:
    """Format a duration: `31 s`, `4:31`, `1:12:05`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{whole} s"
