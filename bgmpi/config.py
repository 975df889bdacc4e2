"""The configuration of a run: one table of options from which flags, environment and TOML keys all derive.

The fields of `Config` ARE the table.  A field `max_num_seqs` is the flag --max-num-seqs, the environment variable
BGMPI_MAX_NUM_SEQS and the TOML key max_num_seqs (alone or under the name of its section), read by the same reader.
So nothing can exist in one place and be missing in another.

Precedence (conventions): request > flag > environment > file > the model's generation_config.json > built-in.
`resolve` is pure: it is given the words, the environment and the text of the file, opens nothing and prints nothing.
It refuses every name that it does not know, because a misspelt option that is ignored costs a night of a cluster.
`Config.sources` remembers who set each value.  None means "not set": a later floor that knows more (the model, the
node) fills it in.

Rejected alternative: argparse defaults plus a config class plus an environment reader, three lists that drift apart.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, NoReturn

from bgmpi.dialects import FOREIGN, Foreign, foreign, unknown
from bgmpi.errors import InputError, UsageError
from bgmpi.input_shard import read_shard, this_shard, without_shard
from bgmpi.values import (
    Reader,
    choice,
    drill,
    duration,
    integer,
    limit,
    max_errors,
    number,
    size,
    switch,
    text,
    top_k,
)

PREFIX = "BGMPI_"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    read: Reader
    default: object
    help: str
    section: str
    short: tuple[str, ...]
    aliases: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases, as TOML keys."""
        return (self.name, *self.aliases)

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings on the command line."""
        return (*self.short, *("--" + name.replace("_", "-") for name in self.names))

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


def _option(section: str, default: object, read: Reader, help: str, *, short: tuple[str, ...] = (),
            aliases: tuple[str, ...] = ()) -> Any:
    facts = {"section": section, "read": read, "help": help, "short": short, "aliases": aliases}
    return field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that decides a run, resolved.  None means not set.  Sizes are bytes or tokens, durations seconds."""

    model: str | None = _option(
        "model", None, text, "model folder in Hugging Face layout; demo: the demo model", short=("-m",))
    tokenizer: str | None = _option(
        "model", None, text, "folder or file of the tokenizer; unset: the model's")
    served_model_name: str | None = _option(
        "model", None, text, "model name that requests and answers carry; unset: any, and the folder's")
    dtype: str = _option(
        "model", "auto", choice("auto", "float16", "bfloat16", "float32"), "precision; auto: the checkpoint's")
    max_model_len: int | None = _option(
        "model", None, size(), "most tokens of prompt and answer; unset: the model's own limit")
    load_format: str = _option(
        "model", "auto", choice("auto", "safetensors", "dummy"), "dummy: random weights of the model's shape")
    allow_nonfinite: bool = _option(
        "model", False, switch, "load weights that hold NaN or infinity, and mark the output")
    cache: str | None = _option(
        "model", None, text, "folder where demo models are kept; unset: the user's cache folder")

    input_file: str | None = _option(
        "files", None, text, "requests, one JSON object a line (OpenAI batch)", short=("-i",))
    output_file: str = _option("files", "results.h5", text, "results, HDF5", short=("-o",))
    error_file: str | None = _option(
        "files", None, text, "also write failed rows here, one JSON object a line")
    overwrite: bool = _option("files", False, switch, "replace an output file that exists")
    shard: str | None = _option(
        "files", None, read_shard, "K/N: compute only the rows r of the input with r mod N = K, into files that carry "
        "the number; off: all; unset: the place of this task in its Slurm array")
    strict: bool = _option(
        "files", False, switch, "stop at the first bad line instead of giving it an error row")
    max_line_bytes: int = _option("files", 64 << 20, size(), "longer input lines become error rows")
    segment_bytes: int = _option(
        "files", 64 << 20, size(), "a rank writes a segment of results when this much has gathered")
    checkpoint_interval: float = _option(
        "files", 60.0, duration, "or when this long has passed; then it also saves how far unfinished answers are")
    checkpoint_kv: str = _option(
        "files", "off", choice("off", "stop", "always"), "also save the KV of unfinished answers: when the job is told "
        "to stop, or always when it saves how far they are")
    resume: str = _option(
        "files", "auto", choice("auto", "never", "must", "force"), "go on with what an interrupted job left; force: "
        "also when the model or what answers depend on has changed")
    max_errors: str | None = _option(
        "files", None, max_errors, "stop, all saved, when more rows than that have failed: a number, or a share such "
        "as 1%; unset: never")
    retry_failed: bool = _option("files", False, switch, "when going on, try the rows again that ended as errors")

    max_num_seqs: int | None = _option(
        "batching", None, size(), "active sequences a rank; unset: as many as KV memory and the tokens of a step hold")
    max_num_batched_tokens: int = _option(
        "batching", 2048, size(), "tokens in one step of a rank, prompt and answer together")
    b_attn: int | None = _option(
        "batching", None, size(), "tokens in an attention micro-batch; unset: chosen")
    b_moe: int | None = _option(
        "batching", None, size(0), "tokens in an expert batch; 0: all that gathered; unset: chosen")
    yield_points: bool = _option(
        "batching", True, switch, "off: atomic forward passes, for comparison")
    migrate: bool = _option(
        "batching", True, switch, "off: a sequence stays on the rank that it was given to, for comparison")
    partition: bool = _option(
        "batching", True, switch, "off: the last sequences are not spread over idle ranks, for comparison")

    ageing: int = _option(
        "batching", 15, size(0), "rows that are read by priority and deadline between two turns of the oldest row that "
        "waits; 0: the input's order")
    prefix_sharing: str = _option(
        "batching", "multi-level", choice("multi-level", "one-level", "off"), "compute prefixes that prompts share "
        "once, and read rows that share together: every one of them, at most one a prompt, or none, for comparison")
    deterministic: bool = _option(
        "batching", False, switch, "answers equal to the last bit whatever shares a batch, on any number of ranks")

    page_tokens: int = _option(
        "memory", 64, size(), "tokens in a page of KV", aliases=("block_size",))
    host_kv_memory: int | None = _option(
        "memory", None, size(), "bytes of KV in the node's shared memory, all its ranks together; unset: from free "
        "memory and the job's limit")
    device_memory: int | None = _option(
        "memory", None, size(), "bytes of KV on a rank's device; unset on a CPU: KV is used in place, in host memory")
    stream_kv: str = _option(
        "memory", "auto", choice("auto", "on", "off"), "whether sequences whose KV is not on the device compute too, "
        "it passing through layer by layer; off: they wait")
    hold_policy: str = _option(
        "memory", "shortest-decoded", choice("shortest-decoded", "longest-decoded"), "who yields first when pages run "
        "short")
    weight_memory: int | None = _option(
        "memory", None, size(), "bytes for weights, a rank; what does not fit is read anew in every sweep; unset: from "
        "free memory and the job's limit")
    kv_spill: str | None = _option(
        "memory", None, text, "folder on a disk of the node for KV that the host memory cannot hold; unset: none")
    kv_spill_bytes: int | None = _option(
        "memory", None, size(), "most bytes of KV on that disk, a rank; unset: half of what is free, over the ranks")
    gpu_memory_utilization: float = _option(
        "memory", 0.9, number(0, 1, above=True), "share of a device's memory to use")

    temperature: float | None = _option(
        "answers", None, number(0, inf), "0: greedy; unset: the model's, else 1")
    top_p: float | None = _option(
        "answers", None, number(0, 1, above=True), "unset: the model's, else 1")
    top_k: int | None = _option(
        "answers", None, top_k, "0 or -1: no limit; unset: the model's, else 0")
    min_p: float | None = _option("answers", None, number(0, 1), "unset: the model's, else 0")
    repetition_penalty: float | None = _option(
        "answers", None, number(0, inf, above=True), "unset: the model's, else 1")
    max_tokens: int | None = _option(
        "answers", None, size(0), "most tokens of an answer; unset: as many as the context holds")
    generation_config: str = _option(
        "answers", "auto", choice("auto", "none"), "none: do not read the model's defaults")
    chat_template: str | None = _option(
        "answers", None, text, "file or text of a jinja template; unset: the tokenizer's")
    max_logprobs: int = _option(
        "answers", 20, integer(0), "most top_logprobs that a request may ask for")
    seed: int = _option("answers", 0, integer(), "seed of rows that bring none")

    ranks: int | None = _option(
        "launch", None, size(), "start that many ranks on this machine; under mpiexec or srun, how many must be there")
    threads: int | None = _option(
        "launch", None, size(), "threads a rank; unset: the node's cores over its ranks")
    backend: str = _option("launch", "auto", choice("auto", "cpu"), "what computes")
    allow_rank_mismatch: bool = _option(
        "launch", False, switch, "run even if MPI and the launcher disagree on the number of ranks")
    stop_before_walltime: float = _option(
        "launch", 60.0, duration, "stop, all saved, that long before the batch system ends the job (it tells when in "
        "SLURM_JOB_END_TIME); 0: never")
    config: str | None = _option("launch", None, text, "TOML file of these options")

    progress: str = _option(
        "watching", "auto", choice("auto", "bar", "lines", "off"), "auto: a bar on a terminal, else lines")
    log_interval: float = _option("watching", 10.0, duration, "time between two lines of progress")
    heartbeat: float = _option(
        "watching", 600.0, limit, "end the job when a rank has not gone on for so long, and say which; a warning comes "
        "at a tenth of it; off: never")
    startup_timeout: float = _option(
        "watching", 1800.0, limit, "the same before the first step; off: then only warnings")
    on_rank_death: str = _option(
        "watching", "restart", choice("restart", "shrink"), "the whole job ends and goes on when it is started again; "
        "shrink is refused (docs/reliability.md)")
    log_level: str = _option(
        "watching", "info", choice("debug", "info", "warning", "error"), "what rank 0 logs")
    metrics_file: str | None = _option(
        "watching", None, text, "append progress here, one JSON object a line")
    trace: str | None = _option(
        "watching", None, text, "write every decision here, one JSON object a round")
    check: bool = _option("watching", False, switch, "check all laws in every round")
    drill: str | None = _option(
        "watching", None, drill, "force primitives, to try a machine: yield=K,migrate=K,partition=K, every K-th round")

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def source(self, name: str) -> str:
        """Return who set `name`: flag, environment, file, generation_config or default."""
        return self.sources.get(name, "default")

    def explain(self) -> Iterator[str]:
        """Yield one line for every value that is not the default, with its source, then the notes."""
        for name, source in sorted(self.sources.items()):
            yield f"{name} = {json.dumps(getattr(self, name))} ({source})"
        yield from self.notes

    def to_json(self) -> str:
        """Return the resolved values and their sources as JSON, for the output's provenance."""
        values = {option.name: getattr(self, option.name) for option in options()}
        return json.dumps({"values": values, "sources": dict(sorted(self.sources.items()))}, indent=1)

    def with_model_defaults(self, generation_config: Mapping[str, object]) -> Config:
        """Return a config whose sampling values are all set but `max_tokens`, which may stay None (no cap).

        `generation_config` is the model's generation_config.json as a dict, {} when there is none.  It fills only what
        is not set, and nothing under --generation-config none.  `do_sample` is not read, as in vLLM; unlike there,
        `max_new_tokens` is not either: a cap that no user asked for would cut answers in silence (case C34).  Raise
        InputError naming the key when a value is not usable.
        """
        found = generation_config if self.generation_config == "auto" else {}
        values: dict[str, object] = {}
        sources = dict(self.sources)
        table = _table()
        for name, (key, builtin) in _MODEL_DEFAULTS.items():
            if getattr(self, name) is not None:
                continue
            if found.get(key) is None:
                values[name] = builtin
                continue
            try:
                values[name] = table[name].read(found[key])
            except ValueError as error:
                raise InputError(f"generation_config.json: {key}: {error}; correct it, set {table[name].flags[0]}, "
                                 "or pass --generation-config none") from None
            sources[name] = "generation_config"
        return replace(self, **values, sources=sources)  # type: ignore[arg-type]


# What generation_config.json may set: field -> its key there, the built-in value.
_MODEL_DEFAULTS: dict[str, tuple[str, object]] = {
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
}

# Options that name a file to write.
_WRITTEN = ("output_file", "error_file", "metrics_file", "trace")


def options() -> tuple[Option, ...]:
    """Return the table of options."""
    return tuple(
        Option(name=f.name, default=f.default, **f.metadata) for f in fields(Config) if f.metadata
    )


def _table() -> dict[str, Option]:
    return {name: option for option in options() for name in option.names}


def resolve(argv: Sequence[str], environ: Mapping[str, str], toml_text: str | None = None) -> Config:
    """Return the config that these words, this environment and this TOML text make.  Pure.

    Raise UsageError for a name that is unknown, a value that cannot be read, or a foreign flag whose wish is not met.
    """
    flags, notes = _read_flags(argv)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    table = _table()
    layers: tuple[tuple[str, Iterable[tuple[str, str, object]]], ...] = (
        ("file", _read_toml(toml_text or "")),
        ("environment", _read_environment(environ)),
        ("flag", flags),
    )
    for source, layer in layers:
        for name, spelling, raw in layer:
            option = table[name]
            try:
                values[option.name] = option.read(raw)
            except ValueError as error:
                raise UsageError(f"{spelling}: {error}") from None
            sources[option.name] = source
    _take_shard(values, sources, environ)
    return Config(**values, sources=sources, notes=notes)  # type: ignore[arg-type]


def _take_shard(values: dict[str, object], sources: dict[str, str], environ: Mapping[str, str]) -> None:
    """Fill in the shard that this run computes, and its number in the names of all files that it writes."""
    asked = values.get("shard")
    shard = this_shard(None if asked is None else str(asked), environ)
    if asked is None and shard is not None:
        values["shard"], sources["shard"] = str(shard), "environment"
    for name in _WRITTEN:
        path = values.get(name, _table()[name].default)
        if isinstance(path, str):
            flag = "--" + name.replace("_", "-")
            values[name] = without_shard(path, flag) if shard is None else shard.file_name(path)


def config_file(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the path of the TOML file that is asked for, so that the caller can read it for `resolve`.  Pure."""
    flags, _ = _read_flags(argv)
    for name, _, raw in (*_read_environment(environ), *flags)[::-1]:
        if name == "config":
            return str(raw)
    return None


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Gather(argparse.Action):
    """Notes what was typed, in order, as (dest, spelling, value)."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
                 option_string: str | None = None) -> None:
        namespace.typed.append((self.dest, option_string, self.const if self.nargs == 0 else values))


def parser() -> argparse.ArgumentParser:
    """Return the parser of `bgmpi run`, every flag of the table and every foreign one in it."""
    result = Parser(
        prog="bgmpi run", allow_abbrev=False, add_help=False, usage="bgmpi run --model DIR -i requests.jsonl [options]",
        epilog="Every option is also an environment variable (BGMPI_MAX_NUM_SEQS) and a key of the --config file "
        "(max_num_seqs). Request > flag > environment > file > the model's generation_config.json > default. "
        "Sizes: 25.6k is thousands, 8G is 1024^3. Durations: 90, 5m, 1h30m. Switches: --check, --check off, "
        "--no-check.",
    )
    groups: dict[str, Any] = {}
    for option in options():
        if option.section not in groups:
            groups[option.section] = result.add_argument_group(option.section)
        _add_option(groups[option.section], option)
    groups["launch"].add_argument("-h", "--help", action="store_true", help="show this text")
    for entry in FOREIGN:
        _add_foreign(result, entry)
    return result


def _add_option(group: Any, option: Option) -> None:
    shown = "" if option.default is None else f", default {_spell(option.default)}"
    description = f"{option.help} [{option.variable}{shown}]".replace("%", "%%")
    if option.read is not switch:
        group.add_argument(*option.flags, dest=option.name, action=_Gather, metavar="X", help=description)
        return
    group.add_argument(*option.flags, dest=option.name, action=_Gather, nargs="?", const=True, metavar="on|off",
                       help=description)
    group.add_argument(*(f"--no-{flag[2:]}" for flag in option.flags if flag.startswith("--")), dest=option.name,
                       action=_Gather, nargs=0, const=False, help=argparse.SUPPRESS)


def _add_foreign(target: argparse.ArgumentParser, entry: Foreign) -> None:
    target.add_argument(*entry.flags, dest=entry.flags[0], action=_Gather, nargs="?", const="", help=argparse.SUPPRESS)
    negations = tuple("--no-" + flag[2:] for flag in entry.flags if flag.startswith("--"))
    target.add_argument(*negations, dest=entry.flags[0], action=_Gather, nargs=0, const="false",
                        help=argparse.SUPPRESS)


def _spell(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else f"{value}"


_Typed = list[tuple[str, str, object]]


def _read_flags(argv: Sequence[str]) -> tuple[_Typed, tuple[str, ...]]:
    """Return (name, spelling, value) of the flags typed, and a note for each harmless foreign flag."""
    found, rest = parser().parse_known_args(list(argv), argparse.Namespace(typed=[]))
    if rest:
        raise UsageError(_leftover(rest[0]))
    flags: _Typed = []
    notes: list[str] = []
    for name, spelling, value in found.typed:
        if not name.startswith("-"):
            flags.append((name, spelling, value))
            continue
        entry = foreign(name)
        assert entry is not None
        typed = f"{spelling} {value}".rstrip()
        if str(value).lower() not in entry.harmless:
            said = f"{typed} is not possible" if entry.harmless else f"unknown flag {spelling}"
            raise UsageError(f"{said}: {entry.advice}")
        notes.append(f"{typed} changes nothing: {entry.advice}")
    return flags, tuple(notes)


def _leftover(word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected word {word!r}: every value of bgmpi run has a flag, such as -i {word}"
    known = [flag for option in options() for flag in option.flags if flag.startswith("--")]
    return unknown(word.split("=")[0], known, "flag")


def _read_environment(environ: Mapping[str, str]) -> _Typed:
    """Return (name, variable, value) of the BGMPI_* variables; an empty one counts as unset, as scripts export them."""
    known = {PREFIX + name.upper(): name for name in _table()}
    found: _Typed = []
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise UsageError(unknown(variable, known, "environment variable"))
        if value:
            found.append((known[variable], variable, value))
    return found


def _read_toml(toml_text: str) -> _Typed:
    """Return (name, spelling, value) of the keys, which stand alone or in a table named like their section."""
    try:
        document = tomllib.loads(toml_text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"config file: not valid TOML: {error}") from None
    sections: dict[str, list[str]] = {}
    for name, option in _table().items():
        sections.setdefault(option.section, []).append(name)
    found: _Typed = []
    for key, value in document.items():
        if isinstance(value, dict) and key in sections:
            found += [_toml_key(f"{key}.{inner}", inner, item, sections[key]) for inner, item in value.items()]
        else:
            found.append(_toml_key(key, key, value, list(_table())))
    return found


def _toml_key(spelling: str, key: str, value: object, known: Sequence[str]) -> tuple[str, str, object]:
    name = key.replace("-", "_")
    if name not in known or name == "config":
        raise UsageError(f"config file: {unknown(name, known, 'key')}")
    return name, f"config file: {spelling}", value
