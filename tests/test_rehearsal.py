"""Laws of the rehearsal: every rank hears the same shares, and the model has counted nothing."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import launch


@launch.on_ranks(2, 3, 4)
def test_every_rank_hears_the_same_shares_and_nothing_was_counted(tmp_path: Path, ranks: int) -> None:
    def body() -> None:
        import sys

        sys.path.append(sys.argv[1])
        import torch
        from sharded_forward import open_on_rank

        from bgmpi.long_tail import group_sizes
        from bgmpi.rehearsal import rehearse
        from bgmpi.world import open_world

        with open_world() as world:
            groups = world.groups()
            for folder in sys.argv[2:]:
                model = open_on_rank(folder, world, torch.float32)
                model.routed += 3
                found = rehearse(world, groups, model, 64)
                assert list(found.shares) == group_sizes(world.size) and min(found.shares.values()) > 0
                assert (model.routed == 3).all()
                told = world.gather((found.shares[2], found.shard_seconds))
                assert told is None or len(set(told)) == 1
            if world.rank == 0:
                print("through")

    folders = [checkpoints.make(family, tmp_path / family) for family in ("llama", "mixtral", "deepseek_v2")]
    ended = launch.python_on_ranks(ranks, body, Path(__file__).parent, *folders, limit=120)
    assert ended.stdout == "through\n"
