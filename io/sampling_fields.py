"""From the fields of a request body to a `Sampling` record: every value checked, every default filled in.

Names and meanings are OpenAI's and, where OpenAI has none, vLLM's, for that is what users' files hold.  Where the two
leave room, the choice is: no cap that the user did not ask for; a field that would change the answer is obeyed or
refused, never dropped; greedy is temperature 0 exactly, and any other temperature is passed on as it is.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.io.request_fields import Fields, Refused, expected
from bgmpi.request import Sampling

#: fields that change nothing about the answer here
HARMLESS = frozenset({
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "stream_options", "parallel_tool_calls", "prediction", "request_id", "cache_salt",
    "return_token_ids",
})

#: fields that would change the answer and are not built, with the values that ask for nothing
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "structured_outputs": ({},), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "guided_decoding_backend": (), "guided_whitespace_pattern": (),
    "structural_tag": (), "json_schema": (), "regex": (), "ebnf": (), "grammar": (),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "early_stopping": (False,), "suffix": ("",),
    "modalities": (["text"],), "audio": (), "functions": ([],), "function_call": ("none", "auto"),
    "web_search_options": (), "reasoning_effort": (), "verbosity": (), "truncate_prompt_tokens": (),
    "bad_words": ([],), "allowed_token_ids": (), "logits_processors": ([],), "prompt_embeds": (),
    "spaces_between_special_tokens": (True,), "continue_final_message": (False,), "chat_template": (),
    "mm_processor_kwargs": (), "kv_transfer_params": (), "vllm_xargs": ({},), "lora_path": (), "regex_pattern": (),
    "include_reasoning": (True,), "thinking_token_budget": (), "repetition_detection": (), "detokenize": (True,),
}

_LONGEST = 2**31 - 1
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a row gets that does not say: from flags, else the model's generation_config, else these.

    `max_tokens` None: as many as the context holds.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


def read_sampling(fields: Fields, *, chat: bool, seed: int, defaults: SamplingDefaults, max_logprobs: int,
                  known: NDArray[np.bool_]) -> Sampling:
    """Take the fields of sampling and return the record; raise Refused.

    `seed` is used when the row brings none.  `known` bool [vocab]: the ids that may be sampled.
    """
    vocab = len(known)
    max_tokens, min_tokens = _read_lengths(fields, defaults)
    logprobs = _read_chat_logprobs(fields, max_logprobs) if chat else fields.integer("logprobs", 0, max_logprobs)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, max_logprobs)
    echo = fields.boolean("echo", False)
    if chat and echo:
        raise Refused("echo is for completions; a chat's prompt is not shown", "echo")
    if echo and prompt_logprobs is None:
        prompt_logprobs = logprobs
    own_seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return Sampling(
        seed=seed if own_seed is None else own_seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(fields.number("temperature", 0), defaults.temperature),
        top_p=_or(fields.number("top_p", 0, 1, above=True), defaults.top_p),
        top_k=_read_top_k(fields, defaults.top_k, vocab),
        min_p=_or(fields.number("min_p", 0, 1), defaults.min_p),
        repetition_penalty=_or(fields.number("repetition_penalty", 0, above=True), defaults.repetition_penalty),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), 0.0),
        logit_bias=_read_logit_bias(fields, known),
        stop=_read_stop(fields),
        stop_token_ids=_read_stop_ids(fields, vocab),
        ignore_eos=fields.boolean("ignore_eos", False),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
    )


def row_seed(job_seed: int, row: int) -> int:
    """Return the seed of a row that brings none: 64 bits from the job's seed and the row number."""
    words = f"{job_seed % 2**64} {row}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _read_lengths(fields: Fields, defaults: SamplingDefaults) -> tuple[int | None, int]:
    """Return max_tokens and min_tokens; 0 tokens is a prefill without an answer."""
    old, new = fields.integer("max_tokens", 0), fields.integer("max_completion_tokens", 0)
    if old is not None and new is not None and old != new:
        raise Refused(f"max_tokens {old} and max_completion_tokens {new} differ; give one", "max_completion_tokens")
    given = new if new is not None else old
    minimum = fields.integer("min_tokens", 0) or 0
    if given is not None and minimum > given:
        raise Refused(f"min_tokens {minimum} is more than max_tokens {given}", "min_tokens")
    longest = defaults.max_tokens if given is None else given
    if longest is not None and given is None:
        longest = max(longest, minimum)
    return (None if longest is None else min(longest, _LONGEST)), min(minimum, _LONGEST)


def _read_chat_logprobs(fields: Fields, max_logprobs: int) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, max_logprobs)
    if top and not wanted:
        raise Refused("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _read_top_k(fields: Fields, default: int, vocab: int) -> int:
    """Return top_k; 0, -1 and anything from the vocabulary's size on filter nothing and become 0."""
    value = fields.integer("top_k", -1)
    value = default if value is None else value
    return value if 0 < value < vocab else 0


def _read_logit_bias(fields: Fields, known: NDArray[np.bool_]) -> tuple[tuple[int, float], ...]:
    found = []
    for key, value in (fields.mapping("logit_bias") or {}).items():
        if not _INTEGER.fullmatch(key):
            expected("logit_bias", "token ids as keys", key)
        id = int(key)
        if not 0 <= id < len(known):
            expected("logit_bias", f"token ids from 0 to {len(known) - 1}", id)
        if not known[id]:
            raise Refused(f"logit_bias: the tokenizer has no token {id}, so it is never sampled", "logit_bias")
        if type(value) not in (int, float) or not -100 <= value <= 100 or math.isnan(value):
            expected("logit_bias", f"a number from -100 to 100 for token {id}", value)
        found.append((id, float(value)))
    return tuple(sorted(dict(found).items()))


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        expected("stop", "a text or a list of texts, none of them empty", value)
    return tuple(dict.fromkeys(texts))


def _read_stop_ids(fields: Fields, vocab: int) -> tuple[int, ...]:
    value = fields.take("stop_token_ids")
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < vocab for id in ids):
        expected("stop_token_ids", f"a list of token ids from 0 to {vocab - 1}", value)
    return tuple(dict.fromkeys(ids))
