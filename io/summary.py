"""Say in a screenful what a results file holds: how rows ended, how long it took, where it came from.

Whole columns are read, so a million rows cost a second; only the rows that are to be shown are read as rows.
Times are seconds since the job began; the completion time of a sequence (SCT, the paper's measure) counts from when it
was queued.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from bgmpi.io.columns import FINISH, STATUS
from bgmpi.io.outcome import error_codes
from bgmpi.io.results_file import Results, RowResult, open_results

_SHOWN = 300


def inspect(path: str | os.PathLike[str], rows: int = 0) -> str:
    """Return a readable summary of the results file `path`, with its first `rows` rows."""
    with open_results(path) as results:
        lines = _head(results) + _counts(results) + _times(results)
        shown = [line for row in results.rows(0, rows) for line in _show(row)]
    return "\n".join(lines + shown)


def _head(results: Results) -> list[str]:
    about = results.attributes
    shard = f"{about['shard']} of {about['shards']}, of {about['input_rows']} rows" if "shard" in about else ""
    lines = [
        f"{results.path}: {len(results)} rows, {int(results.first_sample[-1])} samples, complete",
        f"  written   {about['created_utc']} by {about['creator']}",
        f"  model     {about['model']}",
        f"  input     {about['input_path']} ({about['input_bytes']} bytes)",
        f"  layout    {about['layout']}",
    ]
    return [*lines, f"  shard     {shard}"] if shard else lines


def _counts(results: Results) -> list[str]:
    generated = results.column("samples/completion_tokens")
    prompts = _prompt_tokens(results)
    capped = int(results.column("samples/default_cap").sum())
    codes = error_codes(results)
    lines = [
        f"  rows      {_named(results.status, STATUS)}",
        f"  finish    {_named(results.finish_reason, FINISH)}",
        f"  tokens    {prompts} prompt, {int(generated.sum())} generated",
    ]
    if codes:
        lines.append("  errors    " + ", ".join(f"{code} {count}" for code, count in codes.items()))
    if capped:
        lines.append(f"  caps      {capped} samples ended by the context's length, because max_tokens was not set")
    return lines


def _prompt_tokens(results: Results) -> int:
    """Return the prompt tokens of the job, each prompt counted once."""
    first, prompts = results.first_sample, results.column("rows/prompts")
    tokens = results.column("samples/prompt_tokens").astype(np.int64)
    each = np.diff(first) // prompts  # samples of one prompt
    sample = np.arange(len(tokens)) - np.repeat(first[:-1], np.diff(first))
    return int(tokens[sample % np.repeat(each, np.diff(first)) == 0].sum())


def _named(codes: NDArray[np.int8], names: dict[str, int]) -> str:
    counts = np.bincount(codes, minlength=len(names)).tolist()
    return ", ".join(f"{name} {counts[code]}" for name, code in names.items())


def _times(results: Results) -> list[str]:
    queued = results.column("samples/queued")
    done = results.column("samples/done")
    spans = {"SCT": done - queued, "first": results.column("samples/first_token") - queued}
    lines = []
    for name, span in spans.items():
        known = span[np.isfinite(span)]
        if len(known):
            p50, p95, p99 = np.percentile(known, [50, 95, 99]).tolist()
            lines.append(f"  {name:<9} p50 {p50:.3f} s, p95 {p95:.3f} s, p99 {p99:.3f} s, max {known.max():.3f} s")
    last = done[np.isfinite(done)]
    if len(last):
        lines.append(f"  last done {last.max():.3f} s after the job began")
    return lines


def _show(row: RowResult) -> list[str]:
    lines = [f"--- row {row.row} {row.custom_id}"]
    if row.error is not None:
        lines.append(f"    error {row.error.code}: {row.error.message} (line {row.error.line})")
        return lines
    for answer in row.samples:
        text = answer.text if len(answer.text) <= _SHOWN else answer.text[:_SHOWN] + " ..."
        lines.append(f"    [{answer.finish.name.lower()}, {len(answer.tokens)} tokens] {text}")
    return lines
