"""Laws of the published file: rows in input order, each exactly once, everything as it was answered."""

from __future__ import annotations

import json
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from results_for_tests import (
    COMPLETIONS,
    PROVENANCE,
    answer,
    assert_same,
    error,
    logprobs,
    publish_answers,
    write_segments,
)

from bgmpi.errors import InputError, InternalError, MissingError, RowError
from bgmpi.io.publish import Provenance, publish, remove_parts
from bgmpi.io.results import inspect, open_results
from bgmpi.io.segments import parts_folder
from bgmpi.request import Answer, Finish, Logprobs

# --- roundtrip ----------------------------------------------------------------------------------------------------


@st.composite
def _answers(draw: st.DrawFn, row: int, sample: int) -> Answer:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    ids = st.integers(0, 2**31 - 1)
    tokens = np.array(draw(st.lists(ids, max_size=6)), np.int32)
    prompt = np.array(draw(st.lists(ids, max_size=4)), np.int32)
    failed = draw(st.booleans())
    time = st.one_of(st.just(math.nan), st.floats(0, 1e6))
    asked = [draw(st.one_of(st.none(), st.integers(0, 3))) for _ in range(2)]
    return Answer(
        row=row,
        sample=sample,
        custom_id=f"row {row} é",
        finish=Finish.ERROR if failed else draw(st.sampled_from([Finish.STOP, Finish.LENGTH])),
        prompt_tokens=draw(st.integers(0, 10**6)),
        tokens=tokens,
        text=draw(text),
        stop_reason=draw(st.one_of(st.none(), ids, text.filter(bool))),
        error=RowError(draw(text), draw(text), draw(st.one_of(st.none(), text.filter(bool))), 3) if failed else None,
        logprobs=None if asked[0] is None else logprobs(len(tokens), asked[0]),
        prompt_logprobs=None if asked[1] is None else logprobs(len(prompt), asked[1], 1),
        prompt=prompt,
        url=f"/v1/{row}",
        default_cap=draw(st.booleans()),
        queued_s=draw(time),
        first_token_s=draw(time),
        done_s=draw(time),
    )


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[list[int], list[Answer]]:
    samples = draw(st.lists(st.integers(1, 3), max_size=5))
    answers = [draw(_answers(row, sample)) for row, count in enumerate(samples) for sample in range(count)]
    return samples, draw(st.permutations(answers))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(job=_jobs(), ranks=st.integers(1, 4), block_bytes=st.sampled_from([1, 500, 1 << 20]))
def test_every_answer_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, job: tuple[list[int], list[Answer]], ranks: int, block_bytes: int
) -> None:
    samples, answers = job
    output = tmp_path_factory.mktemp("job") / "results.h5"
    published = publish_answers(output, answers, samples, ranks=ranks, block_bytes=block_bytes)
    expected = {(one.row, one.sample): one for one in answers}
    with open_results(output) as results:
        assert len(results) == len(samples) == published.rows
        for number, row in enumerate(results.rows(block_bytes=block_bytes)):
            assert row.row == number and len(row.samples) == samples[number]
            for sample, got in enumerate(row.samples):
                assert_same(got, expected[number, sample])
                assert results.text(number, sample) == got.text
                assert results.tokens(number, sample).tolist() == got.tokens.tolist()
            assert (row.error is not None) == bool(results.status[number])
            assert results.row(number).custom_id == row.custom_id


def test_rows_are_in_input_order_whatever_order_they_finished_in(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).permutation(300)
    publish_answers(tmp_path / "r.h5", [answer(int(row), length=int(row) % 7) for row in rows], [1] * 300, ranks=3)
    with open_results(tmp_path / "r.h5") as results:
        assert results.custom_ids == [f"id-{row}" for row in range(300)]
        assert [row.samples[0].text for row in results.rows()] == [f"text of row {row} sample 0" for row in range(300)]
        assert [row.row for row in results.rows(10, 20)] == list(range(10, 20))


def test_samples_of_one_row_may_come_from_many_ranks(tmp_path: Path) -> None:
    answers = [answer(row, sample) for sample in (2, 0, 1) for row in (1, 0)]
    publish_answers(tmp_path / "r.h5", answers, [3, 3], ranks=4)
    with open_results(tmp_path / "r.h5") as results:
        assert results.first_sample.tolist() == [0, 3, 6]
        assert [one.sample for one in results.row(1).samples] == [0, 1, 2]
        assert results.text(1, 2) == "text of row 1 sample 2"
        with pytest.raises(IndexError, match="row 1 has samples 0 to 2, not 3"):
            results.text(1, 3)


def test_small_and_large_blocks_make_the_same_file(tmp_path: Path) -> None:
    answers = [answer(row, length=row % 11, logprobs=logprobs(row % 11, 2, row)) for row in range(60)]
    answers[7] = error(7)
    columns = []
    for name, block in (("a.h5", 1), ("b.h5", 1 << 30)):
        publish_answers(tmp_path / name, answers, [1] * 60, block_bytes=block)
        found = {}
        with h5py.File(tmp_path / name, "r") as file:
            file.visititems(
                lambda path, item, found=found: (
                    found.update({path: item[:].tobytes()}) if isinstance(item, h5py.Dataset) else None
                )
            )
        columns.append(found)
    assert columns[0] == columns[1]


# --- law 5: every row exactly once --------------------------------------------------------------------------------


def test_a_missing_row_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    output = tmp_path / "r.h5"
    output.write_bytes(b"what was there before")
    with pytest.raises(InternalError, match="2 rows without all their answers: 1, 4"):
        publish_answers(output, [answer(0), answer(2), answer(3), answer(4, 0)], [1, 1, 1, 1, 2])
    assert output.read_bytes() == b"what was there before"
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("r.h5", "r.h5.parts")] == []


@pytest.mark.parametrize(
    ("answers", "samples", "message"),
    [
        ([answer(0), answer(0), answer(1)], [1, 1], "1 rows answered twice: 0"),
        ([answer(0), answer(0), answer(1)], [2, 1], "1 rows answered twice: 0"),
        ([answer(0), error(0)], [1], "1 rows answered twice: 0"),
        ([error(0, -1), answer(0, 0)], [2], "1 rows answered twice: 0"),
        ([answer(0), answer(5)], [1], "rows that the input does not have: 5"),
        ([answer(0, 1), answer(0, 2)], [2], "1 rows with wrong samples: 0"),
        ([], [1] * 20, r"20 rows without all their answers: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\."),
    ],
)
def test_rows_twice_and_strangers_are_named(
    tmp_path: Path, answers: list[Answer], samples: list[int], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        publish_answers(tmp_path / "r.h5", answers, samples)


def test_a_row_whose_segment_is_damaged_is_missing_and_the_segment_named(tmp_path: Path) -> None:
    folder = write_segments(tmp_path / "r.h5", [answer(0), answer(1)], ranks=2)
    segment = sorted(folder.glob("segment-*.h5"))[0]
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    with pytest.raises(InternalError, match=rf"1 rows without all.*Damaged segments: {segment.name}"):
        publish(folder, tmp_path / "r.h5", PROVENANCE, 2, np.ones(2, np.int32))


def test_one_error_may_refuse_a_row_of_many_samples(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0), error(1, -1), error(2), answer(3)], [1, 4, 0, 1])
    with open_results(tmp_path / "r.h5") as results:
        assert results.status.tolist() == [0, 1, 1, 0]
        assert results.first_sample.tolist() == [0, 1, 2, 3, 4]
        refused = results.row(1)
        assert refused.error == RowError("context_length_exceeded", "row 1 is bad", "messages", 2)
        assert [(one.sample, one.finish) for one in refused.samples] == [(0, Finish.ERROR)]


def test_a_row_with_one_failed_sample_is_an_error_row_that_keeps_the_others(tmp_path: Path) -> None:
    partial = answer(0, 1, 2, finish=Finish.ERROR, error=RowError("numeric_fault", "NaN at step 2"))
    publish_answers(tmp_path / "r.h5", [answer(0, 0), partial], [2])
    with open_results(tmp_path / "r.h5") as results:
        row = results.row(0)
        assert row.error == partial.error
        assert_same(row.samples[0], answer(0, 0))
        assert row.samples[1].tokens.tolist() == partial.tokens.tolist()


def test_a_job_without_rows_is_a_valid_file(tmp_path: Path) -> None:
    published = publish(tmp_path / "none", tmp_path / "r.h5", PROVENANCE, 0, np.empty(0, np.int32))
    assert (published.rows, published.samples, published.tokens) == (0, 0, 0)
    with open_results(tmp_path / "r.h5") as results:
        assert len(results) == 0 and list(results.rows()) == [] and results.custom_ids == []
        assert results.status.shape == (0,)
    assert "0 rows" in inspect(tmp_path / "r.h5")


# --- the file itself ----------------------------------------------------------------------------------------------


def test_plain_h5py_reads_texts_enums_and_provenance(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(1), error(0)], [1, 1])
    with h5py.File(tmp_path / "r.h5", "r") as file:
        assert (file.attrs["format"], file.attrs["complete"], file.attrs["n_rows"]) == ("bgmpi-results", 1, 2)
        assert file.attrs["job_seed"] == 7 and json.loads(file.attrs["layout"])["ranks"] == 2
        assert json.loads(file["provenance/config"][:].tobytes()) == {"max_tokens": 4}
        assert h5py.check_enum_dtype(file["rows/status"].dtype) == {"done": 0, "error": 1}
        assert h5py.check_enum_dtype(file["samples/finish_reason"].dtype) == {"stop": 0, "length": 1, "error": 2}
        assert file["samples/done"].attrs["units"] == "s"
        cuts, values = file["text/offsets"][:], file["text/values"][:]
        assert values[cuts[1] : cuts[2]].tobytes().decode() == "text of row 1 sample 0"
        assert file["text/values"].attrs["offsets"] == "/text/offsets"


def test_storage_is_portable_chunked_and_growable(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(row, length=3000) for row in range(100)], [1] * 100)
    with h5py.File(tmp_path / "r.h5", "r") as file:
        tokens = file["tokens/values"]
        assert tokens.shape == (300_000,) and tokens.maxshape == (None,)
        assert 64 << 10 <= tokens.chunks[0] * 4 <= 1 << 20
        assert tokens.shuffle and tokens.fletcher32
        assert (tokens.compression, tokens.compression_opts) == ("gzip", 4)
        offsets = file["tokens/offsets"]
        assert (offsets.dtype, offsets.shape) == (np.int64, (101,))


def test_minus_infinity_and_unasked_log_probabilities_are_kept_apart(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0, logprobs=logprobs(3, 2)), answer(1)], [1, 1])
    with h5py.File(tmp_path / "r.h5", "r") as file:
        assert file["samples/top_logprobs"][:].tolist() == [2, -1]
        assert np.isneginf(file["logprobs/top_values"][:]).sum() == 1
        assert np.isnan(file["logprobs/chosen"][:]).tolist() == [False] * 3 + [True] * 3
        assert len(file["logprobs/chosen"]) == len(file["tokens/values"])


def test_log_probabilities_without_top_ones_are_told_from_none(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0, logprobs=logprobs(3, 0)), answer(1)], [1, 1])
    with open_results(tmp_path / "r.h5") as results:
        asked, unasked = results.row(0).samples[0].logprobs, results.row(1).samples[0].logprobs
    assert isinstance(asked, Logprobs) and asked.top_ids.shape == (3, 0)
    assert unasked is None


def test_a_long_attribute_is_refused_with_advice(tmp_path: Path) -> None:
    long = Provenance("m", "0", attributes={"config": "x" * 70_000})
    with pytest.raises(InternalError, match="'config' has 70000 characters; pass it among the documents"):
        publish(tmp_path, tmp_path / "r.h5", long, 0, np.empty(0, np.int32))
    assert not list(tmp_path.iterdir())
    publish(
        tmp_path, tmp_path / "r.h5", Provenance("m", "0", documents={"config": "x" * 70_000}), 0, np.empty(0, np.int32)
    )
    with open_results(tmp_path / "r.h5") as results:
        assert len(results.document("config")) == 70_000


def test_a_broken_surrogate_in_a_text_does_not_stop_the_job(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0, text="a\ud835b")], [1])
    with open_results(tmp_path / "r.h5") as results:
        assert results.text(0) == "a�b"


def test_publishing_replaces_what_an_interrupted_publisher_left(tmp_path: Path) -> None:
    stale = tmp_path / ".r.h5.0011.publishing"
    stale.write_bytes(b"half")
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    assert not stale.exists()


def test_an_output_that_is_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "r.h5").symlink_to(tmp_path / "scratch" / "real.h5")
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    assert (tmp_path / "r.h5").is_symlink()
    assert len(open_results(tmp_path / "scratch" / "real.h5")) == 1


def test_parts_are_removed_but_nothing_else(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    folder = parts_folder(tmp_path / "r.h5")
    (folder / "notes.txt").write_text("mine")
    remove_parts(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    remove_parts(folder)
    assert not folder.exists()


# --- opening ------------------------------------------------------------------------------------------------------


def test_files_that_are_no_results_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="is not there"):
        open_results(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(InputError, match="not a whole HDF5 file"):
        open_results(tmp_path / "text.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs["format"] = "other"
    with pytest.raises(InputError, match="no results of bgmpi: format is 'other'"):
        open_results(tmp_path / "other.h5")


def test_an_unfinished_job_is_told_from_a_missing_file(tmp_path: Path) -> None:
    write_segments(tmp_path / "r.h5", [answer(0)])
    with pytest.raises(MissingError, match="its job has not ended yet"):
        open_results(tmp_path / "r.h5")


def test_incomplete_newer_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    publish_answers(path, [answer(0)], [1])
    whole = path.read_bytes()
    with h5py.File(path, "r+") as file:
        file.attrs["complete"] = 0
    with pytest.raises(InputError, match="is not complete"):
        open_results(path)
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 99
    with pytest.raises(InputError, match="format version 99"):
        open_results(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut short"):
        open_results(path)


def test_a_damaged_chunk_is_an_error_that_names_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    publish_answers(path, [answer(0, text="some text to be damaged")], [1])
    with h5py.File(path, "r") as file:
        place = file["text/values"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[place + 2] ^= 0xFF
    path.write_bytes(data)
    with open_results(path) as results, pytest.raises(InputError, match="'text/values' is damaged"):
        results.text(0)


def test_a_wrong_row_or_dataset_is_told(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    with open_results(tmp_path / "r.h5") as results:
        with pytest.raises(IndexError, match="rows 0 to 0, not 1"):
            results.row(1)
        with pytest.raises(InputError, match="no dataset 'nonsense'"):
            results.column("nonsense")
        assert results.row(-1).row == 0


def test_inspect_counts_what_the_file_holds(tmp_path: Path) -> None:
    answers = [
        answer(0, 0, url=COMPLETIONS, prompt_tokens=5),
        answer(0, 1, url=COMPLETIONS, prompt_tokens=5),
        answer(1, finish=Finish.LENGTH, default_cap=True, prompt_tokens=7),
        error(2, prompt_tokens=0),
    ]
    publish_answers(tmp_path / "r.h5", answers, [2, 1, 1])
    text = inspect(tmp_path / "r.h5", rows=3)
    assert "3 rows, 4 samples, complete" in text
    assert "done 2, error 1" in text
    assert "stop 2, length 1, error 1" in text
    assert "12 prompt, 9 generated" in text  # the two samples of row 0 share one prompt
    assert "context_length_exceeded 1" in text
    assert "1 samples ended by the context's length" in text
    assert "p50" in text and "p95" in text and "p99" in text
    assert "[length, 3 tokens] text of row 1 sample 0" in text
    assert "error context_length_exceeded: row 2 is bad (line 3)" in text
