"""The last line of every benchmark: one JSON object, the same shape for all, so that runs can be compared by a program.

A limit is a number with its bound and the side on which it must lie; a benchmark names every limit that its issue sets,
and reports one that fails instead of leaving it out.  Figures are ratios or carry their unit in the name.  The load of
the machine before and after goes along, because a share measured beside a busy neighbour says little.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

import machine

Sense = Literal["<=", ">="]
_HOLDS = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Limit:
    """`value` must be `sense` `bound`."""

    name: str
    value: float
    bound: float
    sense: Sense

    @property
    def ok(self) -> bool:
        """Whether the limit holds; never for a value that is not a number."""
        return bool(_HOLDS[self.sense](self.value, self.bound))

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.4g}, limit {self.sense} {self.bound:g}: {'holds' if self.ok else 'FAILS'}"


def print_line(
    benchmark: str, figures: Mapping[str, Any], limits: Sequence[Limit] = (), *, quick: bool = False
) -> None:
    """Print the limits in words, then the JSON line.  Call it last."""
    for limit in limits:
        print(limit)
    load = [round(one, 2) for one in os.getloadavg()]
    line = {
        "benchmark": benchmark,
        "machine": machine.describe(),
        "commit": machine.commit(),
        "quick": quick,
        "figures": {**{name: _rounded(value) for name, value in figures.items()}, "load_average": load},
        "limits": [
            {"name": one.name, "value": _rounded(one.value), "bound": one.bound, "sense": one.sense, "ok": one.ok}
            for one in limits
        ],
    }
    print(json.dumps(line), flush=True)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
