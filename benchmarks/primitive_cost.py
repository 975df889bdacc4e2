"""Answers: what do YIELD and COMBINE cost when no KV moves.

Physics: a sequence that stops between attention and experts leaves its hidden rows in the step's buffer and its KV in
its pages, so nothing is copied; what remains is writing where each coroutine stands, and slicing the rows of those that
go on together.  Both are array operations, so the cost a sequence should fall with the size of the batch.  The ceiling
that the paper gives is 10 us a sequence (its A9); here it is held at every size, one sequence included.

The primitives are the executor's own `do_yield` and `do_combine`; the model under them is a stand-in whose modules do
nothing, so that bookkeeping is all that is timed.  The baseline in the same run is a whole step over such a model:
every YIELD and COMBINE of all layers, the cutting into micro-batches and the page plans included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from line import Limit, print_line

from bgmpi.executor import Executor, MicroBatch, Shape
from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend
from bgmpi.sequence_manager import Entry, SequenceManager

SIZES = (1, 8, 64, 256)
LAYERS, HIDDEN, CONTEXT = 12, 1024, 128
YIELD_LIMIT_US = 10.0


class Hollow:
    """A model whose modules do nothing; what the executor asks of a model and no more."""

    layers = LAYERS
    arch = SimpleNamespace(hidden=HIDDEN)

    def is_collective(self, layer: int) -> bool:
        """Say that every layer is sparse."""
        return True

    def page_shape(self, page_tokens: int) -> tuple[int, ...]:
        """Return the smallest page there is."""
        return (1,)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of zeros."""
        return torch.zeros(1, HIDDEN, dtype=torch.bfloat16).expand(len(ids), HIDDEN)

    def attend(self, *_: Any) -> None:
        """Do nothing."""

    def feed_forward(self, layer: int, hidden: torch.Tensor) -> None:
        """Do nothing."""


def seconds_each(deed: Callable[[], object], span: float, blocks: int = 15) -> float:
    """Return the seconds of one `deed`: the median over blocks of calls that fill `span` seconds together."""
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < span / blocks:
        deed()
        calls += 1
    each = []
    for _ in range(blocks):
        begin = time.perf_counter()
        for _ in range(calls):
            deed()
        each.append((time.perf_counter() - begin) / calls)
    return statistics.median(each)


def measure(backend: Backend, sequences: int, span: float) -> tuple[float, float, float]:
    """Return microseconds of one YIELD, one COMBINE and one whole hollow step of `sequences` decoding sequences."""
    pages = sequences * (CONTEXT // 64 + 4)
    manager = SequenceManager(
        slots=sequences, pages=pages, page_tokens=64, budget=sequences * CONTEXT, most_tokens=2 * CONTEXT
    )
    manager.admit([Entry(s, np.ones(CONTEXT - 1, np.int32), CONTEXT - 1, 2 * CONTEXT) for s in range(sequences)])
    manager.refill()
    prefill = manager.plan()
    assert prefill is not None and prefill.emits.all(), "the prompts of this benchmark fit one step"
    none = np.zeros(sequences, bool)
    manager.commit(prefill, np.ones(sequences, np.int32), none, none)
    decode = manager.plan()
    assert decode is not None and len(decode.ids) == sequences
    executor = Executor(
        Hollow(), backend, torch.bfloat16, shape=Shape(512, 0), pages=1, page_tokens=64,  # type: ignore[arg-type]
        budget=sequences, slots=sequences,
    )
    plan = backend.plan_attention(decode.first, decode.before, manager.kv.table[decode.slots], 64)
    batch = MicroBatch(0, sequences, decode.slots, torch.from_numpy(decode.positions), plan)
    hidden = backend.empty((sequences, HIDDEN), torch.bfloat16)
    deeds: tuple[Callable[[], object], ...] = (
        lambda: executor.do_yield(batch, 3),
        lambda: executor.do_combine(hidden, 3, 0, sequences),
        lambda: executor.step(decode, manager.kv.table, sequences),
    )
    one, two, three = (1e6 * seconds_each(deed, span) for deed in deeds)
    return one, two, three


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description="What do YIELD and COMBINE cost when no KV moves?")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    quick = parser.parse_args().quick
    backend = open_backend("cpu", None, 1)
    figures: dict[str, float] = {}
    print(f"{'sequences':>9} | {'YIELD us':>9} {'a sequence':>10} | {'COMBINE us':>10} {'a sequence':>10} | "
          f"{'hollow step of ' + str(LAYERS) + ' layers us':>30} {'a sequence and layer':>20}")
    for sequences in SIZES:
        left, joined, step = measure(backend, sequences, 0.1 if quick else 1.0)
        print(f"{sequences:>9} | {left:>9.2f} {left / sequences:>10.3f} | {joined:>10.2f} "
              f"{joined / sequences:>10.3f} | {step:>30.1f} {step / sequences / LAYERS:>20.3f}")
        figures[f"yield_us_a_sequence_{sequences}"] = left / sequences
        figures[f"combine_us_a_sequence_{sequences}"] = joined / sequences
        figures[f"step_us_a_sequence_and_layer_{sequences}"] = step / sequences / LAYERS
    print("paper (A9): hidden checkpoint < 5 us, usual yield < 10 us a sequence; COMBINE that restores KV ~200 us a "
          "sequence and layer (none is restored here)")
    worst = max(figures[f"yield_us_a_sequence_{sequences}"] for sequences in SIZES)
    limits = [Limit("yield_us_a_sequence_worst", worst, YIELD_LIMIT_US, "<=")]
    print_line("primitive_cost", figures, limits, quick=quick)


if __name__ == "__main__":
    main()
