"""How much of a decode step is Python: the overhead around the kernels, at 64 active sequences of the demo model.

Physics: a step of 30 layers makes some thousand calls; each costs Python and dispatch a microsecond or more, and while
they run no weight is read.  The limit is a tenth of the step, one rank with two threads.

What is a kernel: the self time of every torch operator (torch's own profiler) and the time inside every compiled
kernel, from the moment the C function is entered.  Everything else is overhead: bookkeeping, numpy, the Python around
the calls inside kernels/ too.  There is no MPI at one rank.  Steps of one job take turns: most run untouched, some
under torch's profiler.

Wall and kernels come from the same profiled steps, so that a busy neighbour slows both alike.  The profiler costs c an
operator, measured here: of an operator called from Python it falls outside the operator's time, of one called by
another operator into that one's.  So overhead = wall - kernels - c * outer, step = wall - c * all, which should be near
the untouched steps.  The share without this correction is printed beside, as an upper bound.

The baseline in the same run is a twin: a random model of the same depth, experts and heads' number, so narrow that
arithmetic costs nothing.  Its whole step is overhead, dispatch included, so it should be near the figure found, and
some of its steps run under cProfile to tell which functions to cut.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from line import Limit, print_line
from torch.profiler import ProfilerActivity, profile
from watch import replaced
from work import Lengths, ModelShape, Work, make_work, run_job, write_requests

from bgmpi.io.demo_model import demo_model
from bgmpi.kernels.team import Team
from bgmpi.sequence_manager import SequenceManager
from bgmpi.step_plan import StepPlan

SEQUENCES = 64
OVERHEAD_LIMIT = 0.10
SHOWN = 15
TWIN = ModelShape(hidden=36, layers=30, heads=9, kv_heads=3, head=4, experts=8, active=2, inner=48, vocab=512)
#: Mode of a block of steps -> steps in it.
BLOCKS = {"untouched": 8, "kernels": 1, "functions": 4}


def lengths(steps: int) -> Lengths:
    """Return 64 prompts of 16 to 64 tokens whose answers all end after `steps` tokens."""
    return Lengths(SEQUENCES, 16, 64, median=steps, p95=steps, p99_ratio=1.0, most_ratio=1.0)


@dataclass(frozen=True, slots=True)
class Profiled:
    """One step under torch's profiler.  Seconds: wall, torch (operators), compiled (kernels).  Operators: outer called
    from Python, inner from other operators; cost: the profiler's, seconds an operator."""

    wall: float
    torch: float
    compiled: float
    outer: int
    inner: int
    cost: float

    @property
    def step(self) -> float:
        """Seconds of the step without the profiler."""
        return self.wall - self.cost * (self.outer + self.inner)

    @property
    def overhead(self) -> float:
        """Seconds of the step outside kernels, without the profiler."""
        return self.upper - self.cost * self.outer

    @property
    def upper(self) -> float:
        """Seconds outside kernels, the profiler's own included."""
        return self.wall - self.torch - self.compiled


@dataclass(slots=True)
class Turns:
    """The steps of one job in turns.  walls: mode -> seconds of each step; profiled: what each profiled step came to;
    functions: what cProfile saw."""

    cost: float
    modes: tuple[str, ...]
    walls: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in BLOCKS})
    profiled: list[Profiled] = field(default_factory=list)
    functions: cProfile.Profile = field(default_factory=cProfile.Profile)
    teams: list[Team] = field(default_factory=list)
    _turn: int = 0
    _block: list[float] = field(default_factory=list)
    _running: bool = False
    _steady: bool = False
    _begun: float = 0.0
    _inside: float = 0.0
    _profiler: Any = None

    def boundary(self, call: Callable[[SequenceManager], StepPlan | None], manager: SequenceManager) -> StepPlan | None:
        """Close the step that ends here, change the mode when it is due, and begin the next."""
        now = time.perf_counter()
        mode = self.modes[self._turn % len(self.modes)]
        if self._running and self._steady:
            self._block.append(now - self._begun)
        if self._running and (len(self._block) == BLOCKS[mode] or not self._steady):
            self._stop(mode)
        if not self._running and self._steady:
            self._start(self.modes[self._turn % len(self.modes)])
        self._begun = time.perf_counter()
        plan = call(manager)
        self._steady = plan is not None and len(plan.ids) == len(plan.slots) == SEQUENCES
        return plan

    def _start(self, mode: str) -> None:
        self._block, self._running, self._inside = [], True, 0.0
        if mode == "kernels":
            for team in self.teams:
                self._time_compiled(team)
            self._profiler = profile(activities=[ProfilerActivity.CPU])
            self._profiler.start()
        elif mode == "functions":
            self.functions.enable()

    def _stop(self, mode: str) -> None:
        whole = len(self._block) == BLOCKS[mode]
        if mode == "kernels":
            self._profiler.stop()
            for team in self.teams:
                del team.run, team.run_alone
            if whole:
                events = self._profiler.events()
                seconds = 1e-6 * sum(event.self_cpu_time_total for event in events)
                outer = sum(event.cpu_parent is None for event in events)
                self.profiled.append(
                    Profiled(self._block[0], seconds, self._inside, outer, len(events) - outer, self.cost)
                )
        elif mode == "functions":
            self.functions.disable()
        if whole:
            self.walls[mode] += self._block
            self._turn += 1
        self._running = False

    def _time_compiled(self, team: Team) -> None:
        """Let calls of this team add the time inside the C function to `_inside`, until its own methods are back."""

        def timed(deed: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                begun = time.perf_counter()
                deed(*arguments)
                self._inside += time.perf_counter() - begun

            return call

        shadow = Team.__new__(Team)
        shadow.__dict__.update(team.__dict__)
        if team._parallel is not None:
            shadow._parallel = timed(team._parallel)  # type: ignore[assignment]
        shadow._compiled = {body: (address, timed(call)) for body, (address, call) in team._compiled.items()}
        team.run, team.run_alone = shadow.run, shadow.run_alone  # type: ignore[method-assign]


def profiler_cost(calls: int = 500, tries: int = 7) -> float:
    """Measure the seconds that torch's profiler adds to one operator."""
    number = torch.zeros(4)

    def each() -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            number.add_(1.0)
        return (time.perf_counter() - begun) / calls

    plain, watched = [], []
    for _ in range(tries):
        plain.append(each())
        with profile(activities=[ProfilerActivity.CPU]):
            watched.append(each())
    return max(0.0, min(watched) - min(plain))


@contextmanager
def in_turns(turns: Turns) -> Iterator[None]:
    """Let the job inside the block run its steps in turns."""

    def note_team(call: Callable[..., None]) -> Callable[..., None]:
        def note(team: Team, threads: int) -> None:
            call(team, threads)
            turns.teams.append(team)

        return note

    def at_boundary(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda manager: turns.boundary(call, manager)

    with replaced(Team, "__init__", note_team), replaced(SequenceManager, "plan", at_boundary):
        yield


def print_functions(seen: cProfile.Profile, steps: int) -> None:
    """Print the Python functions of the program that cost most, without what they call."""
    rows = []
    for (file, _, name), (_, calls, own, _, _) in pstats.Stats(seen).stats.items():  # type: ignore[attr-defined]
        rows.append((own / steps * 1e6, calls / steps, name if file == "~" else f"{Path(file).name}:{name}"))
    print(f"most costly functions of the narrow twin by own time (under cProfile, which makes calls dearer; operators "
          f"such as + and [] count as the function's own)\n{'us a step':>10} {'calls':>8}  function")
    for own, calls, name in sorted(rows, reverse=True)[:SHOWN]:
        print(f"{own:>10.0f} {calls:>8.1f}  {name}")


def print_step(turns: Turns, twin: Turns) -> dict[str, float]:
    """Print what a step is made of; return the figures."""
    wall, narrow = (statistics.median(one.walls["untouched"]) for one in (turns, twin))

    def median(name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in turns.profiled))

    share = statistics.median(step.overhead / step.step for step in turns.profiled)
    upper = statistics.median(step.upper / step.wall for step in turns.profiled)
    print(f"{'step, untouched':>34} {1e3 * wall:>9.2f} ms\n{'step, profiled':>34} {1e3 * median('wall'):>9.2f} ms\n"
          f"{'the same without the profiler':>34} {1e3 * median('step'):>9.2f} ms\n"
          f"{'torch':>34} {1e3 * median('torch'):>9.2f} ms, {median('outer'):.0f} operators called, "
          f"{median('inner'):.0f} within them; the profiler adds {1e6 * turns.cost:.2f} us to each\n"
          f"{'compiled kernels':>34} {1e3 * median('compiled'):>9.2f} ms\n"
          f"{'overhead':>34} {1e3 * median('overhead'):>9.2f} ms, {100 * share:.1f} % (at most {100 * upper:.1f} %)\n"
          f"{'whole step of the narrow twin':>34} {1e3 * narrow:>9.2f} ms, {100 * narrow / wall:.1f} %")
    return {
        "overhead": share, "overhead_upper": upper, "step_ms": 1e3 * wall, "step_from_profile_ms": 1e3 * median("step"),
        "torch_ms": 1e3 * median("torch"), "compiled_ms": 1e3 * median("compiled"),
        "overhead_ms": 1e3 * median("overhead"), "operators_called": median("outer"), "twin_ms": 1e3 * narrow,
        "twin": narrow / wall,
    }


def main() -> None:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description="How much of a decode step is Python.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    steps = 30 if asked.quick else 110
    cost = profiler_cost()
    turns, twin = Turns(cost, modes=("untouched", "kernels")), Turns(cost, modes=("untouched", "functions"))
    with tempfile.TemporaryDirectory(prefix="bgmpi-profile-") as folder:
        out = Path(folder) / "results.h5"
        for model, seen in ((make_work(Work("twin", TWIN, lengths(steps)))[0], twin), (demo_model("moe"), turns)):
            requests = write_requests(lengths(steps), TWIN.vocab, Path(folder) / "requests.jsonl")
            with in_turns(seen):
                run_job(model, requests, out, asked.threads, "--dtype", "float32")
    print_functions(twin.functions, len(twin.walls["functions"]))
    figures = print_step(turns, twin)
    limits = [Limit("python_overhead", figures["overhead"], OVERHEAD_LIMIT, "<=")]
    print_line("profile_step", figures, limits, quick=asked.quick)


if __name__ == "__main__":
    main()
