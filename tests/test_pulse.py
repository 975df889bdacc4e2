"""Laws of a rank's trace: it grows with all that the rank does, and says when the rank waits."""

from __future__ import annotations

import pytest

from bgmpi.pulse import Phase, Pulse


def test_all_that_a_rank_does_makes_its_count_grow() -> None:
    pulse = Pulse()
    seen = [pulse.count]
    for deed in (pulse.beat, pulse.stepped, lambda: pulse.enter(Phase.LOADING), lambda: pulse.waiting.__exit__()):
        deed()
        seen.append(pulse.count)
    assert seen == sorted(set(seen)) and pulse.phase is Phase.LOADING and pulse.begun


def test_a_rank_waits_inside_the_block_alone_also_when_it_raises() -> None:
    pulse = Pulse()
    with pytest.raises(KeyError), pulse.waiting:
        assert pulse.waits
        raise KeyError
    assert not pulse.waits
