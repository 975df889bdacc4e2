"""One streaming pass over the input file, before any weight is loaded: where each row lies and what the job is.

The pass keeps 56 bytes a row (offset, length, line, samples, prompts, digest of the custom_id, hash of the line), four
more for each of priority and deadline once a row has one, and never a line longer than `max_line_bytes`, so neither a
million rows nor one huge line fills the memory.  It decides only what must be known of the whole file: how many
sequences there are, how urgent each row is, whether chats occur, and that no two rows share a custom_id (answers could
not be told apart; the one fault of a row that stops the job).  Everything else that is wrong with a line becomes that
row's error when `RequestReader` reads it.  Rejected alternative: a set of custom_ids, 100 bytes a row and more.

Rows are numbered from 0 over the non-blank lines; lines are physical and counted from 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from array import array
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InputError, InternalError, MissingError
from bgmpi.input_shard import InputShard

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
#: most sequences that one row may ask for; an absurd n must not fill the job's tables
MAX_SAMPLES = 16384
#: a longer input line becomes an error row
MAX_LINE_BYTES = 64 << 20
#: largest priority, of either sign, and latest deadline in seconds (thirty years) that a row may bring
MOST_PRIORITY = 2**31 - 1
MOST_DEADLINE = 1e9

_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 20
_DIGEST = 16
_CONTENT = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HEAD_BYTES = 1 << 16
_LEADING_ID = re.compile(rb'\s*\{\s*"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True, eq=False)
class RequestIndex:
    """Where the rows of an input file lie.

    `offset`, `length` int64 [rows]: bytes in the file, without the line's end.  `line` int64 [rows].  `samples` int32
    [rows]: how many sequences the row has; `prompts` int32 [rows]: how many prompts they share evenly; both 1 when that
    cannot be read.  `content` uint64 [rows]: a hash of the line's bytes, by which a row is known again in another
    order or among other rows; equal lines differ by how often they came before.  `first_chat_line` is 0 when no row is
    a chat.  `priority` int32 [rows], 0 where none is given; `deadline` float32 [rows], seconds, infinity where none is
    given; each None when no row has one; what cannot be read counts as not given, for its row is refused later.
    `size` and `sha256` are of the whole file, and so are `content` and `first_chat_line` where only a `shard` of its
    rows is here: row i is then row `number(i)` of the file's `file_rows`.
    """

    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    line: NDArray[np.int64]
    samples: NDArray[np.int32]
    prompts: NDArray[np.int32]
    content: NDArray[np.uint64]
    size: int
    sha256: str
    first_chat_line: int
    max_line_bytes: int
    priority: NDArray[np.int32] | None = None
    deadline: NDArray[np.float32] | None = None
    shard: InputShard | None = None
    file_rows: int = -1

    def __post_init__(self) -> None:
        """Raise InternalError where a part of the rows was taken and not of all columns."""
        columns = self.line, self.samples, self.prompts, self.content, self.priority, self.deadline
        lengths = [len(column) for column in columns if column is not None]
        if set(lengths) - {len(self.offset)}:
            raise InternalError(f"an index of {len(self.offset)} rows has columns of {lengths} rows")

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def has_chat(self) -> bool:
        """Whether any row is a chat."""
        return self.first_chat_line > 0

    @property
    def key(self) -> str:
        """What tells these rows from those of any other input or shard, hex."""
        return input_key(self.sha256, self.shard)

    def number(self, row: int) -> int:
        """Return which row of the file row `row` is."""
        return row if self.shard is None else self.shard.number + row * self.shard.count

    def only(self, shard: InputShard) -> RequestIndex:
        """Return the index of one shard of a whole file's rows."""
        mine = slice(shard.number, None, shard.count)
        return replace(
            self, offset=self.offset[mine].copy(), length=self.length[mine].copy(), line=self.line[mine].copy(),
            samples=self.samples[mine].copy(), prompts=self.prompts[mine].copy(), content=self.content[mine].copy(),
            priority=None if self.priority is None else self.priority[mine].copy(),
            deadline=None if self.deadline is None else self.deadline[mine].copy(), shard=shard, file_rows=len(self),
        )

    def first_sequence(self) -> NDArray[np.int64]:
        """Return the number of each row's first sequence, int64 [rows + 1]; the last is the number of sequences."""
        return np.concatenate(([0], np.cumsum(self.samples, dtype=np.int64)))

    def first_prompt(self) -> NDArray[np.int64]:
        """Return the number of each row's first prompt, int64 [rows + 1]; the last is the number of prompts."""
        return np.concatenate(([0], np.cumsum(self.prompts, dtype=np.int64)))


def input_key(sha256: str, shard: InputShard | None) -> str:
    """Return what tells the rows of a file, or of one shard of it, from all others, in hex."""
    return sha256 if shard is None else hashlib.sha256(f"{sha256} shard {shard}".encode()).hexdigest()


class _Body(msgspec.Struct):
    n: object = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    priority: object = None
    deadline_s: object = None


class _Line(msgspec.Struct):
    custom_id: object = None
    url: object = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_read_line = msgspec.json.Decoder(_Line)
_read_body = msgspec.json.Decoder(_Body)
_NO_WISH = (0, math.inf)
_ONE = (1, 1, *_NO_WISH)
#: custom_id (None when unusable), url, samples, prompts, priority and deadline of a row
_Facts = tuple[str | None, object, int, int, int, float]
_read_list = msgspec.json.Decoder(list[msgspec.Raw])


class _Growing:
    """The columns of the index while the pass goes on."""

    def __init__(self) -> None:
        self.offset, self.length, self.line = array("q"), array("q"), array("q")
        self.samples, self.prompts = array("i"), array("i")
        self.content = array("Q")
        #: empty until a row has one
        self.priority, self.deadline = array("i"), array("f")
        self.digests = bytearray()
        self.first_chat_line = 0

    def add(self, offset: int, length: int, line: int, facts: _Facts, content: bytes) -> None:
        """Add a row; content: 8 bytes of hash of its line."""
        custom_id, url, samples, prompts, priority, deadline = facts
        if priority or self.priority:
            self._add_wish(self.priority, priority, 0)
        if deadline < math.inf or self.deadline:
            self._add_wish(self.deadline, deadline, math.inf)
        self.offset.append(offset)
        self.length.append(length)
        self.line.append(line)
        self.samples.append(samples)
        self.prompts.append(prompts)
        self.content.append(int.from_bytes(content, "little"))
        self.digests += bytes(_DIGEST) if custom_id is None else _digest(custom_id)
        if url == CHAT_URL and not self.first_chat_line:
            self.first_chat_line = line

    def _add_wish(self, column: array[Any], value: float, none: float) -> None:
        column.extend([none] * (len(self.offset) - len(column)))
        column.append(value)


def scan_requests(path: Path | str, *, max_line_bytes: int = MAX_LINE_BYTES) -> RequestIndex:
    """Read the input file once and return where its rows lie.

    Raise MissingError when it is not there, InputError when it cannot be read as a file of lines or when two rows have
    the same custom_id (naming both lines).
    """
    digest = hashlib.sha256()
    columns = _Growing()
    with _open(Path(path)) as file:
        size = _scan(file, columns, digest, max_line_bytes)
        _refuse_duplicates(file, Path(path), columns, max_line_bytes)
    return RequestIndex(
        np.frombuffer(columns.offset, np.int64), np.frombuffer(columns.length, np.int64),
        np.frombuffer(columns.line, np.int64), np.frombuffer(columns.samples, np.int32),
        np.frombuffer(columns.prompts, np.int32), _told_apart(np.frombuffer(columns.content, np.uint64)), size,
        digest.hexdigest(), columns.first_chat_line, max_line_bytes,
        priority=np.frombuffer(columns.priority, np.int32) if columns.priority else None,
        deadline=np.frombuffer(columns.deadline, np.float32) if columns.deadline else None,
    )


def _scan(file: BufferedReader, columns: _Growing, digest: Any, max_line_bytes: int) -> int:
    """Fill `columns` and `digest` from the file; return its size in bytes."""
    offset = line = 0
    while piece := file.readline(max_line_bytes + 2):
        line += 1
        digest.update(piece)
        start, offset = offset, offset + len(piece)
        if not piece.endswith(b"\n") and len(piece) == max_line_bytes + 2:
            facts: _Facts = leading_custom_id(piece[:_HEAD_BYTES]), None, *_ONE
            content_hash = hashlib.blake2b(piece, digest_size=_CONTENT)
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(_PIECE)
                digest.update(piece)
                content_hash.update(piece)
                offset += len(piece)
            columns.add(start, offset - start - piece.endswith(b"\n"), line, facts, content_hash.digest())
            continue
        if line == 1 and piece.startswith(_BOM):
            start, piece = start + len(_BOM), piece[len(_BOM) :]
        content = piece.rstrip()
        if not content:
            continue
        content_hash = hashlib.blake2b(content, digest_size=_CONTENT)
        columns.add(start, len(content), line, _row_facts(content, max_line_bytes), content_hash.digest())
    return offset


def _told_apart(content: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hashes, those of equal lines changed by how many of them came before."""
    order = np.argsort(content, kind="stable")
    ordered = content[order]
    begins = np.ones(len(content), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    place = np.arange(len(content))
    before = place - np.maximum.accumulate(np.where(begins, place, 0))
    apart = content.copy()
    apart[order] += before.astype(np.uint64) * _ODD
    return apart


def _open(path: Path) -> BufferedReader:
    """Open a regular file of text for reading, or say why not."""
    try:
        file: BufferedReader = BufferedReader(FileIO(path), _PIECE)
    except FileNotFoundError as error:
        raise MissingError(f"input file {path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"input file {path}: is a folder; name one JSONL file") from error
    except OSError as error:
        raise InputError(f"input file {path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"input file {path}: no regular file; rows are read again by their place, so copy it to one")
    if file.peek(2).startswith(b"\x1f\x8b"):
        file.close()
        raise InputError(f"input file {path}: is compressed with gzip; rows are read by their place, so unpack it")
    return file


def _row_facts(content: bytes, max_line_bytes: int) -> _Facts:
    """Return what must be known of one line."""
    if len(content) > max_line_bytes:
        return leading_custom_id(content), None, *_ONE
    try:
        row = _read_line.decode(content)
        custom_id, url = row.custom_id, row.url
        body = _read_body.decode(row.body)
        prompts = _prompt_count(url, body.prompt)
        samples = sample_count(body.n, prompts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _odd_row_facts(content)
    wish = _NO_WISH if body.priority is None is body.deadline_s else _wish(body.priority, body.deadline_s)
    return usable_custom_id(custom_id), url, *((samples, prompts) if samples else (1, 1)), *wish


def _odd_row_facts(content: bytes) -> _Facts:
    """The same by the reader's own parser, for lines that the fast one refuses (lone surrogates, odd types)."""
    try:
        row = parse_line(content)[0]
    except ValueError:
        return leading_custom_id(content), None, *_ONE
    if not isinstance(row, dict):
        return None, None, *_ONE
    body, url = row.get("body"), row.get("url")
    samples, prompts, wish = None, 1, _NO_WISH
    if isinstance(body, dict):
        prompt = body.get("prompt") if url == COMPLETIONS_URL else None
        many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        prompts = len(prompt) if many and prompt else 1
        samples = sample_count(body.get("n"), prompts)
        wish = _wish(body.get("priority"), body.get("deadline_s"))
    return usable_custom_id(row.get("custom_id")), url, *((samples, prompts) if samples else (1, 1)), *wish


def _wish(priority: object, deadline: object) -> tuple[int, float]:
    """Return the priority and the deadline of a row as they count, each the neutral one where it is not usable."""
    number = priority if type(priority) is int else 0
    seconds = deadline if type(deadline) is int or type(deadline) is float else math.inf
    return number if abs(number) <= MOST_PRIORITY else 0, seconds if 0 <= seconds <= MOST_DEADLINE else math.inf


def _prompt_count(url: object, prompt: msgspec.Raw) -> int:
    """Return how many prompts a row's `prompt` holds: a list of texts or of id lists counts its entries."""
    raw = bytes(prompt)
    if url != COMPLETIONS_URL or not raw.startswith(b"["):
        return 1
    entries = raw[1:].lstrip()
    return len(_read_list.decode(raw)) if entries.startswith((b'"', b"[")) else 1


def sample_count(n: object, prompts: int) -> int | None:
    """Return how many sequences a row has with `n` choices for each of its prompts, None when `n` is not usable."""
    if n is None:
        n = 1
    if type(n) is not int or n < 1 or n * prompts > MAX_SAMPLES:
        return None
    return n * prompts


def usable_custom_id(value: object) -> str | None:
    """Return a custom_id that answers can be joined on, None for a blank one or another type."""
    return value if isinstance(value, str) and value.strip() else None


def leading_custom_id(content: bytes) -> str | None:
    """Return the custom_id of a line that is no JSON or too long, where the line begins with it."""
    match = _LEADING_ID.match(content)
    try:
        return usable_custom_id(parse_line(match[1])[0]) if match else None
    except ValueError:
        return None


def parse_line(content: bytes) -> tuple[Any, bool]:
    """Return the JSON value of one line, and whether unpaired surrogates in it were replaced by U+FFFD.

    Raise ValueError, saying what is wrong, for anything that is not strict JSON in strict UTF-8.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(content):
            return _replace_surrogates(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value, False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _replace_surrogates(value: Any) -> tuple[Any, bool]:
    if isinstance(value, str):
        clean = _SURROGATE.sub("\ufffd", value)
        return clean, clean != value
    if isinstance(value, list):
        parts = [_replace_surrogates(part) for part in value]
        return [part for part, _ in parts], any(changed for _, changed in parts)
    if isinstance(value, dict):
        pairs = [(_replace_surrogates(key), _replace_surrogates(part)) for key, part in value.items()]
        return {key[0]: part[0] for key, part in pairs}, any(key[1] or part[1] for key, part in pairs)
    return value, False


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(_SURROGATE.sub("\ufffd", custom_id).encode(), digest_size=_DIGEST).digest()


def _refuse_duplicates(file: BufferedReader, path: Path, columns: _Growing, max_line_bytes: int) -> None:
    """Raise InputError when two rows have the same custom_id, naming the first few pairs of lines."""
    digests = np.frombuffer(columns.digests, np.uint64).reshape(-1, 2)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests stay in input order
    ordered = digests[order]
    same = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1) & ordered[1:].any(axis=1))
    if not len(same):
        return
    told = []
    for pair in sorted(same.tolist(), key=lambda at: int(order[at + 1]))[:5]:
        row, again = int(order[pair]), int(order[pair + 1])
        file.seek(columns.offset[row])
        content = file.read(min(columns.length[row], _HEAD_BYTES))
        whole = columns.length[row] <= _HEAD_BYTES
        name = _row_facts(content, max_line_bytes)[0] if whole else leading_custom_id(content)
        told.append(f"lines {columns.line[row]} and {columns.line[again]}" + (f" ({name!r:.80})" if name else ""))
    more = f", and {len(same) - len(told)} more" if len(same) > len(told) else ""
    raise InputError(
        f"input file {path}: duplicate_custom_id: the same custom_id on {'; '.join(told)}{more}; "
        f"answers are joined on custom_id, so give every line its own"
    )
