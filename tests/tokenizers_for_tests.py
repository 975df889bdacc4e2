"""Tiny tokenizers in Hugging Face layout, built by hand so that tests can name every id.

`make_tokenizer` writes the fixture TOK of the public fault cases: byte-level BPE of 500 ids.  Ids 0..255 are the
single bytes in the order of their byte-level letters, so an emoji is four ids; then pieces of two to four letters;
the last five are added tokens.  `make_sentencepiece_tokenizer` writes one whose spaces are U+2581 and whose unknown
characters fall back to byte pieces, as Llama 2 and Mixtral have.  Nothing is trained and nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
_ADDED = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|end|>")
_SIZE = 500
_PIECES = """
    AB CD EF GH IJ KL MN OP QR ST UV WX YZ th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se
    ha as ou io le ve co me de hi ri ro ic ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct
    us ac ot il tr ly nc et ut ss so rs un lo wa ge ie wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir
    su id os iv ia am fi ci vi pl ig tu ev ld ry mp fe bl ab gh ty op wo sa ay ex ke fr oo av ag if ap gr od bo sp rd
    the ing and ion ent for tio ati ter hat tha ere ate his con res ver all ons nce men ith ted ers pro thi wit are
    tion that ther with ment ions this here from ould ting hich whic ctio ence have othe ight sion ever ical they
""".split()  # noqa: SIM905 - a list of 190 literals is no easier to read


def make_tokenizer(folder: Path, *, bos: bool = False, pad: bool = True, chat_template: bool | str | list[Any] = True,
                   eos_id: int | None = None, add_bos_token: bool | None = None,
                   special: tuple[str, ...] = _ADDED) -> Path:
    """Write TOK into `folder` (made if need be) and return `folder`.

    `bos`: declare <|bos|> (id 495), put it before every text, and let the template write it too.  `pad`: declare
    <|pad|>.  `chat_template`: True for a simple one, False for none, or the value for tokenizer_config.json.
    `eos_id`: which id is eos_token (default 496, <|eos|>).  `add_bos_token`: written to tokenizer_config.json unless
    None.  `special`: which of the five added tokens are special.
    """
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = _merge(vocab, _SIZE - len(_ADDED))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text in special, normalized=False) for text in _ADDED])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 100000}
    settings["eos_token"] = "<|eos|>" if eos_id is None else tokenizer.id_to_token(eos_id)
    if pad:
        settings["pad_token"] = "<|pad|>"
    if bos:
        settings["bos_token"] = "<|bos|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    if add_bos_token is not None:
        settings["add_bos_token"] = add_bos_token
    if chat_template is True:
        settings["chat_template"] = ("{{ bos_token }}" if bos else "") + TEMPLATE
    elif chat_template:
        settings["chat_template"] = chat_template
    return _write(folder, tokenizer, settings)


def make_sentencepiece_tokenizer(folder: Path, *, metaspace: bool = False) -> Path:
    """Write a tokenizer of the Llama 2 kind: <s> 1, </s> 2, byte pieces from 3 on, U+2581 for a space.

    `metaspace`: spell the spaces with the Metaspace pair instead of replacing decoders.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in "\u2581abcdefghijklmnopqrstuvwxyz.,!":
        vocab[letter] = len(vocab)
    pairs = ("\u2581 t", "\u2581t h", "\u2581th e", "i n", "a n", "\u2581 \u2581", "\u2581 a", "o n", "\u2581a n")
    merges = [(first, second) for first, second in (pair.split(" ") for pair in pairs)]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return _write(folder, tokenizer, settings)


def _merge(vocab: dict[str, int], size: int) -> list[tuple[str, str]]:
    """Grow `vocab` to `size` with `_PIECES`, alone and after a space; return the merges that make them."""
    merges: list[tuple[str, str]] = []
    for piece in (*_PIECES, *("\u0120" + piece for piece in _PIECES)):
        if len(vocab) == size:
            return merges
        if len(piece) == 2:
            parts = (piece[0], piece[1])
        else:
            parts = next(((piece[:k], piece[k:]) for k in range(1, len(piece))
                          if piece[:k] in vocab and piece[k:] in vocab), None)
        if parts is not None and piece not in vocab:
            merges.append(parts)
            vocab[piece] = len(vocab)
    raise AssertionError(f"only {len(vocab)} pieces, {size} wanted")


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
