"""A Hugging Face model folder: config, index, and tensors that stay on disk until somebody reads them.

Tensors are memory-mapped, so the ranks of a node share one copy in the page cache and a rank pays only for the experts
that it touches.  Everything that can be wrong with a folder is found here before any weight is read: a missing or cut
shard, an index that promises what a shard lacks, tensors too many, too few or of another shape (cases C46 to C50).
Weights in fp8 with block scales leave this room as float32: nobody above knows how they were packed.

Knows files and names, no mathematics.  `tensor` never copies what it can map; `read` also looks for NaN and Inf.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bgmpi.architecture import Architecture
from bgmpi.errors import InputError, MissingError
from bgmpi.tensor_names import expected_tensors, ignored_tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SCALE = "_scale_inv"
_FP8 = "F8_E4M3"
_FRACTIONS = ("F64", "F32", "BF16", "F16")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SAMPLE_BYTES = 4096
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's numbers lie: `size` bytes of `dtype` at byte `offset` of a file."""

    path: Path
    offset: int
    size: int
    dtype: torch.dtype


class ModelFiles:
    """An open model folder.  `notes` holds what a user should be told once and nothing stops for."""

    def __init__(self, folder: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self.generation_config = generation_config
        self.notes: list[str] = []
        self.index_hash = ""
        self._shards: dict[str, Any] = {}
        self._place: dict[str, str] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        self._packed: set[str] = set()
        #: how a tensor is stored where it is no kind of weight known here
        self._strange: dict[str, str] = {}
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def names(self) -> list[str]:
        """Return the names of all tensors, without empty ones and without the scales of packed ones."""
        return list(self._shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without touching its data."""
        self._require(name)
        return self._shape[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype of its file, mapped and not yet read; a packed one as float32."""
        self._require(name)
        raw: torch.Tensor = self._shards[self._place[name]].get_tensor(name)
        if name not in self._packed:
            return raw
        scale = self._shards[self._place[name + _SCALE]].get_tensor(name + _SCALE)
        return unpack_blocks(raw, scale, self._block(), name)

    def read(self, name: str, allow_nonfinite: bool = False) -> torch.Tensor:
        """Return a tensor whose numbers were looked at; InputError naming it when any is NaN or Inf (case C49)."""
        tensor = self.tensor(name)
        if not allow_nonfinite:
            self.require_finite(name, tensor)
        return tensor

    def require_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InputError when any number of the tensor of that name is NaN or Inf."""
        if tensor.numel() and not _finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{self.folder / self._place[name]}: tensor {name} has {bad} of {tensor.numel()} numbers that are NaN "
                f"or Inf; fetch the file again, or pass --allow-nonfinite to use it as it is"
            )

    def stored(self, name: str) -> Stored | None:
        """Return where a tensor lies in its file, None when no file holds its numbers as they are (packed, made up)."""
        self._require(name)
        if name in self._packed or name not in self._place:
            return None
        shard = self._place[name]
        if shard not in self._headers:
            self._headers[shard] = _read_header(self.folder / shard)
        header, front = self._headers[shard]
        about = header[name]
        if about["dtype"] not in _DTYPES:
            return None
        begin, end = about["data_offsets"]
        return Stored(self.folder / shard, front + begin, end - begin, _DTYPES[about["dtype"]])

    def open_shard(self, shard: str, promised: set[str] | None) -> None:
        """Map one file and take up its tensors; `promised` None takes all."""
        path = self.folder / shard
        try:
            handle = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(
                f"{path}: its {path.stat().st_size} bytes are cut short or not safetensors ({error}); fetch it again"
            ) from error
        held = set(handle.keys())
        lacking = sorted((promised or set()) - held)
        if lacking:
            told = ", ".join(lacking[:5])
            raise InputError(f"{path}: {INDEX} places {len(lacking)} tensors here that it lacks: {told}")
        surplus = sorted(held - promised) if promised is not None else []
        if surplus:
            told = ", ".join(surplus[:5])
            self.notes.append(f"{path}: {len(surplus)} tensors are not in the index and not used: {told}")
        self._shards[shard] = handle
        for name in sorted(held if promised is None else promised):
            piece = handle.get_slice(name)
            shape = tuple(piece.get_shape())
            if 0 in shape:
                self.notes.append(f"{path}: tensor {name} of shape {list(shape)} is empty and not used")
                continue
            self._place[name] = shard
            self._shape[name] = shape
            if piece.get_dtype() == _FP8:
                self._packed.add(name)
            elif piece.get_dtype() not in _FRACTIONS:
                self._strange[name] = str(piece.get_dtype())

    def fold_scales(self) -> None:
        """Hide the scales of packed tensors behind them; a packed tensor without scales is refused."""
        for name in sorted(self._packed):
            if self._shape.pop(name + _SCALE, None) is None:
                raise InputError(
                    f"{self.folder}: tensor {name} is fp8 but has no {name + _SCALE}; only block-scaled fp8 is known"
                )

    def strange(self, name: str) -> str:
        """Say how a tensor is stored whose numbers are no fractions of a known width, "" for every other."""
        return self._strange.get(name, "")

    def _require(self, name: str) -> None:
        if name not in self._shape:
            raise InputError(f"{self.folder}: tensor {name} is not in the checkpoint")

    def _block(self) -> tuple[int, int]:
        rows, columns = (self.config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
        return int(rows), int(columns)


class DummyFiles(ModelFiles):
    """Random weights of a model's shape, for trying sizes and speeds (--load-format dummy).

    Every tensor is drawn from its own name, so all ranks see the same model.
    """

    def promise(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold tensors of these names and shapes."""
        self._shape = dict(shapes)
        self.index_hash = "dummy"
        self.notes.append("weights are random (--load-format dummy): the text will be noise")

    def tensor(self, name: str) -> torch.Tensor:
        """Return the random tensor of that name, float32: norms are ones, all else normal with deviation 0.02."""
        self._require(name)
        shape = self._shape[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02

    def read(self, name: str, allow_nonfinite: bool = False) -> torch.Tensor:
        """Return the tensor; it is finite."""
        return self.tensor(name)


def open_dummy_files(folder: Path) -> DummyFiles:
    """Open a folder for its configs alone; no weights need be there.  Raises MissingError or InputError."""
    return DummyFiles(folder, _read_json(folder / "config.json"), _read_json(folder / "generation_config.json", {}))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read what a safetensors file says of its tensors, and where its data begin; `open_shard` found it sound."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
    return header, 8 + size


def _finite(tensor: torch.Tensor) -> bool:
    """Say whether all numbers are finite, without a mask as large as the tensor."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def unpack_blocks(packed: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], name: str) -> torch.Tensor:
    """Multiply each block of packed [N, K] by its scale [ceil(N / rows), ceil(K / columns)] -> float32 [N, K].

    Blocks at the right and lower edge may be cut (case C53).  Raises InputError when the scales do not fit.
    """
    rows, columns = block
    wanted = tuple(-(-size // step) for size, step in zip(packed.shape, block, strict=False))
    if packed.ndim != 2 or tuple(scale.shape) != wanted:
        raise InputError(
            f"tensor {name}{_SCALE}: expected shape {list(wanted)} for {list(packed.shape)} in blocks of "
            f"{rows} x {columns}, got {list(scale.shape)}"
        )
    unpacked = packed.to(torch.float32)
    wide = scale.float().repeat_interleave(columns, dim=1)[:, : packed.shape[1]]
    for number, strip in enumerate(unpacked.split(rows)):
        strip.mul_(wide[number])
    return unpacked


def open_model_files(folder: Path) -> ModelFiles:
    """Open a model folder; reads headers only.

    Raises MissingError when the folder, its config, its weights or a shard that its index names is not there, and
    InputError when one of them is malformed.
    """
    if not folder.is_dir():
        raise MissingError(f"model folder {folder} is not there; --model takes one with config.json and safetensors")
    files = ModelFiles(folder, _read_json(folder / "config.json"), _read_json(folder / "generation_config.json", {}))
    weight_map = _weight_map(folder)
    _warn_of_strays(files, set(weight_map))
    for shard, promised in weight_map.items():
        files.open_shard(shard, promised)
    files.fold_scales()
    files.index_hash = _fingerprint(files, weight_map)
    return files


def _read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object; `default` when the file is absent and may be."""
    if not path.is_file():
        if default is not None:
            return default
        raise MissingError(f"{path} is not there; a model folder holds config.json and safetensors files")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _weight_map(folder: Path) -> dict[str, set[str] | None]:
    """Return shard -> tensors that the index promises, None for all of a single file; each is there (case C46)."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            held = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
                raise MissingError(
                    f"{folder}: neither {INDEX} nor {SINGLE} is there, only {', '.join(pickles)}: pickles, which "
                    f"run code of whoever made it while it is read, so it is never opened; fetch the safetensors of "
                    f"this model, or convert it in a place that you can afford to lose"
                )
            raise MissingError(f"{folder}: neither {INDEX} nor {SINGLE} is there; the folder holds: {held}")
        return {SINGLE: None}
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        raise InputError(f"{folder / INDEX}: expected an object 'weight_map' of tensor name to file name")
    shards: dict[str, set[str]] = defaultdict(set)
    for name, shard in places.items():
        if not _plain_name(shard):
            raise InputError(
                f"{folder / INDEX}: places tensor {name:.80} in {shard[:80]!r}; expected the plain name of a file of "
                f"this folder, nothing outside of it is read"
            )
        shards[shard].add(name)
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise MissingError(
            f"{folder}: {len(missing)} of {len(shards)} shards that {INDEX} names are not there: {', '.join(missing)}"
        )
    return {shard: shards[shard] for shard in sorted(shards)}


def _plain_name(shard: str) -> bool:
    """Say whether a name means a file of its folder and nothing else: a link there may lead on (caches have such)."""
    return shard not in ("", ".", "..") and not set(shard) & {"/", "\0"} and len(shard.encode(errors="replace")) < 256


def _warn_of_strays(files: ModelFiles, used: set[str]) -> None:
    """Note the weight files that nothing refers to (case C47)."""
    strays = sorted(path.name for path in files.folder.glob("*.safetensors") if path.name not in used)
    if strays:
        files.notes.append(f"{files.folder}: not used, because the index does not name it: {', '.join(strays)}")


def _fingerprint(files: ModelFiles, shards: Iterable[str]) -> str:
    """Return a SHA-256 over config, index, and of each shard its size and three samples: cheap, yet two checkpoints of
    the same shape differ."""
    digest = hashlib.sha256(json.dumps(files.config, sort_keys=True).encode())
    index = files.folder / INDEX
    digest.update(index.read_bytes() if index.is_file() else b"")
    for shard in shards:
        path = files.folder / shard
        size = path.stat().st_size
        digest.update(f"{shard} {size}".encode())
        with path.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_files(arch: Architecture, files: ModelFiles) -> None:
    """Compare names and shapes with what `arch` needs; reads no data.

    Raises InputError naming every kind of difference.  Adds a note for what is rightly left unused.
    """
    expected, held = expected_tensors(arch), set(files.names())
    missing = sorted(expected.keys() - held)
    ignored: dict[str, list[str]] = defaultdict(list)
    unused = []
    for name in sorted(held - expected.keys()):
        reason = ignored_tensor(arch, name)
        unused.append(name) if reason is None else ignored[reason].append(name)
    wrong = [
        f"{name} expected {list(expected[name])}, got {list(files.shape(name))}"
        for name in sorted(expected.keys() & held) if expected[name] != files.shape(name)
    ]
    strange = [f"{name} is {files.strange(name)}" for name in sorted(expected.keys() & held) if files.strange(name)]
    told = {"missing": missing, "unused": unused, "of another shape": wrong, "that are no weights": strange}
    problems = _problems(told)
    if problems:
        raise InputError(f"{files.folder}: the weights do not fit config.json ({arch.family}): {problems}")
    notes = [f"{files.folder}: {len(names)} tensors not used: {why}" for why, names in ignored.items()]
    files.notes += [note for note in notes if note not in files.notes]


def _problems(kinds: Mapping[str, list[str]], most: int = 8) -> str:
    """Tell the problems of each kind, the first few by name."""
    told = []
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - most} more" if len(names) > most else ""
            told.append(f"{len(names)} {kind}: {', '.join(names[:most])}{more}")
    return "; ".join(told)
