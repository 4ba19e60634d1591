"""All records of a run, in one order, with totals. What every writer takes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_dynamo.record import FORMAT
from pytest_dynamo.record import Record


_PHASES = ("import", "setup", "call", "teardown")


@dataclass(frozen=True)
class Report:
    records: tuple[Record, ...]
    environment: Mapping[str, Any]
    #: What holds for the run as a whole, such as "counts depend on the order of the tests".
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Iterable[Record], environment: Mapping[str, Any], notes: Iterable[str] = ()) -> Report:
        ordered = sorted(records, key=lambda r: (r.nodeid, (r.variant or {}).get("id") or "", _PHASES.index(r.phase)))
        return cls(tuple(ordered), environment, tuple(dict.fromkeys(notes)))

    @property
    def totals(self) -> dict[str, int | None]:
        """Sums over all records of what could be observed; None where that is nothing."""
        seen = [record.observation for record in self.records]
        return {
            "records": len(self.records),
            "tests": len({record.nodeid for record in self.records if record.phase != "import"}),
            "graphs": _sum(o.graphs for o in seen),
            "breaks": _sum(o.break_count for o in seen),
            "ignored_breaks": _sum(
                None if o.break_count is None else sum(b.ignored is not None for b in o.breaks) for o in seen
            ),
            "recompiles": _sum(o.recompile_count for o in seen),
            "limit_hits": _sum(None if "limit_hits" in o.untold else len(o.limit_hits) for o in seen),
            "cudagraph_skips": sum(len(o.cudagraphs.skips) for o in seen),
            "parity_calls": sum(record.parity.calls for record in self.records),
            "findings": sum(len(record.findings) for record in self.records),
            "not_checked": sum(len(record.not_checked) for record in self.records),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "environment": dict(self.environment),
            "records": [record.to_json() for record in self.records],
            "totals": self.totals,
            "notes": list(self.notes),
        }


def _sum(values: Iterable[int | None]) -> int | None:
    given = list(values)
    told = [value for value in given if value is not None]
    return sum(told) if told or not given else None
