"""Public faults of kind K12 (mapping): rows stay where the input has them, whatever fails and whatever ends first."""

from __future__ import annotations

import json
from pathlib import Path

from results_for_tests import answer, error, publish_answers

from bgmpi.io.openai_lines import export
from bgmpi.io.results import open_results

BAD = (2, 7)


def test_c79_rows_keep_their_order_and_their_id_after_failures(tmp_path: Path) -> None:
    lengths = list(range(10, 0, -1))  # the last row ends first
    finished_first = [error(row) if row in BAD else answer(row, length=lengths[row]) for row in reversed(range(10))]
    publish_answers(tmp_path / "r.h5", finished_first, [1] * 10, ranks=3)
    with open_results(tmp_path / "r.h5") as results:
        assert results.status.tolist() == [int(row in BAD) for row in range(10)]
        assert results.custom_ids == [f"id-{row}" for row in range(10)]
        assert [len(results.tokens(row)) for row in range(10)] == [0 if r in BAD else lengths[r] for r in range(10)]
    written = export(tmp_path / "r.h5", tmp_path / "out.jsonl")
    good = [json.loads(line)["custom_id"] for line in written.output.read_text().splitlines()]
    bad = [json.loads(line)["custom_id"] for line in written.error_file.read_text().splitlines()]
    assert good == [f"id-{row}" for row in range(10) if row not in BAD]
    assert bad == [f"id-{row}" for row in BAD]
