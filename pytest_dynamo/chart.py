"""Values → a small chart in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


def chart(values: Sequence[float | None], encoding: str = "utf-8", least: float = 0.05) -> str:
    """Return one character for each value: the higher, the more. Unknown values are blanks.

    Args:
        values: oldest first.
        encoding: of what it is written to; where it has no blocks, the chart is ASCII.
        least: relative distance from the lowest to the highest that is drawn in full height. Less is drawn
            lower, that noise does not look like a change.
    """
    try:
        BLOCKS.encode(encoding)
        marks = BLOCKS
    except (UnicodeEncodeError, LookupError):
        marks = ASCII
    known = [value for value in values if _known(value)]
    if not known:
        return " " * len(values)
    low = min(known)
    span = max(max(known) - low, abs(low) * least) or 1.0
    top = len(marks) - 1
    return "".join(marks[round((value - low) / span * top)] if _known(value) else " " for value in values)


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
