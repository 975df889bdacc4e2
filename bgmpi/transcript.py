"""What the live sequences of a rank have said so far, and the answers they become.

Beside the arrays of the sequence manager a live sequence has a few things that only some rows ask for: its request, a
text stream when it has stop texts, pieces of log-probabilities.  An object exists only while its sequence is live, and
only rows that ask for such things cost Python time in a step.

A transcript survives a yield: positions that are computed again are not recorded twice.  It also survives a move to
another rank (MIGRATE): `pack` makes typed data of it that crosses ranks, `unpack` goes on where it stood.  A text
stream does not travel: the generated tokens do, for the sequence needs them anyway, and pushing them again gives the
same stream.  Rejected: spelling the decoder's inner state, half characters and reach of stop texts, as data.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError, RowError
from bgmpi.io.text_stream import TextStream
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.request import Answer, Begun, Finish, Logprobs, Request

NAN = float("nan")


@dataclass(slots=True)
class Pieces:
    """Log-probabilities as they come, a few tokens at a time."""

    width: int
    chosen: list[NDArray[np.float32]] = field(default_factory=list)
    top_ids: list[NDArray[np.int32]] = field(default_factory=list)
    top: list[NDArray[np.float32]] = field(default_factory=list)
    count: int = 0

    def add(self, chosen: NDArray[np.float32], ids: NDArray[np.int32], top: NDArray[np.float32]) -> None:
        """Append m tokens: chosen [m], ids and top [m, at least width]."""
        self.chosen.append(chosen)
        self.top_ids.append(ids[:, : self.width])
        self.top.append(top[:, : self.width])
        self.count += len(chosen)

    def joined(self) -> Logprobs:
        """Return all of them."""
        if not self.count:
            empty = np.empty((0, self.width))
            return Logprobs(np.empty(0, np.float32), empty.astype(np.int32), empty.astype(np.float32))
        return Logprobs(np.concatenate(self.chosen), np.concatenate(self.top_ids), np.concatenate(self.top))

    @classmethod
    def of(cls, width: int, so_far: Logprobs) -> Pieces:
        """Return pieces that go on behind `so_far`."""
        pieces = cls(width)
        if len(so_far.chosen):
            pieces.add(so_far.chosen, so_far.top_ids, so_far.top)
        return pieces


@dataclass(slots=True)
class Transcript:
    """One live sequence: its request, its sample number, and what only some rows ask for."""

    request: Request
    sample: int
    queued_s: float
    default_cap: bool
    stream: TextStream | None = None
    logprobs: Pieces | None = None
    prompt_logprobs: Pieces | None = None
    first_token_s: float = NAN
    stop_reason: str | int | None = None


def open_transcript(request: Request, sample: int, queued_s: float, tokenizer: Tokenizer) -> Transcript:
    """Begin the transcript of one sample of a request."""
    asks = request.sampling
    transcript = Transcript(request, sample, queued_s, asks.max_tokens is None)
    if asks.stop:
        transcript.stream = TextStream.for_sampling(tokenizer, asks)
    if asks.logprobs is not None:
        transcript.logprobs = Pieces(asks.logprobs)
    if asks.prompt_logprobs is not None:
        pieces = Pieces(asks.prompt_logprobs)
        width = (1, asks.prompt_logprobs)
        pieces.add(np.full(1, NAN, np.float32), np.full(width, -1, np.int32), np.full(width, NAN, np.float32))
        transcript.prompt_logprobs = pieces
    return transcript


class TranscriptParcel(msgspec.Struct, frozen=True, eq=False):
    """A transcript on its way to another rank: what `world.encode` and `decode` carry, arrays included.

    The fields are those of `Transcript`; log-probabilities are joined, None where the request asks for none.
    """

    request: Request
    sample: int
    queued_s: float
    default_cap: bool
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    first_token_s: float
    stop_reason: str | int | None


def pack(transcript: Transcript) -> TranscriptParcel:
    """Return the transcript of a live sequence as typed data; the transcript itself is left as it is."""
    return TranscriptParcel(
        request=transcript.request,
        sample=transcript.sample,
        queued_s=transcript.queued_s,
        default_cap=transcript.default_cap,
        logprobs=transcript.logprobs.joined() if transcript.logprobs is not None else None,
        prompt_logprobs=transcript.prompt_logprobs.joined() if transcript.prompt_logprobs is not None else None,
        first_token_s=transcript.first_token_s,
        stop_reason=transcript.stop_reason,
    )


def unpack(parcel: TranscriptParcel, tokenizer: Tokenizer, generated: NDArray[np.int32]) -> Transcript:
    """Return the transcript that `parcel` was packed from.

    generated: int32 [n], every token that the sequence has generated.  Raises InternalError when one of the request's
    stop texts is complete in them: such a sequence has ended and has no business to move.
    """
    transcript = open_transcript(parcel.request, parcel.sample, parcel.queued_s, tokenizer)
    transcript.default_cap = parcel.default_cap
    transcript.first_token_s = parcel.first_token_s
    transcript.stop_reason = parcel.stop_reason
    asks = parcel.request.sampling
    if asks.logprobs is not None and parcel.logprobs is not None:
        transcript.logprobs = Pieces.of(asks.logprobs, parcel.logprobs)
    if asks.prompt_logprobs is not None and parcel.prompt_logprobs is not None:
        transcript.prompt_logprobs = Pieces.of(asks.prompt_logprobs, parcel.prompt_logprobs)
    if transcript.stream is not None:
        for token in generated.tolist():
            matched = transcript.stream.push(token)
            if matched is not None:
                raise InternalError(
                    f"row {parcel.request.row}, sample {parcel.sample} moved with {len(generated)} generated tokens, "
                    f"but stop text {matched!r} had ended it"
                )
    return transcript


def go_on(request: Request, sample: int, queued_s: float, begun: Begun, tokenizer: Tokenizer) -> Transcript:
    """Return the transcript of a sequence that an earlier attempt began; log-probabilities of its prompt come anew."""
    asks = request.sampling
    parcel = TranscriptParcel(
        request, sample, queued_s, asks.max_tokens is None, begun.logprobs, None, begun.first_token_s, None
    )
    return unpack(parcel, tokenizer, begun.tokens)


def so_far(transcript: Transcript, tokens: NDArray[np.int32]) -> Answer:
    """Return what an unfinished sequence has, as `go_on` needs it.  tokens int32 [n]: everything generated."""
    request = transcript.request
    return Answer(
        row=request.row,
        sample=transcript.sample,
        custom_id=request.custom_id,
        finish=Finish.UNFINISHED,
        prompt_tokens=len(request.prompt),
        tokens=tokens,
        text="",
        logprobs=transcript.logprobs.joined() if transcript.logprobs is not None else None,
        url=request.url,
        queued_s=transcript.queued_s,
        first_token_s=transcript.first_token_s,
    )


def close_transcript(
    transcript: Transcript,
    tokens: NDArray[np.int32],
    finish: Finish,
    ended_by_token: bool,
    done_s: float,
    tokenizer: Tokenizer,
) -> Answer:
    """Return the answer that an ended sequence becomes.

    tokens int32 [n]: everything generated; ended_by_token: the last one is a stop token or end-of-sequence.
    """
    request, asks = transcript.request, transcript.request.sampling
    shown = tokens[:-1] if ended_by_token and not asks.include_stop else tokens
    if transcript.stream is not None:
        text = transcript.stream.finish()
    else:
        text = tokenizer.decode(shown, skip_special=asks.skip_special_tokens)
    if asks.echo:
        text = tokenizer.decode(request.prompt, skip_special=asks.skip_special_tokens) + text
    error = None
    if finish is Finish.ERROR:
        where = f"at generated token {len(tokens)} of sample {transcript.sample}"
        error = RowError("numeric_fault", f"the model's logits were not finite {where}; the tokens before it are kept")
    return Answer(
        row=request.row,
        sample=transcript.sample,
        custom_id=request.custom_id,
        finish=finish,
        prompt_tokens=len(request.prompt),
        tokens=tokens,
        text=text,
        stop_reason=transcript.stop_reason,
        error=error,
        logprobs=transcript.logprobs.joined() if transcript.logprobs is not None else None,
        prompt_logprobs=transcript.prompt_logprobs.joined() if transcript.prompt_logprobs is not None else None,
        prompt=request.prompt if asks.echo else np.empty(0, np.int32),
        url=request.url,
        default_cap=transcript.default_cap and finish is Finish.LENGTH,
        queued_s=transcript.queued_s,
        first_token_s=transcript.first_token_s,
        done_s=done_s,
    )
