"""Choose one token from each row of scores: the largest, or the one at which a given uniform number falls.

Every function works on all its rows at once, and no row's result depends on the others or on how many there are (law
7): reductions run along single rows in a fixed shape, ties go to the lowest id, and every cumulative sum is float64.

The vocabulary is cut into lanes of LANE ids.  One cheap pass gives each lane's maximum or sum, and only the few lanes
that matter are looked at again.  So the largest token, the k largest and the inverse of the cumulative distribution all
cost about one pass.  Rejected: sorting the vocabulary (a hundred times dearer on a CPU), and Gumbel noise per token id
(a vocabulary of random numbers per token).

Knows nothing of slots, sequences or requests.  Legend: R rows, V ids, W = V rounded up to whole lanes, L = W / LANE.
"""

from __future__ import annotations

import torch

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
    ids = scores.shape[1]
    copy = scores.new_empty(len(rows), -(-ids // LANE) * LANE)
    copy[:, :ids] = scores.index_select(0, rows)
    copy[:, ids:] = _NEVER
    return copy


def leading(scores: torch.Tensor, count: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores of each row in descending order, equal ones in order of id.

    scores [R, W].  least float32 [R]: only scores from here on are wanted.  count int64 [R]: of these only so many, 0
    for all; a row may get more than it asked for, never less, and always all of equal scores.  -> scores [R, C], ids
    int64 [R, C], padded with minus infinity and -1; scores of minus infinity are left out.
    """
    lanes = _lanes(scores)
    tops = lanes.amax(2)
    least = torch.maximum(least, _level_of(tops, count))
    row, lane = (tops >= least[:, None]).nonzero(as_tuple=True)
    found = lanes[row, lane]
    entry, offset = ((found >= least[row, None]) & (found > _NEVER)).nonzero(as_tuple=True)
    row = row[entry]
    held = torch.bincount(row, minlength=len(scores))
    column = torch.arange(len(row), device=row.device) - (held.cumsum(0) - held)[row]
    shape = (len(scores), int(held.max()) if len(scores) else 0)
    values = scores.new_full(shape, _NEVER)
    values[row, column] = found[entry, offset]
    ids = row.new_full(shape, -1)
    ids[row, column] = lane[entry] * LANE + offset
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _level_of(tops: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return a level [R] that at least `count` scores reach: the count-th largest of the lanes' maxima tops [R, L];
    minus infinity where count is 0 or exceeds the lanes."""
    lanes = tops.shape[1]
    known = (count > 0) & (count <= lanes)
    width = int(torch.where(known, count, 0).max()) if len(count) else 0
    if not width:
        return torch.full_like(tops[:, 0], _NEVER)
    level = tops.topk(width, dim=1).values.gather(1, (count - 1).clamp(0, width - 1)[:, None]).squeeze(1)
    return torch.where(known, level, torch.full_like(level, _NEVER))


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


def log_mass(scores: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(score))) of each row, float64 [R]: scores float32 [R, W], largest about 0."""
    return _lanes(scores.exp()).sum(2).double().sum(1).log()


def draw_from_leading(
    scores: torch.Tensor, uniform: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Draw one id per row from the scores that pass its filters, as `draw_from_all` does without any.

    scores float32 [R, W], largest 0 in each row; uniform float64 [R].  All three filters hold, in this order: min_p
    float64 [R], least share of the most likely id's probability, 0 is no limit; top_k int64 [R], how many ids, 0 is no
    limit; top_p float64 [R] in (0, 1], the fewest of the remaining whose share reaches it, 1 is no limit -> int64 [R].
    Equal scores rank by id, so exactly k remain and k = 1 is greedy.  Scores are laid out in descending order.
    """
    limited = (top_k > 0) | (min_p > 0)
    least = min_p.log()
    log_total = torch.zeros_like(top_p)
    if not bool(limited.all()):
        log_total = log_mass(scores)
        # Ids below (1 - p) / W of the mass hold less than 1 - p of it together, so the others reach p.
        tail = ((1.0 - top_p) / scores.shape[1]).log() + log_total - _SLACK
        least = torch.where(limited, least, tail)
    values, ids = leading(scores, top_k, least.float())
    weights = values.double().exp_()
    beyond = (torch.arange(values.shape[1], device=top_k.device) >= top_k[:, None]) & (top_k > 0)[:, None]
    reach = weights.masked_fill_(beyond, 0.0).cumsum(1)
    total = torch.where(limited, reach[:, -1], log_total.exp())
    last = (reach < (top_p * total)[:, None]).sum(1, keepdim=True).clamp_(max=values.shape[1] - 1)
    target = uniform[:, None] * reach.gather(1, last)
    return ids.gather(1, (reach <= target).sum(1, keepdim=True)).squeeze(1)
