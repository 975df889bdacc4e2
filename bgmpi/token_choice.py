"""Choose one token from each row of scores: the largest, or the one at which a given uniform number falls.

Every function works on all its rows at once, and no row's result depends on the others or on how many there are (law
7): reductions run along single rows in a fixed shape, ties go to the lowest id, and every cumulative sum is float64.

The vocabulary is cut into lanes of LANE ids.  One cheap pass gives each lane's maximum or sum, and only the few lanes
that matter are looked at again.  So the largest token, the k largest and the inverse of the cumulative distribution all
cost about one pass; the few candidates of a filter are ranked on the host.  Rejected: sorting the vocabulary (a hundred
times dearer on a CPU), and Gumbel noise per token id (a vocabulary of random numbers per token).

Knows nothing of slots, sequences or requests.  Legend: R rows, V ids, W = V rounded up to whole lanes, L = W / LANE.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

LANE = 64
_NEVER = float("-inf")
_BELOW_ONE = 1.0 - 2.0**-52
# float32 rounding of a threshold must not cost a token its place; a few more candidates cost nothing.
_SLACK = 1e-3


def first_maximum(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest score float32 [R] of each row of scores [R, V] and the lowest id int64 [R] that has it.

    A row with a NaN has the largest score NaN, its id means nothing.
    """
    ids = scores.shape[1]
    whole = ids // LANE * LANE
    tops = _lanes(scores[:, :whole]).amax(2)
    if whole < ids:
        tops = torch.cat((tops, scores[:, whole:].amax(1, keepdim=True)), dim=1)
    first = tops.argmax(1, keepdim=True) * LANE
    # A repeated last id can never be the first of equals, so a short last lane may be clamped.
    candidates = (first + torch.arange(LANE, device=scores.device)).clamp_(max=ids - 1)
    lane = scores.gather(1, candidates)
    offset = lane.argmax(1, keepdim=True)
    return lane.gather(1, offset).squeeze(1), (first + offset).squeeze(1)


def whole_lanes(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy rows int64 [R] of scores [*, V] into [R, W], filled up with minus infinity."""
    ids, chosen = scores.shape[1], scores.index_select(0, rows)
    if ids % LANE == 0:
        return chosen
    copy = scores.new_empty(len(rows), -(-ids // LANE) * LANE)
    copy[:, :ids] = chosen
    copy[:, ids:] = _NEVER
    return copy


def leading(
    scores: torch.Tensor, count: NDArray[np.int64], least: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the largest scores of each row in descending order, equal ones in order of id.

    scores float32 [R, W].  least [R]: only scores from here on are wanted.  count [R]: of these only so many, 0 for
    all; a row may get more than it asked for, never less, and always all of equal scores.  -> scores [R, C], ids
    [R, C], padded with minus infinity and -1; scores of minus infinity are left out.
    """
    lanes = _lanes(scores)
    tops = lanes.amax(2)
    level = torch.maximum(torch.from_numpy(least).to(scores.device), _level_of(tops, count))
    row, lane = (tops >= level[:, None]).nonzero(as_tuple=True)
    found = lanes[row, lane]
    entry, offset = ((found >= level[row, None]) & (found > _NEVER)).nonzero(as_tuple=True)
    ids = lane[entry] * LANE + offset
    return _ranked(row[entry].cpu().numpy(), found[entry, offset].cpu().numpy(), ids.cpu().numpy(), len(scores))


def _ranked(
    rows: NDArray[np.int64], scores: NDArray[np.float32], ids: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Sort entries, rows ascending, into [count, C] by descending score, then id.

    One integer holds both, the bits of the score turned so that integers order as numbers do (adding zero makes one of
    the two zeros), because sorting integers in place is many times faster than sorting scores with their places.
    """
    bits = (scores + np.float32(0.0)).view(np.int32)
    ranks = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    held = np.bincount(rows, minlength=count)
    column = np.arange(len(rows)) - (np.cumsum(held) - held)[rows]
    keys = np.full((count, held.max(initial=0)), np.iinfo(np.int64).max)
    keys[rows, column] = (ranks << 32) | ids
    keys.sort(axis=1)
    beyond = np.arange(keys.shape[1]) >= held[:, None]
    bits = (~(keys >> 32)).astype(np.int32)
    values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(np.float32)
    return np.where(beyond, np.float32(_NEVER), values), np.where(beyond, -1, keys & 0xFFFFFFFF)


def _level_of(tops: torch.Tensor, count: NDArray[np.int64]) -> torch.Tensor:
    """Return a level [R] that at least `count` scores reach: the count-th largest of the lanes' maxima tops [R, L];
    minus infinity where count is 0 or exceeds the lanes."""
    known = (count > 0) & (count <= tops.shape[1])
    width = int(count.max(initial=0, where=known))
    if not width:
        return tops.new_full((len(tops),), _NEVER)
    place = torch.from_numpy(np.where(known, count - 1, 0)).to(tops.device)
    level = tops.topk(width, dim=1).values.gather(1, place[:, None]).squeeze(1)
    return level.masked_fill_(torch.from_numpy(~known).to(tops.device), _NEVER)


def _lanes(scores: torch.Tensor) -> torch.Tensor:
    """View [R, n * LANE] as [R, n, LANE]."""
    return scores.view(len(scores), scores.shape[1] // LANE, LANE)


def draw_from_all(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one id per row with probability proportional to exp(score); overwrites `scores`.

    scores float32 [R, W], largest about 0 in each row; uniform float64 [R] in [0, 1), multiples of 2**-52 -> int64 [R].
    Ids are laid out in ascending order: first the lane is found, then the id within it.
    """
    weights = _lanes(scores.exp_())
    mass = weights.sum(2).double()
    reach = mass.cumsum(1)
    target = uniform * reach[:, -1]
    lane = (reach <= target[:, None]).sum(1, keepdim=True)
    mass = mass.gather(1, lane).squeeze(1)
    before = reach.gather(1, lane).squeeze(1) - mass
    share = ((target - before) / mass).clamp_(0.0, _BELOW_ONE)
    within = weights[torch.arange(len(weights), device=lane.device), lane.squeeze(1)].double().cumsum(1)
    offset = (within <= (share * within[:, -1])[:, None]).sum(1)
    return lane.squeeze(1) * LANE + offset


def mass_of(scores: torch.Tensor) -> torch.Tensor:
    """Return the sum of exp(score) over each row, float64 [R]: scores float32 [R, W], largest about 0."""
    return _lanes(scores.exp()).sum(2).double().sum(1)


def draw_from_leading(
    scores: torch.Tensor,
    uniform: NDArray[np.float64],
    min_p: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Draw one id per row from the scores that pass its filters, as `draw_from_all` does without any.

    scores float32 [R, W], largest 0 in each row; uniform [R].  All three filters hold, in this order: min_p [R], least
    share of the most likely id's probability, 0 is no limit; top_k [R], how many ids, 0 is no limit; top_p [R] in
    (0, 1], the fewest of the remaining whose share reaches it, 1 is no limit -> [R].  Equal scores rank by id, so
    exactly k remain and k = 1 is greedy.  Scores are laid out in descending order.
    """
    limited = (top_k > 0) | (min_p > 0)
    total = np.ones(len(scores))
    if not limited.all():
        total = mass_of(scores).cpu().numpy()
    # Ids below (1 - p) / W of the mass hold less than 1 - p of it together, so the others reach p.
    share = np.where(limited, min_p, (1.0 - top_p) * total / scores.shape[1])
    with np.errstate(divide="ignore"):
        least = (np.log(share) - np.where(limited, 0.0, _SLACK)).astype(np.float32)
    values, ids = leading(scores, top_k, least)
    weights = np.exp(values.astype(np.float64))
    weights[(np.arange(values.shape[1]) >= top_k[:, None]) & (top_k > 0)[:, None]] = 0.0
    reach = weights.cumsum(axis=1)
    total = np.where(limited, reach[:, -1], total)
    last = np.minimum((reach < (top_p * total)[:, None]).sum(axis=1), values.shape[1] - 1)
    rows = np.arange(len(reach))
    place = (reach <= (uniform * reach[rows, last])[:, None]).sum(axis=1)
    chosen: NDArray[np.int64] = ids[rows, place]
    return chosen
