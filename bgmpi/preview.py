"""`bgmpi plan`: what a job would share and how much it would save, before any weight is read.

It reads the input as `run` does, on one rank, and looks at the same tree and the same plan; then it lets them go.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from bgmpi.config import Config
from bgmpi.errors import UsageError
from bgmpi.prefix_groups import lifted_groups
from bgmpi.prefix_tree import PrefixTree
from bgmpi.prepare import Job, prepare
from bgmpi.primitives import Counts
from bgmpi.share_plan import Mode, SharePlan, one_level_tokens, share_plan, sums_below
from bgmpi.sharing import caps_of
from bgmpi.tokenising import Prompts, tokenise
from bgmpi.world import World

#: Groups to show, and the most shared prefixes for which the greedy collapse is tried as well.
_SHOWN, _CHEAP = 5, 500_000


def preview(config: Config, world: World) -> str:
    """Return what `bgmpi plan` says of a job, as lines of text.

    Raises what `run` raises where model or input are not there or malformed, UsageError on several ranks.
    """
    if world.size > 1:
        raise UsageError(f"bgmpi plan runs alone, and {world.size} ranks were started; start it without a launcher")
    job = prepare(config, world)
    assert job.index is not None
    with ExitStack() as stack:
        ended = np.zeros(int(job.index.samples.sum()), bool)
        gathered = tokenise(job, world, ended, Path(tempfile.gettempdir()), stack)
        assert gathered is not None
        tree = gathered.tree(world.pulse.beat)
        return _table(_facts(job, gathered.prompts, tree))


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that share a prefix of so many tokens, and the pages of KV that all of them take with their answers."""

    members: int
    tokens: int
    pages: int


def _facts(job: Job, prompts: Prompts, tree: PrefixTree) -> list[tuple[str, str]]:
    """Return the table's lines: a name and what is said of it."""
    assert job.index is not None
    config, weight = job.config, prompts.weight
    length = prompts.store.lengths.astype(np.int64)
    wanted = "multi-level" if config.prefix_sharing == "off" else config.prefix_sharing
    plans = {mode: share_plan(tree, weight, length, mode=mode) for mode in get_args(Mode)}
    plan, logical = plans[wanted], plans[wanted].logical
    rows = np.arange(len(job.index))
    refused = int(np.count_nonzero(prompts.store.lengths[prompts.first[:-1]] == 0)) if len(rows) else 0
    sequences = int(weight.sum())
    answers = int((_by_prompt(caps_of(prompts, rows, job.context), prompts) * weight).sum())
    off = " (this job would not: --prefix-sharing off)" if config.prefix_sharing == "off" else ""
    facts = [
        ("rows", f"{len(rows):,}" + (f", of them {refused:,} refused" if refused else "")),
        ("sequences", f"{sequences:,}, of {int(np.count_nonzero(weight)):,} prompts"),
        ("prompt tokens", f"{logical:,}"),
        ("answer tokens", f"{answers:,} at most"),
        (wanted, f"{_saved(plan.computed, logical)}{off}"),
    ]
    facts += [(mode, _saved(other.computed, logical)) for mode, other in plans.items() if mode != wanted]
    if len(tree.depth) <= _CHEAP:
        greedy = one_level_tokens(tree, lifted_groups(tree), weight, length)
        facts.append(("one-level, greedy", _saved(greedy, logical)))
    groups = _groups(job, prompts, plan)
    facts.append(("shared prefixes", f"{len(plan.depth):,}, in {plan.units:,} units"))
    if groups:
        facts.append(("largest groups", ", ".join(f"{one.members:,} x {one.tokens:,} tokens" for one in groups)))
        facts.append(("KV of the largest", f"{groups[0].pages:,} pages of {config.page_tokens} tokens at most"))
    return facts


def _saved(computed: int, logical: int) -> str:
    share = 1 - computed / logical if logical else 0.0
    return f"{computed:,} prompt tokens to compute, {share:.1%} saved"


def _groups(job: Job, prompts: Prompts, plan: SharePlan) -> list[_Group]:
    """Return the groups with the most shared tokens, most first."""
    members = sums_below(plan.parent, plan.node, prompts.weight)
    tokens = members * plan.depth
    largest = np.argsort(-tokens, kind="stable")[:_SHOWN].tolist()
    page = job.config.page_tokens
    found = []
    for node in largest:
        below = _below(plan, node)
        caps = caps_of(prompts, np.searchsorted(prompts.first, below, side="right") - 1, job.context)
        shared = int(plan.depth[node]) // page
        own = -(-(prompts.store.lengths[below] + caps) // page) - shared
        pages = shared + int((prompts.weight[below] * own).sum())
        found.append(_Group(int(members[node]), int(plan.depth[node]), pages))
    return found


def _below(plan: SharePlan, node: int) -> Counts:
    """Return the prompts that begin with a node's prefix, int64 [k]."""
    at = plan.node.copy()
    climbing = np.flatnonzero(at > node)
    while len(climbing):
        at[climbing] = plan.parent[at[climbing]]
        climbing = climbing[at[climbing] > node]
    return np.flatnonzero((at == node) & (plan.unit >= 0))


def _by_prompt(values: Counts, prompts: Prompts) -> Counts:
    """Return for each prompt the value of its row."""
    return np.repeat(values, np.diff(prompts.first))


def _table(facts: list[tuple[str, str]]) -> str:
    widest = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{widest}}  {value}" for name, value in facts)
