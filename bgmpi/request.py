"""What one row asks for and what one sequence answers: the records that cross every floor.

They are plain frozen data.  Parsing lives in `bgmpi.io.requests`, drawing tokens in `bgmpi.sampling`, writing in
`bgmpi.io.results`; none of them adds a field of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import RowError


class Finish(IntEnum):
    """Why a sequence ended; the names are those of the OpenAI API.  One that is saved before its end is unfinished."""

    UNFINISHED = -1
    STOP = 0
    LENGTH = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one row asks of the sampler, validated and with every default filled in.

    `max_tokens` None means "as many as the context holds".  `logprobs` / `prompt_logprobs` None means off, k >= 0
    means the chosen token's and the k most likely ones'.  `temperature` 0 means greedy.  `top_k` 0 means no limit.
    `seed` is the row's seed (64 bits): the request's own, or derived from the job's seed and the row number.
    """

    seed: int
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One good row: its prompt as token ids and what it asks for.

    `prompt` is int32 [tokens].  `samples` is the OpenAI `n`: the row has that many sequences.
    """

    row: int
    custom_id: str
    url: str
    prompt: NDArray[np.int32]
    samples: int
    sampling: Sampling


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the tokens of one sequence (natural log, before any filtering).

    `chosen` float32 [tokens]; `top_ids` int32 [tokens, k]; `top` float32 [tokens, k], most likely first.
    A token without a probability (the first of a prompt) has NaN in `chosen`, -1 and NaN in the top arrays.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SavedKv:
    """The KV of one sequence in a file: `pages` pages from number `first` on, KV of `with_kv` tokens, whose hash is
    `tokens`."""

    path: str
    first: int
    pages: int
    with_kv: int
    tokens: int


@dataclass(slots=True)
class Begun:
    """What an unfinished sequence has: `tokens` int32 [n], generated; their log-probabilities, where asked for; when it
    had its first token; its KV on disk, where restoring is cheaper than computing."""

    tokens: NDArray[np.int32]
    logprobs: Logprobs | None
    first_token_s: float
    kv: SavedKv | None = None


@dataclass(slots=True)
class Answer:
    """What one sequence left behind: an answer, or an error with what was generated before it.

    `tokens` int32 [n] are all generated ids, the stop token included.  `text` is what the user sees.  `stop_reason` is
    the stop text or the stop token id that matched, None for end-of-sequence or length.  Times are seconds since the
    job began, NaN where the moment never came.
    """

    row: int
    sample: int
    custom_id: str
    finish: Finish
    prompt_tokens: int
    tokens: NDArray[np.int32]
    text: str
    stop_reason: str | int | None = None
    error: RowError | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    url: str = ""
    default_cap: bool = False
    queued_s: float = float("nan")
    first_token_s: float = float("nan")
    done_s: float = float("nan")
