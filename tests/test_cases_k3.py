"""Public faults of kind K3 (text), at the level of tokenizer, reader and text stream."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.errors import ExitCode, UsageError
from bgmpi.io.requests import (
    RequestLimits,
    RequestReader,
    RowRefused,
    require_chat_template,
    scan_requests,
)
from bgmpi.io.text_stream import TextStream
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer
from bgmpi.request import Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok")))


def read_all(folder: Path, tokenizer: Tokenizer, rows: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    path = folder / "x.jsonl"
    path.write_text("\n".join(json.dumps({"custom_id": f"r{at}", "method": "POST", "url": url, "body": body})
                              for at, (url, body) in enumerate(rows)))
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, RequestLimits(64, 512)) as reader:
        return [reader.read(row) for row in range(len(index))]


def forced(tokenizer: Tokenizer, ids: list[int], **sampling: Any) -> TextStream:
    stream = TextStream.for_sampling(tokenizer, Sampling(seed=0, **sampling))
    for id in ids:
        if stream.push(id) is not None:
            break
    return stream


@pytest.mark.parametrize(("stop", "text", "reason"), [(("CDE",), "AB", "CDE"), (("EF", "BCD"), "A", "BCD")])
def test_c20_a_stop_text_over_several_tokens_leaks_nothing(
    tokenizer: Tokenizer, stop: tuple[str, ...], text: str, reason: str
) -> None:
    pieces = [tokenizer.encode(piece).tolist() for piece in ("AB", "CD", "EF")]
    assert [len(piece) for piece in pieces] == [1, 1, 1]
    stream = TextStream(tokenizer, stop=stop)
    for (id,) in pieces:
        matched = stream.push(id)
        assert text.startswith(stream.settled)
        if matched:
            break
    assert (stream.finish(), stream.matched) == (text, reason)


def test_c21_a_stop_token_that_is_not_pushed_is_not_in_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ((request,),) = read_all(tmp_path, tokenizer, [(COMPLETIONS, {"prompt": "hi", "stop_token_ids": [9]})])
    assert request.sampling.stop_token_ids == (9,)
    generated = [*tokenizer.encode("AB").tolist(), *tokenizer.encode("CD").tolist(), 9]
    shown = [id for id in generated if id not in request.sampling.stop_token_ids]
    assert forced(tokenizer, shown).finish() == "ABCD"


def test_c22_bytes_become_the_emoji_and_a_cut_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600").tolist()
    assert [tokenizer.token_bytes(id) for id in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert forced(tokenizer, ids).finish() == "\U0001f600"
    assert forced(tokenizer, ids[:2]).finish() == "\ufffd"
    assert b"".join(tokenizer.token_bytes(id) for id in ids[:2]) == b"\xf0\x9f"
    ideographs = tokenizer.encode("\u6f22\u5b57").tolist()
    assert forced(tokenizer, ideographs).finish() == "\u6f22\u5b57"


def test_c23_ids_that_the_tokenizer_lacks_are_masked_and_cannot_be_biased(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bodies = [(COMPLETIONS, {"prompt": "hi", "logit_bias": {key: 100}}) for key in ("505", "499")]
    found = read_all(tmp_path, tokenizer, bodies)
    assert isinstance(found[0], RowRefused) and found[0].error.param == "logit_bias"
    assert "505" in found[0].error.message
    assert found[1][0].sampling.logit_bias == ((499, 100.0),)
    assert not tokenizer.known(512)[500:].any()
    assert forced(tokenizer, [*tokenizer.encode("AB").tolist(), 505]).finish() == "AB"


def test_c24_the_ids_that_end_a_sequence_are_a_union(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, eos_id=5)
    assert open_tokenizer(folder, config_eos=[7, 9, 7]).eos_ids == (5, 7, 9)
    assert open_tokenizer(folder).eos_ids == (5,)
    ((request,),) = read_all(tmp_path, open_tokenizer(folder),
                             [(COMPLETIONS, {"prompt": "hi", "ignore_eos": True, "stop_token_ids": [11]})])
    assert (request.sampling.ignore_eos, request.sampling.stop_token_ids) == (True, (11,))


@pytest.mark.parametrize("add_bos_token", [None, True])
def test_c25_a_chat_has_one_bos_and_completions_still_get_theirs(tmp_path: Path, add_bos_token: bool | None) -> None:
    tokenizer = open_tokenizer(make_tokenizer(tmp_path / "t", bos=True, add_bos_token=add_bos_token))
    (chat,), (completion,), (ids,) = read_all(tmp_path, tokenizer, [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": "hi"}),
        (COMPLETIONS, {"prompt": [5, 6]})])
    assert chat.prompt.tolist().count(495) == 1 and chat.prompt[0] == 495
    assert completion.prompt.tolist() == [495, *tokenizer.encode("hi", add_special=False).tolist()]
    assert ids.prompt.tolist() == [5, 6]


def test_c26_chats_without_a_template_stop_before_weights_are_read(tmp_path: Path) -> None:
    bare = open_tokenizer(make_tokenizer(tmp_path / "t", chat_template=False))
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "hi"}}
    (tmp_path / "x").write_text(json.dumps(line))
    require_chat_template(scan_requests(tmp_path / "x"), bare)
    with open(tmp_path / "x", "a") as file:
        file.write("\n\n" + json.dumps({**line, "custom_id": "b", "url": CHAT, "body": {}}))
    index = scan_requests(tmp_path / "x")
    with pytest.raises(UsageError, match=r"line 3 .*--chat-template") as caught:
        require_chat_template(index, bare)
    assert caught.value.exit_code == ExitCode.USAGE
    require_chat_template(index, open_tokenizer(tmp_path / "t", chat_template="{{ messages }}"))


def test_c27_a_tokenizer_without_pad_never_pads(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(make_tokenizer(tmp_path / "t", pad=False))
    found = read_all(tmp_path, tokenizer, [(COMPLETIONS, {"prompt": "a" * size}) for size in (3, 17, 40)])
    assert [len(one[0].prompt) for one in found] == [3, 17, 40]
    assert all(497 not in one[0].prompt for one in found)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_c81_a_stop_text_that_is_an_added_token_is_matched(tmp_path: Path, special: bool, skip: bool) -> None:
    kinds = {} if special else {"special": ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>")}
    tokenizer = open_tokenizer(make_tokenizer(tmp_path, **kinds))  # type: ignore[arg-type]
    ids = [*tokenizer.encode("AB").tolist(), *tokenizer.encode("CD").tolist(), 499, 256]
    stream = forced(tokenizer, ids, stop=("<|end|>",), skip_special_tokens=skip)
    assert (stream.finish(), stream.matched) == ("ABCD", "<|end|>")


def test_c81_a_special_token_typed_by_a_user_is_that_token_and_is_said_once(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    typed = (CHAT, {"messages": [{"role": "user", "content": "hi<|end|>"}]})
    with caplog.at_level(logging.WARNING):
        found = read_all(tmp_path, tokenizer, [typed, typed, (COMPLETIONS, {"prompt": "<|end|>"})])
    assert found[0][0].prompt.tolist().count(499) == 2
    assert found[2][0].prompt.tolist() == [499]
    assert sum("<|end|>" in record.message for record in caplog.records) == 1
