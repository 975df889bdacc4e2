"""bfloat16 linear layers and experts on a machine with matrix tiles: plain rows, one kernel call a layer.

Weights stay as they are, plain rows, also when they are mapped from a file; only a weight whose width is not a multiple
of 32, or with fewer than 16 rows, is copied once with zeros around it.  What a call needs beside its result (tokens in
panels, the middle of the experts) lies in one buffer that all layers of the rank share.  The tokens of a call never
change what a row of weights gives (`tile_code`), so a sequence's numbers do not depend on its company.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_tile_kernels as kernels
from bgmpi.kernels.cpu_layers import check_rows
from bgmpi.kernels.team import Team
from bgmpi.kernels.tile_code import DEEP, TILE, compiled_for_tiles, shapes

#: Bytes of weight that one task reads.  With few tokens they pass once, so long is good; else they pass again and again
#: and must stay in a core's second cache.
STREAMED_BYTES, REUSED_BYTES = 1 << 20, 1 << 18
#: Tasks that each thread should find in one layer, where its weight is large enough.
TASKS_A_THREAD = 4
#: The buffer that calls share does not grow beyond so many bytes; a call that needs more has its own.
KEPT_BYTES = 64 << 20
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18


def ask_for_tiles() -> bool:
    """Say whether this process may use bfloat16 tiles: the machine has them and the kernel of the system agrees."""
    if not sys.platform.startswith("linux") or not compiled_for_tiles():
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)) == 0


def up_to(number: int, multiple: int) -> int:
    """Round up."""
    return -(-number // multiple) * multiple


def padded(weight: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return weight as plain rows, with zeros up to [rows, width] where it is smaller."""
    if weight.shape == (rows, width):
        return weight.contiguous()
    result = weight.new_zeros(rows, width)
    result[: weight.shape[0], : weight.shape[1]] = weight
    return result


class Tiles:
    """What all layers of the rank share: its threads, the shapes of tiles, and room for one call."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._constant = np.frombuffer(shapes() + bytes(4 * TILE), np.uint8)
        self.shapes = self._constant.ctypes.data
        self.zeros = self.shapes + len(shapes())
        self._kept = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes, to be used until the next call."""
        if size > KEPT_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        if size > len(self._kept):
            self._kept = torch.empty(size, dtype=torch.uint8)
        return self._kept

    def rows_of_task(self, rows: int, row_bytes: int) -> tuple[int, int]:
        """Return how many weight rows a task takes, a multiple of 32: with few tokens, and with many."""
        fair = rows // (TASKS_A_THREAD * self.team.threads)
        few, many = (
            max(2 * TILE, min(fair, size // row_bytes) // (2 * TILE) * (2 * TILE))
            for size in (STREAMED_BYTES, REUSED_BYTES)
        )
        return few, many


class TileLinear:
    """A bfloat16 weight."""

    def __init__(self, tiles: Tiles, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._tiles = tiles
        self._rows, self._width = weight.shape
        self._weight = padded(weight, max(self._rows, TILE), up_to(self._width, DEEP))
        rows, deep = self._weight.shape
        self._bias = torch.zeros(rows)
        if bias is not None:
            self._bias[: self._rows] = bias
        self._panel_bytes = 2 * TILE * deep
        self._front = self._width, self._weight.data_ptr(), deep, rows, self._bias.data_ptr()
        self._rows_of_task = tiles.rows_of_task(rows, 2 * deep)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""
        tokens, width = x.shape
        if x.dtype != torch.bfloat16 or width != self._width:
            raise InternalError(
                f"linear: x is {x.dtype} [{tokens}, {width}], the weight is torch.bfloat16 [{self._rows}, "
                f"{self._width}]; dtype and width must be equal"
            )
        result = torch.empty(tokens, self._rows, dtype=torch.bfloat16)
        if tokens and self._rows:
            if x.stride(1) != 1:
                x = x.contiguous()
            tiles = self._tiles
            room = tiles.room(-(-tokens // TILE) * self._panel_bytes)
            tiles.team.run(kernels.linear, 0, x.data_ptr(), 2 * x.stride(0), *self._front, result.data_ptr(), tokens,
                           self._rows, self._rows_of_task[tokens > 2 * TILE], room.data_ptr(), tiles.shapes)
        return result

    def rows(self, start: int, stop: int) -> TileLinear:
        """Return the weight's output rows [start, stop): a view, but for fewer than 16 rows or an odd width.

        Each number is one row's sum along the width, so it does not depend on the rows beside it.
        """
        check_rows(start, stop, self._rows)
        return TileLinear(self._tiles, self._weight[start:stop, : self._width], self._bias[start:stop])


class TileExperts:
    """The bfloat16 gated experts of this rank."""

    def __init__(self, tiles: Tiles, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> None:
        self._tiles = tiles
        self._count = len(gate_up)
        self._width, inner = down[0].shape
        self._deep, self._inner, rows = up_to(self._width, DEEP), up_to(inner, DEEP), max(self._width, TILE)
        self._gate_up = [
            padded(weight, 2 * inner, self._deep)
            if inner == self._inner
            else torch.cat([padded(half, self._inner, self._deep) for half in weight.split(inner)])
            for weight in gate_up
        ]
        self._down = [padded(weight, rows, self._inner) for weight in down]
        self._addresses = np.array([[weight.data_ptr() for weight in some] for some in (self._gate_up, self._down)])
        self._words = (
            self._count, self._width, self._deep, self._inner, rows, self._addresses[0].ctypes.data,
            self._addresses[1].ctypes.data,
        )
        spans = tiles.rows_of_task(self._inner, 4 * self._deep), tiles.rows_of_task(rows, 2 * self._inner)
        self._rows_of_task = tuple(zip(*spans, strict=True))  # (up, down) with few tokens, then with many

    def __call__(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run each token through its local experts and sum in float32, ascending expert order.

        x [T, D], expert int32 [T, A] (local number, -1 = not here), weight float32 [T, A] -> [T, D] in x's dtype.
        """
        fits = x.dtype == torch.bfloat16 and expert.dtype == torch.int32 and weight.dtype == torch.float32
        if not fits or x.shape[1] != self._width:
            raise InternalError(
                f"experts: x is {x.dtype} {tuple(x.shape)}, expert {expert.dtype}, weight {weight.dtype}; expected "
                f"torch.bfloat16 [T, {self._width}], torch.int32, torch.float32"
            )
        tokens, active = expert.shape
        result = torch.empty(tokens, self._width, dtype=torch.bfloat16)
        if tokens == 0:
            return result
        expert, weight = expert.contiguous(), weight.contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        pairs = tokens * active
        panels = pairs // TILE + min(pairs, self._count)
        sizes = (
            panels * 2 * TILE * self._deep, panels * 2 * TILE * self._inner, up_to(2 * pairs * self._width, 64),
            8 * (6 * (self._count + 1) + 3 * pairs),
        )
        room = self._tiles.room(sum(sizes))
        laid = room.data_ptr()
        middle = laid + sizes[0]
        y = middle + sizes[1]
        book = y + sizes[2]
        tiles = self._tiles
        many = pairs > 2 * TILE * self._count
        tiles.team.run(
            kernels.experts, 0, 0, x.data_ptr(), 2 * x.stride(0), expert.data_ptr(), weight.data_ptr(), tokens, active,
            *self._words, *self._rows_of_task[many], laid, middle, y, result.data_ptr(), tiles.shapes, tiles.zeros,
            book,
        )
        if ctypes.c_int64.from_address(book + 8 * (self._count + 1)).value < 0:
            raise InternalError(
                f"experts: an expert number is {int(expert.max())}, this rank owns {self._count}; numbers must be local"
            )
        return result
