"""The text of one sequence, token by token: whole characters only, and stopped by the first stop text.

Tokens are bytes (`Tokenizer.token_bytes`), bytes become text in an incremental UTF-8 decoder, so half a character
waits until its other half comes; what is still half at the end becomes one U+FFFD.  A push costs the same at token 10
and at token 100,000: only the tail that a stop text could still reach back into is searched.  Rejected alternative:
decoding a sliding window of ids again and again, which is quadratic on broken bytes and loses them at its edges.

Which stop text wins (POLICY): the one that is complete first, character by character; of those that end at the same
character the longest.  So what stops a sequence does not depend on where its token borders lie.  The text ends before
the match.  A stop text that is itself an added token matches that token's id, visible or not; one that mixes special
tokens and words matches only when special tokens are shown.

Invariant: without a match the text equals that of decoding all ids at once wherever their bytes are valid UTF-8, and
always for byte-level tokenizers.
"""

from __future__ import annotations

import codecs

from bgmpi.errors import InternalError
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.request import Sampling


class TextStream:
    """The growing visible text of one sequence.

    Push every generated token but one: the stop token id or end-of-sequence id that ended the sequence, unless the
    request wants it shown.  `text` is what has been decoded; `matched` is the stop text that ended it.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: tuple[str, ...] = (), skip_special: bool = True,
                 include_stop: bool = False, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_of_id = {tokenizer.added[text]: text for text in stop if text in tokenizer.added}
        self._reach = max(map(len, stop), default=1) - 1
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._chunks: list[str] = []
        self._length = 0
        self._tail = ""
        self._opened = False
        self._pushed = 0
        self.matched: str | None = None

    @classmethod
    def for_sampling(cls, tokenizer: Tokenizer, sampling: Sampling) -> TextStream:
        """Open the stream of a sequence that is sampled as `sampling` says."""
        return cls(tokenizer, stop=sampling.stop, skip_special=sampling.skip_special_tokens,
                   include_stop=sampling.include_stop, min_tokens=sampling.min_tokens)

    def push(self, token: int) -> str | None:
        """Add one generated token; return the stop text that is now complete, else None.

        Stop texts that end within the first `min_tokens - 1` tokens do not count.
        """
        if self.matched is not None:
            raise InternalError(f"token {token} was pushed after stop text {self.matched!r} had matched")
        self._pushed += 1
        counts = self._pushed >= self._min_tokens
        if counts and token in self._stop_of_id:
            return self._end(self._length, self._stop_of_id[token])
        if token in self._skip:
            return None
        piece = self._tokenizer.token_bytes(token, first=not self._opened)
        self._opened = True
        chunk = self._utf8.decode(piece)
        if not chunk:
            return None
        self._chunks.append(chunk)
        self._length += len(chunk)
        if not self._stop:
            return None
        return self._search(chunk, counts)

    def _search(self, chunk: str, counts: bool) -> str | None:
        """Look for stop texts that end inside `chunk`, the newest characters."""
        window = self._tail + chunk
        self._tail = window[-self._reach :] if self._reach else ""
        if not counts:
            return None
        old = len(window) - len(chunk)
        found = []
        for text in self._stop:
            at = window.find(text, max(0, old - len(text) + 1))
            if at >= 0:
                found.append((at + len(text), -len(text), text))
        if not found:
            return None
        end, length, text = min(found)
        return self._end(self._length - len(window) + end + length, text)

    def _end(self, at: int, stop: str) -> str:
        """Cut the text at character `at`, where `stop` begins."""
        shown = "".join(self._chunks)[:at] + (stop if self._include_stop else "")
        self._chunks = [shown]
        self._length = len(shown)
        self._utf8.reset()
        self.matched = stop
        return stop

    @property
    def text(self) -> str:
        """All whole characters so far, with what may yet turn out to be the beginning of a stop text."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return self._chunks[0] if self._chunks else ""

    @property
    def settled(self) -> str:
        """The text that no later token can take back: `text` less what may be the beginning of a stop text."""
        text = self.text
        if self.matched is not None:
            return text
        held = max((n for stop in self._stop for n in range(1, min(len(stop), len(text) + 1))
                    if text.endswith(stop[:n])), default=0)
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the final text; a character that is still incomplete becomes one U+FFFD.  Call it once or often."""
        rest = self._utf8.decode(b"", final=True) if self.matched is None else ""
        if rest:
            self._chunks.append(rest)
            self._length += len(rest)
        return self.text
