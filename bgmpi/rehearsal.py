"""What a step over a group would take on this machine, as a share of a lone step: tried once, at start (paper A6).

Whether PARTITION pays depends on what no constant knows: how much of a step reads weights that a group splits, whether
ranks have a core and memory bandwidth each, how long a gather of some kilobytes waits for the slowest member.  So one
decode step is rehearsed, alone and over the group of each size that has the first rank in it, with the real weights,
shards and collectives, over pages of its own.  The ratio counts and not the seconds: a busy machine slows both.

A few layers stand for all when the model is large, so this costs about a second at most.  It takes no sequence, draws
nothing and leaves no trace in what the model counts.  Rejected: constants, and a formula over bytes, bandwidth and the
time of an empty gather, which were wrong by a factor of two (waiting for the slowest member was in neither).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from bgmpi.group import Group
from bgmpi.long_tail import group_sizes
from bgmpi.model import Model
from bgmpi.shard import Shard
from bgmpi.world import World

#: Seconds that the layers of one pass may take, and all passes of one kind together; fewest and most passes.
PASS_SECONDS, KIND_SECONDS, LEAST, MOST = 0.1, 0.1, 3, 10


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was found.  shares: a step over a group of that size / a lone step; shard_seconds: making a shard of all
    layers."""

    shares: dict[int, float]
    shard_seconds: float = 0.0


def rehearse(world: World, groups: Mapping[tuple[int, int], Group], model: Model, page_tokens: int) -> Rehearsal:
    """Collective over the world: try a decode step alone and over groups -> what rank 0 saw, on every rank."""
    counted = model.routed.clone()
    stage = _Stage(world, model, page_tokens)
    stage.play([0], model, 1)  # compiles and warms up
    layers = stage.few_layers()
    begun = time.perf_counter()
    cast: dict[int, Model | None] = {1: model}
    for size in group_sizes(world.size):
        group = groups.get((0, size))
        cast[size] = None if group is None else Shard(model, group, 0, layers)
    made = (time.perf_counter() - begun) / len(cast) * model.layers / len(layers)
    first = [stage.play(layers, runs, size) for size, runs in cast.items()]
    passes = world.broadcast(int(np.clip(KIND_SECONDS / max(first), LEAST, MOST)), int)
    seconds = dict.fromkeys(cast, float("inf"))
    for _ in range(passes):
        for size, runs in cast.items():
            seconds[size] = min(seconds[size], stage.play(layers, runs, size))
    model.routed.copy_(counted)
    told = world.broadcast([seconds[size] for size in cast] + [made], list[float])
    return Rehearsal({size: each / told[0] for size, each in zip(cast, told, strict=False) if size > 1}, told[-1])


class _Stage:
    """One token with a page of its own, and the layers that it passes."""

    def __init__(self, world: World, model: Model, page_tokens: int) -> None:
        self._world, self._model = world, model
        backend = model.backend
        self._hidden = backend.empty((1, model.arch.hidden), model.dtype)
        self._positions = torch.zeros(1, dtype=torch.int64, device=backend.device)
        one, none = np.array([0, 1], np.int32), np.zeros(1, np.int32)
        self._plan = backend.plan_attention(one, none, np.zeros((1, 1), np.int32), page_tokens)
        self._pages = backend.empty((1, *model.page_shape(page_tokens)), model.dtype).zero_()

    def few_layers(self) -> list[int]:
        """Collective over the world: choose layers, evenly spaced, that take a pass not longer than it may."""
        model = self._model
        begun = time.perf_counter()
        for layer in (0, model.layers - 1):
            self._pass([layer], model, 1)
        each = (time.perf_counter() - begun) / 2
        count = self._world.broadcast(int(np.clip(PASS_SECONDS / each, 1, model.layers)), int)
        layers: list[int] = np.linspace(model.layers - 1, 0, count).round().astype(np.int64)[::-1].tolist()
        return layers

    def play(self, layers: list[int], runs: Model | None, size: int) -> float:
        """Collective over the world: let the ranks [0, size) make a step -> its seconds for a model of all layers.

        runs: what this rank runs if it is one of them.
        """
        self._world.barrier()
        begun = time.perf_counter()
        hidden = self._pass(layers, runs, size)
        passed = time.perf_counter()
        if runs is not None and len(hidden):
            runs.logits(hidden)
        return (passed - begun) * self._model.layers / len(layers) + time.perf_counter() - passed

    def _pass(self, layers: list[int], runs: Model | None, size: int) -> torch.Tensor:
        """Collective over the world: -> the token's hidden row, none for a rank that only enters exchanges."""
        plays = runs is not None and self._world.rank < size
        hidden = self._hidden.fill_(1.0) if plays else self._hidden[:0]
        for layer in layers:
            if runs is not None and plays:
                runs.attend(layer, hidden, self._positions, self._plan, self._pages)
                runs.feed_forward(layer, hidden)
            elif self._model.is_collective(layer):
                self._model.feed_forward(layer, hidden)
        return hidden
