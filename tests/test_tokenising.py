"""All prompts are tokenised ahead, spread over the ranks: the same ids and the same plan on any number of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import checkpoints
import launch
import numpy as np
import pytest
from signal_at import signal_words
from tokenizers_for_tests import make_tokenizer

#: Words: the model's folder, the input, a folder for the ids, a rank that must not find the input (-1: none), and where
#: to write what rank 0 has.
TOKENISE = """
import json, sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
import numpy as np
from bgmpi import log, tokenising
from bgmpi.config import resolve
from bgmpi.prepare import prepare
from bgmpi.stop_request import StopRequest
from bgmpi.world import open_world

model, requests, folder, blind, out = sys.argv[1:]
tokenising._LEAST_BYTES = tokenising._ROUND_BYTES = 300  # many rounds
with ExitStack() as stack:
    world = stack.enter_context(open_world())
    log.configure(world.rank, world.host)
    config = resolve(["--model", model, "-i", requests, "-o", folder + "/o.h5", "--page-tokens", "4"], {})
    job = prepare(config, world)
    if world.rank == int(blind):
        job = replace(job, config=replace(job.config, input_file=requests + ".elsewhere"))
    reads = []
    whole = tokenising.PieceReader.read
    def read(self, piece, beat):
        reads.append(len(piece.offset))
        return whole(self, piece, beat)
    tokenising.PieceReader.read = read
    ended = np.zeros(int(job.index.samples.sum()), bool) if job.index is not None else None
    if ended is not None:
        ended[3:6] = True
    prompts = tokenising.read_prompts(job, world, ended, Path(folder), stack)
    assert (prompts is None) == (world.rank > 0)
    everyone = world.gather(sum(reads))
    if prompts is not None:
        count = int(prompts.first[-1])
        said = {
            "ids": [prompts.store.read(one).tolist() for one in range(count)], "first": prompts.first.tolist(),
            "cap": prompts.cap.tolist(), "weight": prompts.weight.tolist(), "unit": prompts.plan.unit.tolist(),
            "paths": [prompts.plan.path(one) for one in range(count)], "depth": prompts.plan.depth.tolist(),
            "sums": [prompts.plan.logical, prompts.plan.computed, prompts.plan.optimum],
            "reads": [int(one[0]) if one[0] < 128 else -1 for one in everyone],
        }
        Path(out).write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("mixtral", tmp_path_factory.mktemp("tok") / "model"))


def write_input(folder: Path) -> Path:
    """Write 40 rows: two shared beginnings, rows of several prompts and samples, bad ones, one that may not share."""
    random = np.random.default_rng(3)
    heads = [random.integers(3, 400, size=size).tolist() for size in (21, 8)]
    text, rows = "the same text, of which several rows make use", list[object]()
    for number in range(34):
        prompt = heads[number % 2] + random.integers(3, 400, size=1 + number % 7).tolist()
        rows.append({"prompt": prompt, "max_tokens": number})
    rows += [
        {"prompt": [text, f"{text}, and more, until at last the longest of all sentences comes to its end"], "n": 2},
        {"prompt": text, "n": 3},
        {"prompt": text, "max_tokens": 5, "unknown": 1}, {"prompt": []},
        {"prompt": heads[0] + [7], "prompt_logprobs": 1}, {"prompt": "of its own"},
    ]
    lines = [
        json.dumps({"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body})
        for at, body in enumerate(rows)
    ]
    path = folder / "requests.jsonl"
    path.write_text("\n".join(lines))
    return path


def tokenise(ranks: int, model: Path, folder: Path, blind: int = -1) -> tuple[dict[str, list], launch.Ended]:
    out = folder / f"out-{ranks}-{blind}"
    words = [model, write_input(folder), folder, str(blind), out]
    if ranks == 1:
        ended = launch.launch([sys.executable, "-m", "mpi4py", "-c", TOKENISE, *words], expect=0)
    else:
        ended = launch.python_on_ranks(ranks, TOKENISE, *words)
    assert not [name for name in os.listdir(folder) if "bgmpi-prompts" in name]
    return json.loads(out.read_text()), ended


def test_prompts_rows_and_plan_are_those_of_the_input(model: Path, tmp_path: Path) -> None:
    found, ended = tokenise(1, model, tmp_path)
    rows = [json.loads(line)["body"] for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert found["first"] == [*range(35), *range(36, 42)]
    for row in [*range(3), *range(6, 34), 38]:
        assert found["ids"][found["first"][row]] == rows[row]["prompt"]
        assert found["cap"][row] == rows[row].get("max_tokens", -1)
    # Rows 3 to 5 are ended, row 36 and 37 (prompts 37 and 38) are refused.
    assert [at for at, ids in enumerate(found["ids"]) if not ids] == [3, 4, 5, 37, 38]
    assert found["weight"] == [1] * 3 + [0] * 3 + [1] * 28 + [2, 2, 3] + [0] * 2 + [1] * 2
    assert [at for at, unit in enumerate(found["unit"]) if unit < 0] == [3, 4, 5, 37, 38]
    assert found["paths"][39] == found["paths"][40] == [], "one brings log-probabilities of its prompt, one is alone"
    text, more = found["ids"][34], found["ids"][35]
    assert found["ids"][36] == text and more[: len(text) - 1] == text[:-1]
    assert found["depth"][found["paths"][36][-1]] == len(text) - 1, "samples share all but the last token"
    assert found["depth"][found["paths"][35][-1]] == len(more) - 1
    logical, computed, optimum = found["sums"]
    assert optimum <= computed < logical
    assert logical == sum(weight * len(ids) for weight, ids in zip(found["weight"], found["ids"], strict=True))
    assert f"36 prompts of {logical} tokens" in ended.stderr, ended


def assert_same_plan(spread: dict[str, list], alone: dict[str, list]) -> None:
    """Equal but for the units, which are smaller where more ranks must be kept busy."""
    assert len(set(spread.pop("unit"))) > len(set(alone.pop("unit")))
    assert spread == alone


@launch.on_ranks(2, 3)
def test_spread_over_ranks_all_is_as_on_one(ranks: int, model: Path, tmp_path: Path) -> None:
    alone, _ = tokenise(1, model, tmp_path)
    spread, _ = tokenise(ranks, model, tmp_path)
    assert len(spread["reads"]) == ranks and min(spread.pop("reads")) > 0
    assert alone.pop("reads") == [37]
    assert_same_plan(spread, alone)


@launch.on_ranks(3)
def test_a_rank_whose_node_lacks_the_input_takes_no_part(ranks: int, model: Path, tmp_path: Path) -> None:
    alone, _ = tokenise(1, model, tmp_path)
    spread, ended = tokenise(ranks, model, tmp_path, blind=1)
    reads = spread.pop("reads")
    assert reads[1] == 0 < min(reads[0], reads[2]) and sum(reads) == sum(alone.pop("reads"))
    assert_same_plan(spread, alone)
    assert "1 of 3 ranks take no part" in ended.stderr, ended


@launch.on_ranks(2)
def test_a_signal_while_prompts_are_read_stops_all_ranks_and_the_job_can_run_again(
    ranks: int, model: Path, tmp_path: Path
) -> None:
    requests, output = write_input(tmp_path), tmp_path / "out.h5"
    words = ["run", "--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--progress", "off",
             "--max-tokens", "3"]  # fmt: skip
    victim = signal_words(1, "TERM", "bgmpi.tokenising:PieceReader.read", 1)
    ended = launch.mpiexec(ranks, [*victim, *words], expect=75)
    assert "SIGTERM came before the first step" in ended.stderr and "Traceback" not in ended.stderr, ended
    assert not output.exists()
    launch.bgmpi(ranks, *words, expect=3)
    assert output.exists()
