"""Join the outputs of all shards of an input into one file, as one job would have published it.

Nothing is written unless the answer is whole: every shard is there and complete, all have the same settings and the
same input, and their rows are disjoint and complete.  What does not fit is told apart: a shard that is missing, files
of different jobs, a file that is malformed.  Row i of the output is the i-th request of the input; the shards stay.

Memory is bounded as in publishing: a few blocks and some 100 bytes an answer.  Rejected: a virtual dataset over the
shards, because a missing file reads as zeros without an error.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InputError, MissingError, UsageError
from bgmpi.input_shard import InputShard, shard_pattern
from bgmpi.io.collected import Collected
from bgmpi.io.journal import JournalReading
from bgmpi.io.locks import held_by
from bgmpi.io.publish import Provenance, Published, publish_collected
from bgmpi.io.published_answers import PublishedAnswers
from bgmpi.io.results_file import Results, open_results
from bgmpi.io.segments import parts_folder

_NAMED = 10
#: Attributes of the whole, the same in all its shards.
_COMMON = (
    "input_bytes", "input_sha256", "input_rows", "model", "model_index_sha256", "tokenizer_sha256", "nonfinite_allowed",
)
#: One block holds that much of each shard, within bounds: a chunk of a file is unpacked as a whole.
_SHARD_BYTES, _LEAST_BYTES, _MOST_BYTES = 4 << 20, 32 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard's file.  settings: what its answers depend on; documents: texts of its provenance."""

    path: Path
    which: InputShard
    attributes: Mapping[str, Any]
    settings: Mapping[str, str]
    documents: Mapping[str, str]
    rows: int


def merge(
    words: Sequence[str], output: str | os.PathLike[str], *, overwrite: bool = False, block_bytes: int | None = None
) -> Published:
    """Join the shards that `words` name (files, patterns, or the name that all of them were given) into `output`.

    block_bytes: of answers in memory at once; None: some MB a shard, 256 MB at most.  Raise MissingError naming the
    shards that are not there, UsageError when files of several jobs were named or the output may not be replaced,
    InputError when a file is malformed, WriteError.
    """
    paths = find_shards(words)
    output = Path(output)
    _check_output(output, paths, overwrite)
    shards = [_read(path) for path in paths]
    check_shards([(shard.path, shard.which) for shard in shards])
    _check_same(shards)
    shards.sort(key=lambda shard: shard.which.number)
    count, total = len(shards), int(shards[0].attributes["input_rows"])
    _check_rows(shards, total)
    sources = [PublishedAnswers(shard.path) for shard in shards]
    samples, prompts, content = _per_row(shards, total)
    return publish_collected(
        _collected(sources, output), output, _provenance(shards), samples, prompts, content=content,
        block_bytes=block_bytes or min(max(_LEAST_BYTES, _SHARD_BYTES * count), _MOST_BYTES),
    )


def find_shards(words: Sequence[str]) -> list[Path]:
    """Return the files that the words name, each once.  Raise MissingError for a word that names none."""
    found: dict[str, Path] = {}
    for word in words:
        beside = glob.glob(shard_pattern(glob.escape(word)))
        names = sorted(beside or ([word] if os.path.exists(word) else glob.glob(word)))
        if not names:
            raise MissingError(f"{word}: no such file, and there are no shards of that name ({shard_pattern(word)})")
        for name in names:
            found.setdefault(os.path.realpath(name), Path(name))
    return list(found.values())


def whole_name(words: Sequence[str]) -> str:
    """Return the name that all shards were given, where just that was said; raise UsageError otherwise."""
    if len(words) == 1 and glob.glob(shard_pattern(glob.escape(words[0]))):
        return words[0]
    raise UsageError(f"where to? name the output: bgmpi merge {' '.join(words[:2])} ... --output-file results.h5")


def other_shards(output: Path, shard: InputShard) -> list[str]:
    """Return the names of a few outputs beside a shard's that are of another number of shards."""
    mine = f".shard-{shard.number:04}-of-{shard.count:04}"
    if mine not in output.name:
        return []
    pattern = glob.escape(output.name).replace(mine, ".shard-*-of-*")
    names = (path.name for path in output.parent.glob(pattern))
    return sorted(name for name in names if f"-of-{shard.count:04}" not in name)[:3]


def check_shards(found: Sequence[tuple[Path, InputShard]]) -> None:
    """Raise UsageError unless all are shards of one count and none is there twice, MissingError for those not there."""
    counts = sorted({which.count for _, which in found})
    if len(counts) > 1:
        first = {count: next(path for path, which in found if which.count == count) for count in counts}
        told = ", ".join(f"{path} is one of {count}" for count, path in first.items())
        raise UsageError(f"shards of different jobs: {told}; name those of one job alone")
    numbers: dict[int, Path] = {}
    for path, which in found:
        other = numbers.setdefault(which.number, path)
        if other != path:
            raise UsageError(f"shard {which} is there twice: {other} and {path}; name one of them")
    missing = [number for number in range(counts[0]) if number not in numbers]
    if missing:
        told = ", ".join(str(number) for number in missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
        begun = _begun(found[0], missing)
        raise MissingError(f"{len(missing)} of {counts[0]} shards missing: {told} (counted from 0){begun}")


# --- inside ---------------------------------------------------------------------------------------------------------


def _begun(one: tuple[Path, InputShard], missing: Sequence[int]) -> str:
    """Say which of the missing shards have begun and not ended, by the names beside one that is there."""
    path, which = one
    mine, parts = f"-{which.number:04}-", []
    for number in missing:
        folder = parts_folder(path.with_name(path.name.replace(mine, f"-{number:04}-", 1)))
        if folder.is_dir():
            parts.append(str(folder))
    return f"; not ended yet: {', '.join(parts[:_NAMED])}: run them again" if parts else ""


def _check_output(output: Path, paths: Sequence[Path], overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise MissingError(f"--output-file {output}: the folder {output.parent} is not there; make it first")
    if any(os.path.realpath(output) == os.path.realpath(path) for path in paths):
        raise UsageError(f"--output-file {output} is one of the shards; name another file")
    parts = parts_folder(output)
    if parts.exists():
        raise UsageError(f"{parts} is there: a job that writes {output} has not ended; name another file")
    holder = held_by(output, os.environ)
    if holder is not None:
        raise UsageError(f"{output} is held open for writing by {holder}: close it there, or name another file")
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists; pass --overwrite to replace it, or another --output-file")


def _read(path: Path) -> _Shard:
    with open_results(path) as results:
        attributes = results.attributes
        if "shard" not in attributes:
            raise UsageError(f"{path} is no shard: it holds a whole job's answers (bgmpi run --shard K/N makes shards)")
        which = InputShard(int(attributes["shard"]), int(attributes["shards"]))
        if not 0 <= which.number < which.count or not results.has("rows/content"):
            raise InputError(f"{path}: shard {which} is malformed; run it again with --overwrite")
        return _Shard(path, which, attributes, _settings(results), _documents(results), len(results))


def _settings(results: Results) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in json.loads(results.document("settings")).items()}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{results.path}: its settings cannot be read: {error}") from error


def _documents(results: Results) -> dict[str, str]:
    names = ("config", "model_config", "settings", "chat_template")
    return {name: results.document(name) for name in names if results.has(f"provenance/{name}")}


def _check_same(shards: Sequence[_Shard]) -> None:
    """Raise UsageError, naming files and values, unless all shards are of one job."""
    one = shards[0]
    for other in shards[1:]:
        pairs = [(name, one.attributes.get(name), other.attributes.get(name)) for name in _COMMON]
        names = sorted({*one.settings, *other.settings})
        pairs += [(name, one.settings.get(name), other.settings.get(name)) for name in names]
        differs = [f"{name} is {a} and {b}" for name, a, b in pairs if a != b]
        if differs:
            raise UsageError(f"{one.path} and {other.path} are of different jobs: {'; '.join(differs)}")


def _check_rows(shards: Sequence[_Shard], total: int) -> None:
    """Raise InputError unless each shard has just its rows of the input."""
    for shard in shards:
        expected = shard.which.rows(total)
        if shard.rows != expected:
            raise InputError(
                f"{shard.path}: shard {shard.which} of {total} rows has {expected}, and {shard.rows} are there; "
                f"run it again with --overwrite"
            )


def _per_row(
    shards: Sequence[_Shard], total: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64]]:
    """Return of every row of the input its samples, its prompts and the hash of its line, each [total]."""
    samples, prompts = np.zeros(total, np.int32), np.zeros(total, np.int32)
    content = np.zeros(total, np.uint64)
    for number, shard in enumerate(shards):
        mine = slice(number, None, len(shards))
        with open_results(shard.path) as results:
            samples[mine] = np.diff(results.first_sample)
            prompts[mine] = results.column("rows/prompts")
            content[mine] = results.column("rows/content")
    return samples, prompts, content


def _collected(sources: Sequence[PublishedAnswers], output: Path) -> Collected:
    """Return the answers of all shards, their rows numbered as in the whole input."""
    count = len(sources)
    return Collected(
        segments=sources,
        segment=np.repeat(np.arange(count), [len(one.row) for one in sources]),
        entry=np.concatenate([np.arange(len(one.row)) for one in sources]),
        row=np.concatenate([place + count * one.row for place, one in enumerate(sources)]),
        sample=np.concatenate([one.sample for one in sources]),
        is_error=np.concatenate([one.is_error for one in sources]),
        bytes=np.concatenate([one.bytes for one in sources]),
        journal=JournalReading(output, (), (), (), ()),
        damaged=(),
    )


def _provenance(shards: Sequence[_Shard]) -> Provenance:
    """Return that of the whole: what all shards say alike, and each one's own as a document."""
    about = shards[0].attributes
    own = [
        {
            "file": str(shard.path), "config": json.loads(shard.documents.get("config", "{}")),
            **{name: value for name, value in shard.attributes.items() if name not in _COMMON},
        }
        for shard in shards
    ]
    return Provenance(
        model=str(about["model"]),
        code_version=str(about["code_version"]),
        input_path=str(about["input_path"]),
        input_bytes=int(about["input_bytes"]),
        input_sha256=str(about["input_sha256"]),
        model_index_sha256=str(about["model_index_sha256"]),
        tokenizer_sha256=str(about["tokenizer_sha256"]),
        layout={**json.loads(str(about["layout"])), "shards": len(shards)},
        attributes={"nonfinite_allowed": int(about.get("nonfinite_allowed", 0))},
        documents={**shards[0].documents, "shards": json.dumps(own, indent=1)},
    )
