"""Runs one model whole and as a shard of a group, on every rank at once, and holds the two to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from paged_forward import PagedRun, random_ids

from bgmpi.families import read_architecture
from bgmpi.io.model_files import open_model_files
from bgmpi.kernels.backend import Collective, Group
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.model import Model
from bgmpi.shard import Shard

#: Tokens that each step feeds to the two sequences: prefill with few and with many tokens, then decode.
STEPS = ((37, 3), (6, 1), (1, 1))
#: What `PagedRun` fills pages with: a place that no member owns keeps it.
UNTOUCHED = 7.0


def open_on_rank(
    folder: Path | str, collective: Collective, dtype: torch.dtype, tiles: bool | None = None, threads: int = 1
) -> Model:
    """Open a checkpoint as one rank of all."""
    files = open_model_files(Path(folder))
    backend = CpuBackend(collective, threads, tiles)
    return Model(read_architecture(files.config), files, backend, dtype, collective.rank, collective.size)


def run_steps(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed the two sequences -> logits [T, vocab] of all steps, KV [layers, pages, *page]."""
    ids = random_ids(sum(map(sum, STEPS)), model.arch.vocab).split([count for step in STEPS for count in step])
    run = PagedRun(model, 2, 50)
    parts = [run.step(ids[2 * number : 2 * number + 2]) for number in range(len(STEPS))]
    return torch.cat([logits for step in parts for logits in step]), torch.stack(run.pools)


def attend_along(model: Model) -> None:
    """Enter every exchange of `run_steps` without tokens."""
    nothing = torch.empty(0, model.arch.hidden, dtype=model.dtype)
    for _ in STEPS:
        for layer in filter(model.is_collective, range(model.layers)):
            model.feed_forward(layer, nothing)


def compare(model: Model, group: Group | None, leader: int) -> None:
    """Collective over the world, whose ranks are in groups or (None) in none: raise AssertionError unless the shards
    answer and keep what the whole model does."""
    if group is None:
        attend_along(model), attend_along(model)
        return
    shard = Shard(model, group, leader)
    if group.rank == leader:
        logits, kv = run_steps(model)
    else:
        attend_along(model)
        logits = torch.empty(sum(map(sum, STEPS)), model.arch.vocab)
        kv = torch.stack(PagedRun(model, 2, 50).pools)
    model.backend.spread(logits, group, leader)
    model.backend.spread(kv, group, leader)
    got, kept = run_steps(shard)
    assert torch.equal(got, logits), f"logits differ by up to {(got - logits).abs().max()}"
    own = shard.own_heads(group.rank)
    if own is not None:
        alone = kv
        kv = torch.full_like(kv, UNTOUCHED)
        kv[:, :, :, own] = alone[:, :, :, own]
    assert torch.equal(kept, kv), "a member keeps other KV than its heads of the whole"


class Board:
    """Where the threads of one process leave what they tell one another."""

    def __init__(self, size: int) -> None:
        self.meet = threading.Barrier(size, timeout=60)
        self.left: list[np.ndarray] = [np.zeros(0, np.uint8)] * size


class ThreadGroup:
    """All ranks of a world of threads: a `Group` and a `Collective`."""

    first = 0

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size = board, rank, len(board.left)

    def _everything(self, mine: np.ndarray) -> list[np.ndarray]:
        self.board.left[self.rank] = mine.copy()
        self.board.meet.wait()
        found = list(self.board.left)
        self.board.meet.wait()
        return found

    def all_gather_bytes(self, send: np.ndarray, counts: np.ndarray, receive: np.ndarray) -> None:
        pieces = self._everything(send)
        assert [len(piece) for piece in pieces] == counts.tolist()
        receive[:] = np.concatenate(pieces)

    def broadcast_bytes(self, buffer: np.ndarray, root: int) -> None:
        buffer[:] = self._everything(buffer)[root]

    def all_to_all_counts(self, counts: np.ndarray) -> np.ndarray:
        return np.array([theirs[self.rank] for theirs in self._everything(counts)])

    def all_to_all_bytes(
        self, send: np.ndarray, send_counts: np.ndarray, receive: np.ndarray, receive_counts: np.ndarray
    ) -> None:
        pieces, counts = self._everything(send), self._everything(send_counts)
        ends = [np.cumsum(theirs) for theirs in counts]
        mine = [
            piece[end[self.rank] - theirs[self.rank] : end[self.rank]]
            for piece, end, theirs in zip(pieces, ends, counts, strict=True)
        ]
        receive[:] = np.concatenate(mine)


def on_threads(size: int, body: Callable[[ThreadGroup], object]) -> list[object]:
    """Run `body` once for each rank of a world of threads, and answer with what they returned."""
    board = Board(size)

    def one(rank: int) -> object:
        try:
            return body(ThreadGroup(board, rank))
        except BaseException:
            board.meet.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in running) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in running]
