"""Which weights stay in memory and which are read anew in every sweep, for a budget of bytes.

A model larger than memory still answers a batch at full speed when every weight is read once a sweep for the whole
active set (paper, section on host-first memory).  What is read at once and given back at once is a `Unit`: the
attention of a layer, a dense block, one expert, the head.  Units come in the order in which a sweep uses them, the same
on every sweep, so reading ahead needs no prediction.

The embedding, norms, biases and routers always stay: they are small, or looked up by row.  Of the rest attention stays
first, then dense blocks and the head, experts last, because an expert is the largest part and its tokens the fewest.
The experts that stay are spread evenly over the sweep, or the disk would rest while the machine computes them.

Pure: names, shapes and bytes; no file, no tensor, no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from bgmpi.architecture import Architecture, Kind, Latent, split_experts
from bgmpi.errors import InternalError, UsageError
from bgmpi.tensor_names import Shape, expected_tensors, tensor_name

#: Bytes that every piece of a ring begins at a multiple of, and the unit of reading past the page cache.
BLOCK = 4096
#: Bytes that a ring should have where the budget allows, to read on while the machine is busy with resident weights.
WANTED = 256 << 20
_ROUTER_BYTES = 8  # a router's numbers are held in float64
_GOLDEN = 0.6180339887498949


class Part(IntEnum):
    """What a unit is, in the order in which units deserve to stay in memory."""

    ATTENTION = 0
    DENSE = 1
    SHARED = 2
    HEAD = 3
    EXPERT = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are used together.  groups: the roles of its matrices, those of one group joined by rows into one;
    expert: the number of a routed expert in the model."""

    part: Part
    layer: int
    groups: tuple[tuple[str, ...], ...]
    expert: int = 0

    def names(self, arch: Architecture, group: tuple[str, ...]) -> list[str]:
        """Return what the checkpoint calls the tensors of a group."""
        return [tensor_name(arch, role, self.layer, self.expert) for role in group]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What a rank does with its weights.  resident_bytes: what stays; streamed: what passes through a ring of
    `ring_bytes`, in sweep order, nothing when all stays."""

    resident_bytes: int
    streamed: tuple[Unit, ...] = ()
    ring_bytes: int = 0


def weight_units(arch: Architecture, rank: int, ranks: int) -> tuple[Unit, ...]:
    """Return the units of a rank in the order of a sweep."""
    return tuple(_units(arch, rank, ranks))


def _units(arch: Architecture, rank: int, ranks: int) -> Iterator[Unit]:
    attention = _latent_groups(arch.latent) if arch.latent else (("query", "key", "value"), ("output",))
    mine = range(*split_experts(arch.moe.experts, ranks)[rank]) if arch.moe else range(0)
    for layer, kind in enumerate(arch.kinds):
        yield Unit(Part.ATTENTION, layer, attention)
        if kind is Kind.DENSE or arch.moe is None:
            yield Unit(Part.DENSE, layer, (("gate", "up"), ("down",)))
            continue
        for expert in mine:
            yield Unit(Part.EXPERT, layer, (("expert_gate", "expert_up"), ("expert_down",)), expert)
        if arch.moe.shared:
            yield Unit(Part.SHARED, layer, (("shared_gate", "shared_up"), ("shared_down",)))
    if not arch.tied:
        yield Unit(Part.HEAD, 0, (("head",),))


def _latent_groups(latent: Latent) -> tuple[tuple[str, ...], ...]:
    queries = (("query_down",), ("query_up",)) if latent.query_rank else (("query",),)
    return *queries, ("kv_down",), ("kv_up",), ("output",)


def weight_bytes(arch: Architecture, rank: int, ranks: int, itemsize: int) -> int:
    """Return the bytes of all weights that a rank holds, each number in `itemsize` bytes.  Pure: reads nothing."""
    expected = expected_tensors(arch)
    units = weight_units(arch, rank, ranks)
    return _fixed_bytes(arch, expected, itemsize) + sum(_unit_bytes(arch, expected, unit, itemsize) for unit in units)


def plan_weights(arch: Architecture, rank: int, ranks: int, itemsize: int, budget: int | None) -> WeightPlan:
    """Decide what stays in `budget` bytes (None: everything); numbers take `itemsize` bytes each.

    Raises UsageError when not even the largest unit fits beside what must stay.
    """
    whole = weight_bytes(arch, rank, ranks, itemsize)
    if budget is None or whole <= budget:
        return WeightPlan(whole)
    expected = expected_tensors(arch)
    fixed = _fixed_bytes(arch, expected, itemsize)
    units = weight_units(arch, rank, ranks)
    size = {unit: _unit_bytes(arch, expected, unit, itemsize) for unit in units}
    room = {unit: size[unit] + 2 * BLOCK * len(unit.groups) for unit in units}
    # Every beginning of an order by these fractions is spread evenly over the sweep.
    spread = {unit: place * _GOLDEN % 1.0 for place, unit in enumerate(units)}
    wanted = sorted(units, key=lambda unit: (unit.part, spread[unit]))
    largest_behind = _largest_behind([room[unit] for unit in wanted])
    stays: set[Unit] = set()
    resident, skipped = fixed, 0
    for unit, behind in zip(wanted, largest_behind, strict=True):
        ring = max(2 * max(skipped, behind), WANTED)
        if resident + size[unit] + ring <= budget:
            stays.add(unit)
            resident += size[unit]
        else:
            skipped = max(skipped, room[unit])
    streamed = tuple(unit for unit in units if unit not in stays)
    ring = min(budget - resident, max(2 * skipped, WANTED), sum(room[unit] for unit in streamed)) // BLOCK * BLOCK
    if ring < skipped:
        raise UsageError(
            f"--weight-memory {budget:,}: {fixed:,} bytes of weights must stay in memory and {skipped:,} must be read "
            f"at once on rank {rank}; give at least {fixed + 2 * skipped:,} (all weights: {whole:,})"
        )
    return WeightPlan(resident, streamed, ring)


def _fixed_bytes(arch: Architecture, expected: dict[str, Shape], itemsize: int) -> int:
    """Return the bytes of what always stays: all that is in no unit of any rank."""
    passing = {name for unit in weight_units(arch, 0, 1) for group in unit.groups for name in unit.names(arch, group)}
    routers = {
        tensor_name(arch, "router", layer) for layer, kind in enumerate(arch.kinds) if kind is Kind.SPARSE and arch.moe
    }
    return sum(
        prod(shape) * (_ROUTER_BYTES if name in routers else itemsize)
        for name, shape in expected.items() if name not in passing
    )


def everywhere_bytes(arch: Architecture, itemsize: int) -> int:
    """Return the bytes of the matrices that every rank holds, all units but the routed experts.  Pure: reads
    nothing."""
    expected = expected_tensors(arch)
    units = (unit for unit in weight_units(arch, 0, 1) if unit.part is not Part.EXPERT)
    return sum(_unit_bytes(arch, expected, unit, itemsize) for unit in units)


def _unit_bytes(arch: Architecture, expected: dict[str, Shape], unit: Unit, itemsize: int) -> int:
    return sum(prod(expected[name]) for group in unit.groups for name in unit.names(arch, group)) * itemsize


def _largest_behind(sizes: Sequence[int]) -> list[int]:
    """Return the largest of the sizes behind each."""
    found, largest = [], 0
    for one in reversed(sizes):
        found.append(largest)
        largest = max(largest, one)
    return found[::-1]


class ByteRing:
    """Where in a ring each piece lies: given in order, taken back in order, never split over the end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: deque[tuple[int, int]] = deque()

    def allocate(self, size: int) -> int | None:
        """Return where `size` > 0 bytes may lie, behind the newest piece or at the beginning; None while nowhere."""
        begin = self._place(size)
        if begin is not None:
            self._held.append((begin, begin + size))
        return begin

    def _place(self, size: int) -> int | None:
        if not self._held:
            return 0 if size <= self.size else None
        oldest, newest_end = self._held[0][0], self._held[-1][1]
        if newest_end <= oldest:  # wrapped, or full to the end
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self.size:
            return newest_end
        return 0 if size <= oldest else None

    def free(self) -> None:
        """Take the oldest piece back."""
        if not self._held:
            raise InternalError("a piece of the weight ring was given back that nobody holds")
        self._held.popleft()
