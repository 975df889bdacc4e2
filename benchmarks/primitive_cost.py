"""Answers: what does each primitive cost, beside the paper's own table (its A9).

YIELD and COMBINE without KV are the executor's own `do_yield` and `do_combine`: a sequence that stops between attention
and experts leaves its hidden rows in the step's buffer and its KV in its pages, so nothing is copied; what remains is
writing where each coroutine stands, and slicing the rows of those that go on together.  Both are array operations, so
the cost a sequence should fall with the size of the batch; the paper's 10 us a sequence are held at every size, one
sequence included.  The model under them is a stand-in whose modules do nothing, so that bookkeeping is all that is
timed; the baseline is a whole step over such a model, with all cutting and page plans.

With KV and between ranks bytes are all that counts: `kv_moves.py` measures those beside plain copies and plain gets,
and runs from here on one rank, on two, and on two virtual Slurm nodes where Slurm is installed.  Rank 0's decisions are
timed by `decision.py`, PARTITION by `partition_cost.py`.

The paper's figures are of H100 nodes with 200 Gb/s links: only ours beside our own ceiling, the share, can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from decision import LIMIT_MS, RANKS, WAITING, decision_time
from line import Limit, print_line
from partition_cost import partition_time

from bgmpi.backlog import Entry
from bgmpi.executor import Executor, MicroBatch, Shape
from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream
from bgmpi.sequence_manager import SequenceManager

SIZES = (1, 8, 64, 256)
LAYERS, HIDDEN, CONTEXT = 12, 1024, 128
YIELD_LIMIT_US = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    here: str
    paper: str


@dataclass(slots=True)
class Table:
    """What was measured, in words and in numbers."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    limits: list[Limit] = field(default_factory=list)


class Hollow:
    """A model whose modules do nothing; what the executor asks of a model and no more."""

    layers = LAYERS
    arch = SimpleNamespace(hidden=HIDDEN)

    def is_collective(self, layer: int) -> bool:
        """Say that every layer is sparse."""
        return True

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of zeros."""
        return torch.zeros(1, HIDDEN, dtype=torch.bfloat16).expand(len(ids), HIDDEN)

    @contextmanager
    def attention_of(self, layer: int) -> Iterator[Callable[..., None]]:
        """Give what does nothing."""
        yield lambda *_: None

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
    places = KvPlaces(slots=sequences, page_tokens=64, pages=pages)
    manager = SequenceManager(places, slots=sequences, budget=sequences * CONTEXT, most_tokens=2 * CONTEXT)
    manager.admit([Entry(s, np.ones(CONTEXT - 1, np.int32), CONTEXT - 1, 2 * CONTEXT) for s in range(sequences)])
    manager.refill()
    prefill = manager.plan()
    assert prefill is not None and prefill.emits.all(), "the prompts of this benchmark fit one step"
    none = np.zeros(sequences, bool)
    manager.commit(prefill, np.ones(sequences, np.int32), none, none)
    decode = manager.plan()
    assert decode is not None and len(decode.ids) == sequences
    home = backend.empty((1, LAYERS, 1), torch.bfloat16)
    kv = KvStream(backend, home, device_pages=None, buffer_pages=0, buffers=0, spill=None)
    hidden = backend.empty((sequences, HIDDEN), torch.bfloat16)
    executor = Executor(
        Hollow(), backend, kv, places, hidden, shape=Shape(512, 0), slots=sequences  # type: ignore[arg-type]
    )
    plan = backend.plan_attention(decode.first, decode.before, places.compute.table[decode.slots], 64)
    batch = MicroBatch(0, sequences, decode.slots, torch.from_numpy(decode.positions), plan)
    deeds: tuple[Callable[[], object], ...] = (
        lambda: executor.do_yield(batch, 3),
        lambda: executor.do_combine(hidden, 3, 0, sequences),
        lambda: executor.step(decode, sequences),
    )
    one, two, three = (1e6 * seconds_each(deed, span) for deed in deeds)
    return one, two, three


# --- the rows of the table ------------------------------------------------------------------------------------------


def without_kv(table: Table, quick: bool) -> None:
    """YIELD and COMBINE when no KV moves; prints how they fall with the number of sequences."""
    backend = open_backend("cpu", None, 1)
    figures = table.figures
    print(f"{'sequences':>9} | {'YIELD us':>9} {'a sequence':>10} | {'COMBINE us':>10} {'a sequence':>10} | "
          f"{'hollow step of ' + str(LAYERS) + ' layers us':>30} {'a sequence and layer':>20}")
    for sequences in SIZES:
        left, joined, step = measure(backend, sequences, 0.1 if quick else 1.0)
        print(f"{sequences:>9} | {left:>9.2f} {left / sequences:>10.3f} | {joined:>10.2f} "
              f"{joined / sequences:>10.3f} | {step:>30.1f} {step / sequences / LAYERS:>20.3f}")
        figures[f"yield_us_a_sequence_{sequences}"] = left / sequences
        figures[f"combine_us_a_sequence_{sequences}"] = joined / sequences
        figures[f"step_us_a_sequence_and_layer_{sequences}"] = step / sequences / LAYERS
    worst = max(figures[f"yield_us_a_sequence_{sequences}"] for sequences in SIZES)
    combined = max(figures[f"combine_us_a_sequence_{sequences}"] for sequences in SIZES)
    table.limits.append(Limit("yield_us_a_sequence_worst", worst, YIELD_LIMIT_US, "<="))
    table.rows += [
        Row("YIELD, no KV moves", f"{worst:.2f} us a sequence at worst", "< 10 us (hidden checkpoint < 5 us)"),
        Row("COMBINE, no KV moves", f"{combined:.2f} us a sequence at worst", "-"),
    ]


def between_tiers(table: Table, quick: bool) -> None:
    """YIELD and COMBINE with KV, device and host."""
    found = moves([], quick)
    take(table, found)
    numbers = found["figures"]
    share = found["limits"][0]["value"]
    table.rows += [
        Row("YIELD, 2K tokens of KV to host",
            f"{numbers['yield_kv_2k_ms']:.1f} ms, {numbers['yield_kv_2k_share_of_memcpy']:.2f} of memcpy", "-"),
        Row("COMBINE, 10K tokens of KV, a layer", f"{numbers['combine_layer_us'] / 1e3:.2f} ms, {share:.2f} of memcpy",
            "~0.2 ms (PCIe 5.0)"),
        Row("host store, allocated and touched", f"{numbers['host_store_s_a_gb']:.2f} s a GB", "minutes -> seconds"),
    ]  # fmt: skip


def between_ranks(table: Table, quick: bool, slurm: bool) -> None:
    """MIGRATE and a round of control, on this node and, with Slurm, between two virtual ones."""
    places = {"within_a_node": moves(["mpiexec", "-n", "2"], quick)}
    if slurm:
        with virtual_nodes():
            places["between_nodes"] = moves(
                ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", "--nodes=2", "--ntasks=2"], quick
            )
    else:
        print("no slurmctld, or --no-slurm: MIGRATE between nodes is not measured, and its limit not held")
        table.limits.append(Limit("migrate_share_of_mpi_get_between_nodes", float("nan"), 0.5, ">="))
    for where, found in places.items():
        take(table, found)
        numbers, share = found["figures"], found["limits"][0]["value"]
        named = where.replace("_", " ")
        table.rows += [
            Row(f"MIGRATE, 2K tokens of KV, 144 MB, {named}",
                f"{numbers[f'migrate_2k_ms_{where}']:.1f} ms, {share:.2f} of a plain MPI_Get",
                "~2.9 ms (re-prefill ~112 ms)"),
            Row(f"round of control, 2 ranks {named}", f"{numbers[f'round_of_control_us_{where}']:.0f} us a page",
                "5-10 ms per 64 tokens"),
        ]  # fmt: skip


def decisions(table: Table, quick: bool) -> None:
    """Rank 0's decision at a page boundary."""
    figures, limits = decision_time(quick=quick)
    table.figures |= figures
    table.limits += limits
    worst = limits[0].value
    table.rows.append(
        Row(f"decision, {WAITING:,} waiting on {RANKS} ranks", f"{worst:.2f} ms, limit {LIMIT_MS:g}", "-")
    )


def partition(table: Table, quick: bool) -> None:
    """PARTITION, over two ranks of one core each."""
    figures, limits = partition_time(quick=quick)
    table.figures |= figures
    table.limits += limits
    table.rows.append(
        Row("PARTITION, decision to first token", f"{figures['partition_ms_first']:.1f} ms, of it a step "
            f"{figures['partition_ms_lone_step']:.1f}", "5-10 s (reconfiguration)")
    )


# --- running kv_moves.py ----------------------------------------------------------------------------------------------


def moves(launcher: list[str], quick: bool) -> dict[str, Any]:
    """Run kv_moves.py under a launcher and return its JSON line."""
    beside = Path(sys.executable).with_name(launcher[0]) if launcher else Path()
    words = [str(beside) if launcher and beside.exists() else one for one in launcher[:1]] + launcher[1:]
    script = [sys.executable, str(Path(__file__).with_name("kv_moves.py")), *(["--quick"] if quick else [])]
    # A waiting rank gives its core away at once, which the one that is timed may need.
    environ = os.environ | {"PYTHONSAFEPATH": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    ended = subprocess.run([*words, *script], env=environ, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(words) or 'kv_moves.py'} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    line: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return line


def take(table: Table, found: dict[str, Any]) -> None:
    """Add the figures and limits of a JSON line."""
    table.figures |= {name: value for name, value in found["figures"].items() if name != "load_average"}
    table.limits += [Limit(one["name"], one["value"], one["bound"], one["sense"]) for one in found["limits"]]


@contextmanager
def virtual_nodes() -> Iterator[None]:
    """Run two virtual Slurm nodes on this machine; srun of this process speaks to them."""
    script = str(Path(__file__).parents[1] / "slurm" / "local_cluster.sh")
    with tempfile.TemporaryDirectory(prefix="bgmpi-cost-") as folder:
        own = os.environ | {"LOCAL_CLUSTER_DIR": folder}
        try:
            subprocess.run([script, "start", "2"], env=own, check=True, timeout=60, stdout=subprocess.DEVNULL)
            os.environ["SLURM_CONF"] = str(Path(folder) / "slurm.conf")
            yield
        finally:
            subprocess.run([script, "stop"], env=own, check=False, timeout=60, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print the table and the JSON line."""
    there = shutil.which("slurmctld", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None
    parser = argparse.ArgumentParser(description="What does each primitive cost, beside the paper's table?")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--slurm", action=argparse.BooleanOptionalAction, default=there,
                        help="also between two virtual nodes; default: where slurmctld is installed")
    asked = parser.parse_args()
    table = Table()
    without_kv(table, asked.quick)
    between_tiers(table, asked.quick)
    between_ranks(table, asked.quick, asked.slurm)
    partition(table, asked.quick)
    decisions(table, asked.quick)
    width = max(len(row.what) for row in table.rows)
    print(f"\n{'primitive':<{width}} | {'here':<42} | paper (A9)")
    for row in table.rows:
        print(f"{row.what:<{width}} | {row.here:<42} | {row.paper}")
    print()
    print_line("primitive_cost", table.figures, table.limits, quick=asked.quick)


if __name__ == "__main__":
    main()
