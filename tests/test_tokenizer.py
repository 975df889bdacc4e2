"""Laws of io/tokenizer.py, io/chat_template.py and io/text_stream.py; transformers is the oracle where it has a say."""

from __future__ import annotations

import json
import random
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import make_sentencepiece_tokenizer, make_tokenizer

from bgmpi.errors import InputError, InternalError, MissingError, UsageError
from bgmpi.io.chat_template import ChatRefused
from bgmpi.io.text_stream import TextStream
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer

HI = [{"role": "user", "content": "hi"}]


@cache
def shared(kind: str) -> Tokenizer:
    folder = Path(mkdtemp())
    if kind == "bytes":
        return open_tokenizer(make_tokenizer(folder))
    return open_tokenizer(make_sentencepiece_tokenizer(folder, metaspace=kind == "metaspace"))


def stream_of(tokenizer: Tokenizer, ids: list[int], **kinds: Any) -> TextStream:
    stream = TextStream(tokenizer, **kinds)
    for id in ids:
        if stream.push(id) is not None:
            break
    return stream


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 499), max_size=40), st.booleans())
def test_streamed_text_equals_decoding_all_ids_at_once(ids: list[int], skip: bool) -> None:
    tokenizer = shared("bytes")
    stream = TextStream(tokenizer, skip_special=skip)
    seen = ""
    for id in ids:
        stream.push(id)
        assert stream.text.startswith(seen)
        seen = stream.text
    assert stream.finish() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["replace", "metaspace"])
def test_streamed_text_equals_decoding_at_once_where_spaces_are_pieces(kind: str) -> None:
    tokenizer, draw = shared(kind), random.Random(5)
    plain = [1, 2, *range(3 + 0x20, 3 + 0x7F), *range(259, tokenizer.size)]
    for _ in range(300):
        ids = [draw.choice(plain) for _ in range(draw.randrange(12))]
        assert stream_of(tokenizer, ids).finish() == tokenizer.decode(ids)
    for text in ("the man in a tin", "caf\u00e9 \U0001f600 on", " a  the"):
        ids = tokenizer.encode(text).tolist()
        assert stream_of(tokenizer, ids).finish() == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.text("abAB", min_size=1, max_size=30), st.lists(st.text("abAB", min_size=1, max_size=4), min_size=1,
       max_size=4), st.randoms(use_true_random=False))
def test_what_stops_a_text_does_not_depend_on_its_token_borders(text: str, stop: list[str], draw: Any) -> None:
    tokenizer = shared("bytes")
    letters = {c: tokenizer.encode(c, False).tolist() for c in "abAB"}
    pairs = {c: tokenizer.encode(c, False).tolist() for c in ("ab", "AB")}
    ids, at = [], 0
    while at < len(text):
        pair = text[at : at + 2]
        take = 2 if pair in pairs and len(pairs[pair]) == 1 and draw.random() < 0.5 else 1
        ids += pairs[pair] if take == 2 else letters[text[at]]
        at += take
    by_letter = stream_of(tokenizer, [letters[c][0] for c in text], stop=tuple(stop))
    by_pieces = stream_of(tokenizer, ids, stop=tuple(stop))
    assert (by_letter.matched, by_letter.finish()) == (by_pieces.matched, by_pieces.finish())
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        assert by_pieces.finish() == text
    else:
        end, length, matched = min(ends)
        assert (by_pieces.matched, by_pieces.finish()) == (matched, text[: end + length])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(32, 126), max_size=30), st.lists(st.text("ab!", min_size=1, max_size=5), max_size=3))
def test_settled_text_is_never_taken_back(ids: list[int], stop: list[str]) -> None:
    stream, settled = TextStream(shared("bytes"), stop=tuple(stop)), ""
    for id in ids:
        matched = stream.push(id)
        assert stream.settled.startswith(settled)
        settled = stream.settled
        if matched:
            break
    assert stream.finish().startswith(settled)


def test_half_a_character_waits_and_becomes_one_replacement_at_the_end() -> None:
    tokenizer = shared("bytes")
    emoji = tokenizer.encode("\U0001f600", False).tolist()
    stream = TextStream(tokenizer)
    for id in emoji[:3]:
        stream.push(id)
        assert stream.text == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == "\ufffd"


def test_the_stop_text_is_kept_when_it_is_asked_for() -> None:
    tokenizer = shared("bytes")
    ids = tokenizer.encode("ABCDEFGH", False).tolist()
    assert stream_of(tokenizer, ids, stop=("CDE",), include_stop=True).finish() == "ABCDE"


def test_stop_texts_do_not_count_before_min_tokens() -> None:
    tokenizer = shared("bytes")
    ids = tokenizer.encode("ABCDABCDEF", False).tolist()
    stream = stream_of(tokenizer, ids, stop=("CD",), min_tokens=3)
    assert (stream.matched, stream.finish()) == ("CD", "ABCDAB")


def test_a_token_after_a_match_is_a_fault() -> None:
    tokenizer = shared("bytes")
    stream = stream_of(tokenizer, tokenizer.encode("AB", False).tolist(), stop=("AB",))
    with pytest.raises(InternalError, match="after stop text"):
        stream.push(0)


def test_a_long_text_costs_the_same_at_its_end_as_at_its_start() -> None:
    stream = TextStream(shared("bytes"), stop=("never",))
    for _ in range(20000):
        stream.push(172)
    assert len(stream._tail) == 4


@pytest.mark.parametrize("variant", [{}, {"bos": True}, {"bos": True, "add_bos_token": False},
                                     {"bos": True, "add_bos_token": True}, {"pad": False}])
def test_ids_equal_those_of_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    ours = open_tokenizer(make_tokenizer(tmp_path, **variant))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "hi", "the man\n\n that \U0001f600", "a<|end|>b", "ABCDEF  "):
        assert ours.encode(text).tolist() == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    for messages in (HI, [{"role": "system", "content": "be good", "name": None}, *HI]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        ids = expected if isinstance(expected, list) else expected["input_ids"]
        assert ours.apply_chat_template(messages).tolist() == ids


@pytest.mark.parametrize("metaspace", [False, True])
def test_ids_of_a_sentencepiece_kind_equal_those_of_transformers(tmp_path: Path, metaspace: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = open_tokenizer(make_sentencepiece_tokenizer(tmp_path, metaspace=metaspace))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "the man", " x", "\U0001f600."):
        assert ours.encode(text).tolist() == theirs(text).input_ids


def test_a_bos_that_only_the_config_asks_for_is_written_once(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, bos=True, add_bos_token=True)
    with_processor = open_tokenizer(folder).encode("hi").tolist()
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(state))
    without = open_tokenizer(folder)
    assert without.encode("hi").tolist() == with_processor == [495, *without.encode("hi", add_special=False).tolist()]


def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- for m in messages %}\n  {%- if m.role == 'skip' %}\n    {%- continue %}\n  {%- endif %}\n"
        "{% generation %}{{ m.role }}: {{ m.content | trim }}{% endgeneration %}\n{% endfor %}\n"
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
        "{% if add_generation_prompt %}a:{{ flag }}{{ eos_token }}{% endif %}"
    )
    ours = open_tokenizer(make_tokenizer(tmp_path, chat_template=template))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f<\u00e9>", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": " x "}, {"role": "skip", "content": ""}]
    rendered = ours.render_chat(messages, tools=tools, variables={"flag": 7})
    assert rendered == theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False,
                                                  flag=7)


def test_the_time_a_template_prints_is_one_for_the_whole_job(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    assert open_tokenizer(folder, now=datetime(2026, 3, 1)).render_chat(HI) == "01 Mar 2026"


def test_a_template_that_raises_refuses_the_chat_and_nothing_else(tmp_path: Path) -> None:
    for at, template in enumerate(("{{ raise_exception('no system role') }}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}",
                                   "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")):
        tokenizer = open_tokenizer(make_tokenizer(tmp_path / str(at), chat_template=template))
        with pytest.raises(ChatRefused, match="no system role" if at == 0 else "."):
            tokenizer.render_chat(HI)


def test_templates_are_found_in_all_places_and_a_named_one_serves_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    listed = open_tokenizer(make_tokenizer(tmp_path / "a", chat_template=named))
    assert (listed.render_chat(HI), listed.render_chat(HI, tools=[{}])) == ("D", "T")
    folder = make_tokenizer(tmp_path / "b")
    (folder / "chat_template.jinja").write_text("J")
    assert open_tokenizer(folder).render_chat(HI) == "J"
    (tmp_path / "mine.jinja").write_text("M")
    assert open_tokenizer(folder, chat_template=tmp_path / "mine.jinja").render_chat(HI) == "M"
    assert open_tokenizer(folder, chat_template="{{ 6 * 7 }}").render_chat(HI) == "42"
    bare = open_tokenizer(make_tokenizer(tmp_path / "c", chat_template=False))
    assert not bare.has_chat_template
    with pytest.raises(UsageError, match="--chat-template"):
        bare.render_chat(HI)
    with pytest.raises(MissingError, match="nowhere"):
        open_tokenizer(folder, chat_template=tmp_path / "nowhere.jinja")
    with pytest.raises(InputError, match="not valid jinja"):
        open_tokenizer(folder, chat_template="{% if %}")


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 497,
                        "pad_type_id": 0, "pad_token": "<|pad|>"}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert len(open_tokenizer(folder).encode("ABCDEF")) == 3
    assert len(open_tokenizer(folder).encode("A")) == 1


def test_ids_without_a_token_are_known_as_such(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    assert tokenizer.size == 500
    assert np.flatnonzero(~tokenizer.known(512)).tolist() == list(range(500, 512))
    assert tokenizer.known(100).all()
    assert tokenizer.token_bytes(505) == b""


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    folder = make_tokenizer(tmp_path)
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert open_tokenizer(folder).hash == digest == open_tokenizer(folder / "tokenizer.json").hash


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="--tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(MissingError, match="no such file or folder"):
        open_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        open_tokenizer(tmp_path)


def test_another_kind_of_vocabulary_is_refused_clearly_when_it_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match=r"no tokenizer\.json, only tiktoken\.model"):
        open_tokenizer(tmp_path)


def test_another_kind_of_vocabulary_is_converted_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "a")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    other = tmp_path / "b"
    other.mkdir()
    (other / "vocab.json").write_text(json.dumps(model["vocab"] | {"<|endoftext|>": 495}))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (other / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (other / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    text = "the ABCDEF that"
    assert open_tokenizer(other).encode(text).tolist() == open_tokenizer(folder).encode(text).tolist()
