"""Everything that must be true before the first step: files that exist, fit and are understood, and room for KV.

Cheap checks come first and weights last, so a misspelt path or a bad line costs seconds on every rank, never a model
load.  Each stage is agreed on by all ranks before the next begins.  Knows files and sizes, nothing of rounds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

import bgmpi
from bgmpi.architecture import Architecture
from bgmpi.config import Config
from bgmpi.errors import BgmpiError, InputError, InternalError, MissingError, UsageError, WriteError
from bgmpi.families import read_architecture
from bgmpi.input_shard import USUAL_TASKS, shard_of
from bgmpi.io.locks import SWITCH, held_by
from bgmpi.io.merge import other_shards
from bgmpi.io.model_files import ModelFiles, check_files, open_dummy_files, open_model_files
from bgmpi.io.publish import Provenance
from bgmpi.io.request_index import RequestIndex, scan_requests
from bgmpi.io.requests import RequestLimits, RequestReader, SamplingDefaults, require_chat_template
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer
from bgmpi.tensor_names import expected_tensors
from bgmpi.world import World

T = TypeVar("T")

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: Options that answers depend on.
_ANSWER_OPTIONS = (
    "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "max_logprobs",
    "allow_nonfinite", "served_model_name", "deterministic",
)
_LOG = logging.getLogger("bgmpi.prepare")


@dataclass(frozen=True, slots=True)
class Job:
    """The job as it was found: model, tokenizer, how many sequences it has, and on rank 0 the index of the input."""

    config: Config
    architecture: Architecture
    files: ModelFiles
    tokenizer: Tokenizer
    dtype: torch.dtype
    context: int
    sequences: int
    index: RequestIndex | None

    def reader(self, index: RequestIndex) -> RequestReader:
        """Open the input for reading single rows of an index of it.  Local.

        Raises MissingError where this node does not have the file, InputError where it is another one.
        """
        config = self.config
        limits = RequestLimits(
            max_model_len=self.context,
            vocab=self.architecture.vocab,
            job_seed=config.seed,
            defaults=_sampling_defaults(config),
            max_logprobs=config.max_logprobs,
            model_names=(config.served_model_name,) if config.served_model_name else (),
        )
        return RequestReader(Path(config.input_file or ""), index, self.tokenizer, limits)

    def settings(self) -> dict[str, str]:
        """Return all that answers depend on beside the requests, as text: two runs in which they are equal may share
        their answers."""
        config, template = self.config, self.tokenizer.chat_template_text
        return {
            "model": self.files.index_hash,
            "tokenizer": self.tokenizer.hash,
            "chat_template": sha256((template or "").encode()).hexdigest(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": str(self.context),
            **{name: str(getattr(config, name)) for name in _ANSWER_OPTIONS},
        }

    def kv_facts(self) -> str:
        """Return what KV in pages depends on beside the tokens, as text."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.files.index_hash} {dtype} {self.config.page_tokens}"

    def provenance(self, layout: Mapping[str, int | str]) -> Provenance:
        """Return where the results come from."""
        assert self.index is not None
        config, template = self.config, self.tokenizer.chat_template_text
        documents = {
            "config": config.to_json(), "model_config": json.dumps(self.files.config),
            "settings": json.dumps(self.settings()),
        }
        if template is not None:
            documents["chat_template"] = template
        return Provenance(
            model=config.served_model_name or Path(config.model or "").name,
            code_version=bgmpi.__version__,
            input_path=str(config.input_file),
            input_bytes=self.index.size,
            input_sha256=self.index.sha256,
            model_index_sha256=self.files.index_hash,
            tokenizer_sha256=self.tokenizer.hash,
            layout=layout,
            attributes={"nonfinite_allowed": int(config.allow_nonfinite), **_shard_attributes(self.index)},
            documents=documents,
        )


def _shard_attributes(index: RequestIndex) -> dict[str, int]:
    if index.shard is None:
        return {}
    return {"shard": index.shard.number, "shards": index.shard.count, "input_rows": index.file_rows}


def together(world: World, stage: Callable[[], T]) -> T:
    """Collective over the world: do a stage on every rank; a failure on any rank, and while the job is loaded a request
    to stop, is raised on all."""
    result, failure = None, None
    try:
        with world.stop.stage():
            result = stage()
    except BgmpiError as error:
        if isinstance(error, InternalError):
            _LOG.exception("a fault of the program")
        failure = error
    world.agree(failure)
    return result  # type: ignore[return-value]


def prepare(config: Config, world: World) -> Job:
    """Collective over the world: open and check everything but the weights' data."""
    together(world, lambda: check_output(config) if world.rank == 0 else None)
    index = together(world, lambda: _scan(config) if world.rank == 0 else None)
    files = together(world, lambda: _files(config))
    config = together(world, lambda: config.with_model_defaults(files.generation_config))
    architecture = together(world, lambda: read_architecture(files.config))
    together(world, lambda: check_files(architecture, files))
    tokenizer = together(world, lambda: _tokenizer(config, files, index))
    dtype = together(world, lambda: _dtype(config, files))
    context = together(world, lambda: _context(config, architecture))
    for note in (*config.explain(), *files.notes):
        _LOG.info(note)
    sequences = world.broadcast(int(index.first_sequence()[-1]) if index is not None else None, int)
    return Job(config, architecture, files, tokenizer, dtype, context, sequences, index)


def check_output(config: Config) -> None:
    """Raise before any work when a file cannot be written or is named twice."""
    taken = {os.path.realpath(config.input_file): "--input-file"} if config.input_file else {}
    for flag, name in (
        ("--output-file", config.output_file),
        ("--error-file", config.error_file),
        ("--metrics-file", config.metrics_file),
        ("--trace", config.trace),
    ):
        if name is None:
            continue
        _check_place(flag, Path(name))
        other = taken.setdefault(os.path.realpath(name), flag)
        if other != flag:
            raise UsageError(f"{other} and {flag} are the same file {name}; name another for one of them")


def _check_place(flag: str, path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise MissingError(f"{flag} {path}: the folder {path.parent} is not there; make it first")
    holder = held_by(path, os.environ)
    if holder is not None:
        raise UsageError(
            f"{flag} {path} is held open for writing by {holder}: close it there, or name another file; "
            f"{SWITCH}=FALSE replaces it all the same"
        )
    written = path if path.exists() and not path.is_file() else path.parent
    if not os.access(written, os.W_OK):
        raise WriteError(f"{flag} {path}: no permission to write in {written}")


def _scan(config: Config) -> RequestIndex:
    index = scan_requests(Path(config.input_file or ""), max_line_bytes=config.max_line_bytes)
    shard = shard_of(config.shard)
    if shard is None:
        return index
    if shard.count > USUAL_TASKS:
        _LOG.warning(
            "%d shards: many sites let an array have %d tasks at most, and a shard that never runs leaves the answer "
            "incomplete; fewer shards on more nodes each do the same", shard.count, USUAL_TASKS,
        )
    others = other_shards(Path(config.output_file), shard)
    if others:
        _LOG.warning(
            "outputs of another number of shards are beside this one, which is %s: %s; merge will not join them",
            shard, ", ".join(others),
        )
    mine = index.only(shard)
    _LOG.info("shard %s of the input: %d of its %d rows; bgmpi merge joins the outputs", shard, len(mine), len(index))
    return mine


def _files(config: Config) -> ModelFiles:
    folder = Path(config.model or "")
    if config.load_format != "dummy":
        return open_model_files(folder)
    dummy = open_dummy_files(folder)
    dummy.promise(expected_tensors(read_architecture(dummy.config)))
    return dummy


def _eos(config: Mapping[str, object]) -> list[int]:
    found = config.get("eos_token_id")
    return [int(one) for one in (found if isinstance(found, list) else [found]) if isinstance(one, int)]


def _tokenizer(config: Config, files: ModelFiles, index: RequestIndex | None) -> Tokenizer:
    folder = Path(config.tokenizer or config.model or "")
    eos = {*_eos(files.config), *_eos(files.generation_config)}
    tokenizer = open_tokenizer(folder, chat_template=config.chat_template, config_eos=eos)
    if index is not None:
        require_chat_template(index, tokenizer)
    return tokenizer


def _sampling_defaults(config: Config) -> SamplingDefaults:
    """Return the config's sampling values, all set by `with_model_defaults`."""
    assert config.temperature is not None and config.top_p is not None and config.top_k is not None
    assert config.min_p is not None and config.repetition_penalty is not None
    return SamplingDefaults(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        max_tokens=config.max_tokens,
    )


def _dtype(config: Config, files: ModelFiles) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    name = files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise InputError(f"config.json: dtype {name!r:.80} is not one of {', '.join(_DTYPES)}; pass --dtype")
    return _DTYPES[name]


def _context(config: Config, architecture: Architecture) -> int:
    asked = config.max_model_len
    if asked is None:
        return architecture.positions
    if asked > architecture.positions:
        raise UsageError(f"--max-model-len {asked}: the model was made for at most {architecture.positions} tokens")
    return asked


# --- memory ---------------------------------------------------------------------------------------------------------


def page_bytes(page_shape: tuple[int, ...], layers: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all layers."""
    return prod(page_shape) * layers * dtype.itemsize
