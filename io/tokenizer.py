"""The tokenizer of a checkpoint folder: text to ids, ids to text, and the facts others need about its ids.

Everything stands on the `tokenizers` library and the folder's tokenizer.json, because that is what checkpoints ship
and it needs no Python class per family.  Other vocabularies (tokenizer.model, tiktoken) are converted once by
transformers when it is installed; the result is again a `tokenizers` object, so one path serves all.  Python code
that lies in a checkpoint folder is never run.

It follows transformers where users compare: tokenizer.json says what stands around a text, a rendered chat gets no
further BOS, ids without a token decode to nothing.  One thing is added: where tokenizer_config.json has `add_bos_token`
true and tokenizer.json writes none (DeepSeek), the BOS is put there, for the model was trained with it.  Padding and
truncation that a tokenizer.json may carry are switched off: they would be hidden caps.

It knows nothing of requests or models; the ids of end-of-sequence in config.json come from the caller.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from bgmpi.errors import InputError, MissingError, UsageError
from bgmpi.io.chat_template import ChatTemplate, find_templates

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_KINDS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One tokenizer with its chat template; made by `open_tokenizer`, read-only afterwards.

    `size` is one more than the largest id that has a token.  `eos_ids` are all ids that end a sequence, ascending.
    `special_ids` are the ids left out of visible text.  `added` maps the content of each added token to its id.
    `hash` is the sha256 of tokenizer.json, in hex.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], *, hash: str,
                 chat_template: ChatTemplate | None = None, config_eos: Iterable[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named = {name: content for name in _NAMED_TOKENS if (content := _content(settings.get(name))) is not None}
        listed = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        unlisted = [c for c in self.named.values() if c not in listed and backend.token_to_id(c) is not None]
        if unlisted:
            backend.add_special_tokens(unlisted)
        added = backend.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._ids = np.unique(np.fromiter(backend.get_vocab(with_added_tokens=True).values(), np.int64))
        self.size = int(self._ids[-1]) + 1 if len(self._ids) else 0
        eos = self._id_of("eos_token")
        self.eos_ids = tuple(sorted({*config_eos, *(() if eos is None else (eos,))}))
        self._bos = self._id_of("bos_token") if settings.get("add_bos_token") else None
        self._template = chat_template
        self.hash = hash
        self._bytes: dict[int, bytes] = {}

    def _id_of(self, name: str) -> int | None:
        return self._backend.token_to_id(self.named[name]) if name in self.named else None

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    @property
    def chat_template_text(self) -> str | None:
        """The default template's source, for the output's provenance."""
        return None if self._template is None else self._template.text

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the content of any special token inside a user's text; None when there is no special token."""
        contents = sorted((c for c, id in self.added.items() if id in self.special_ids and c), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    @cached_property
    def most_bytes_a_token(self) -> int | None:
        """The most UTF-8 bytes of a user's text that one token can stand for; None where there is no such bound.

        Only byte-level pieces give one: an unknown token or one that eats spaces beside it may swallow any length.
        """
        added = self._backend.get_added_tokens_decoder().values()
        if self._byte_level is None or any(token.lstrip or token.rstrip for token in added):
            return None
        kind = _state(self._backend.normalizer).get("type")
        shrinks = 1 if kind is None else 4 if kind == "NFC" else None
        longest = max(len(piece.encode()) for piece in self._backend.get_vocab(with_added_tokens=True))
        return None if shrinks is None else shrinks * longest

    def known(self, vocab: int) -> NDArray[np.bool_]:
        """Return which ids of a model's vocabulary have a token, bool [vocab]; the others must never be sampled."""
        mask = np.zeros(vocab, bool)
        mask[self._ids[self._ids < vocab]] = True
        return mask

    def encode(self, text: str, add_special: bool = True) -> NDArray[np.int32]:
        """Return the ids of `text`, int32 [tokens], with the BOS the tokenizer asks for if `add_special`."""
        ids = self._backend.encode(text, add_special_tokens=add_special).ids
        if add_special and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]], skip_special: bool = True) -> str:
        """Return the text of `ids` as the library decodes them at once; ids without a token are skipped."""
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None,
                    documents: Sequence[Any] | None = None, add_generation_prompt: bool = True,
                    variables: Mapping[str, Any] | None = None) -> str:
        """Return the chat as one text; raise UsageError without a template, ChatRefused when the template refuses."""
        if self._template is None:
            raise UsageError("this tokenizer has no chat template; name one with --chat-template FILE")
        names = {**self.named, **(variables or {})}
        return self._template.render(messages, tools, documents, add_generation_prompt, names)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kinds: Any) -> NDArray[np.int32]:
        """Return the ids of a rendered chat, int32 [tokens]; arguments of `render_chat`.

        The template writes every special token itself, so none is added here (two BOS would shift every position).
        """
        return self.encode(self.render_chat(messages, **kinds), add_special=False)

    @cached_property
    def _byte_level(self) -> dict[str, int] | None:
        """The byte each character of a byte-level piece stands for; None for every other kind of decoder."""
        state = _state(self._backend.decoder)
        kinds = [part["type"] for part in state.get("decoders", [state]) if "type" in part]
        return _byte_of_character() if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"} else None

    @cached_property
    def _byte_fallback(self) -> bool:
        return "ByteFallback" in json.dumps(_state(self._backend.decoder))

    @cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """A plain word that stands before a piece, so that the piece decodes as inside a text; and its length."""
        for id in self._ids.tolist():
            text = self._backend.decode([id])
            if id not in self.special_ids and text.isascii() and text.isalpha():
                return [id], len(text)
        return [], 0

    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        """Return the UTF-8 bytes that token `id` adds to a text, maybe only a part of a character.

        `first`: the token opens the text, where some decoders drop one leading space.
        """
        if not first or self._byte_level is not None:
            known = self._bytes.get(id)
            if known is None:
                known = self._bytes[id] = self._find_bytes(id)
            return known
        found = self._find_bytes(id)
        return self._backend.decode([id], skip_special_tokens=False).encode() if found.startswith(b" ") else found

    def _find_bytes(self, id: int) -> bytes:
        piece = self._backend.id_to_token(id)
        if piece is None:
            return b""
        byte_of = self._byte_level
        if byte_of is not None:
            return bytes(byte_of[c] for c in piece) if all(c in byte_of for c in piece) else piece.encode()
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        anchor, length = self._anchor
        return self._backend.decode([*anchor, id], skip_special_tokens=False)[length:].encode()


def open_tokenizer(folder: Path, *, chat_template: Path | str | None = None, config_eos: Iterable[int] = (),
                   now: datetime | None = None) -> Tokenizer:
    """Open the tokenizer of `folder` (or the tokenizer.json file itself).

    `chat_template`: a file, or the text of a jinja template, that replaces the folder's.  `config_eos`: the ids that
    config.json and generation_config.json name.  `now`: the time that templates may print (default: the clock).
    Raise MissingError, InputError, or UsageError saying what to install or name.
    """
    folder = Path(folder)
    file = folder if folder.is_file() else folder / "tokenizer.json"
    settings = _read_settings(file.parent)
    if file.is_file():
        text = _read_text(file)
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise InputError(f"{file}: not a tokenizer.json that this tokenizers version reads: {error}") from error
    else:
        backend = _convert(folder)
        text = backend.to_str()
    templates = find_templates(file.parent, settings, chat_template)
    template = ChatTemplate(templates, now=now) if templates else None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Tokenizer(backend, settings, hash=digest, chat_template=template, config_eos=config_eos)


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers turn another kind of vocabulary into a `tokenizers` object."""
    if not folder.is_dir():
        raise MissingError(f"tokenizer {folder}: no such file or folder; name one with --tokenizer DIR")
    others = [name for name in _OTHER_KINDS if (folder / name).is_file()]
    if not others:
        raise MissingError(f"{folder}: no tokenizer.json and no {' or '.join(_OTHER_KINDS)}; name --tokenizer DIR")
    advice = f"{folder} has no tokenizer.json, only {', '.join(others)}"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(f"{advice}: install transformers to convert it, or put a tokenizer.json beside it") from error
    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # conversion fails in as many ways as there are vocabularies
        raise UsageError(f"{advice}, which transformers could not convert: {error}; "
                         f"make a tokenizer.json and put it there") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UsageError(f"{advice}, which transformers reads only with Python code; make a tokenizer.json of it")
    return backend


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return special_tokens_map.json overlaid by tokenizer_config.json, {} without either."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            try:
                found = json.loads(_read_text(folder / name))
            except ValueError as error:
                raise InputError(f"{folder / name}: not JSON: {error}") from error
            if not isinstance(found, dict):
                raise InputError(f"{folder / name}: expected a JSON object, got {type(found).__name__}")
            settings.update({key: value for key, value in found.items() if value is not None})
    return settings


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error


def _content(token: Any) -> str | None:
    """Return the text of a token that a config spells as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _state(part: Any) -> dict[str, Any]:
    """Return how a decoder or normalizer is spelled in tokenizer.json, {} for None; never the vocabulary."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each of the 256 letters of the byte-level alphabet stands for.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on in order (the GPT-2 table).
    """
    alphabet = ByteLevel.alphabet()
    plain = {c: ord(c) for c in alphabet if ord(c) < 256}
    rest = sorted(c for c in alphabet if ord(c) >= 256)
    return plain | dict(zip(rest, sorted(set(range(256)) - set(plain.values())), strict=True))
