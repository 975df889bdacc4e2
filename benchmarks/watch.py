"""Watches a job from outside: what each step computed, which experts its tokens chose, and where its seconds went.

The benchmarks need numbers that the program has no reason to keep.  So they wrap the public calls of a step (plan,
attend, feed_forward, logits, draw, and the router) for the length of one job, in a pass of its own: the timed pass runs
untouched.  A watched call costs about a microsecond and keeps references only; everything is counted afterwards.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.executor import Executor
from bgmpi.model import Model
from bgmpi.moe import Router
from bgmpi.sampling import Sampler
from bgmpi.sequence_manager import SequenceManager
from bgmpi.step_plan import StepPlan


@dataclass(slots=True)
class Step:
    """One step.  plan: what it computed; prompt int64 [S]: prompt lengths of its sequences; begun: seconds;
    experts: layer -> pieces int32 [t, A] in token order."""

    plan: StepPlan
    prompt: NDArray[np.int64]
    begun: float
    experts: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def is_prompt(self) -> NDArray[np.bool_]:
        """Say of each token whether it is one of a prompt, bool [T]."""
        count = np.diff(self.plan.first)
        return self.plan.positions < np.repeat(self.prompt, count)

    def chosen(self, layer: int) -> NDArray[np.int32]:
        """Return the experts of every token in one layer, int32 [T, A]."""
        return torch.cat(self.experts[layer]).numpy()


@dataclass(slots=True)
class Watched:
    """What was seen: steps in order, and inclusive seconds of each part."""

    steps: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    layer: int = 0


@contextmanager
def replaced(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method by `wrap(method)` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def watched() -> Iterator[Watched]:
    """Watch every step of the jobs that run inside the block."""
    seen = Watched()

    def timed(part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed_call(*arguments: Any) -> Any:
                begun = time.perf_counter()
                result = call(*arguments)
                seen.seconds[part] += time.perf_counter() - begun
                return result

            return timed_call

        return wrap

    def noting_plan(call: Callable[..., Any]) -> Callable[..., Any]:
        def plan(manager: SequenceManager) -> StepPlan | None:
            found: StepPlan | None = call(manager)
            if found is not None:
                seen.steps.append(Step(found, manager.active_set.prompt[found.slots], time.perf_counter()))
            return found

        return plan

    def noting_layer(call: Callable[..., Any]) -> Callable[..., Any]:
        def feed_forward(model: Model, layer: int, hidden: torch.Tensor) -> None:
            seen.layer = layer
            call(model, layer, hidden)

        return feed_forward

    def noting_experts(call: Callable[..., Any]) -> Callable[..., Any]:
        def route(router: Router, x: torch.Tensor) -> Any:
            expert, weight = call(router, x)
            seen.steps[-1].experts[seen.layer].append(expert)
            return expert, weight

        return route

    with (
        replaced(SequenceManager, "plan", noting_plan),
        replaced(Router, "__call__", noting_experts),
        replaced(Model, "feed_forward", noting_layer),
        replaced(Model, "feed_forward", timed("experts")),
        replaced(Model, "_attend", timed("attention")),
        replaced(Model, "_logits", timed("head")),
        replaced(Sampler, "draw", timed("sampling")),
    ):
        yield seen


@contextmanager
def noted_executors() -> Iterator[list[Executor]]:
    """Collect the executors that are made inside the block; drop them soon, they hold the weights."""
    made: list[Executor] = []

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def note(executor: Executor, *arguments: Any, **options: Any) -> None:
            call(executor, *arguments, **options)
            made.append(executor)

        return note

    with replaced(Executor, "__init__", wrap):
        yield made
