"""A `config.json` that remembers which of its keys were read.

Every key is either read, known to be harmless, or refused by name: a key that changes the numbers and goes unread is
how a model silently answers noise (cases C42, C45).  Values are checked where they are read, so that an error names
the key and not the tensor that broke much later.

Knows keys, no families.  Rejected: a schema a family, which would say everything twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bgmpi.errors import InputError

Config = Mapping[str, Any]

#: The largest whole number of a config: nothing in a model is larger, and sizes are kept in 32 bits.
MOST = 2**31 - 1

# Keys that change no number of a forward pass: provenance, training, generation defaults of old files (read elsewhere).
_HARMLESS = frozenset({
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "ep_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_llama_config", "label2id", "length_penalty", "max_length", "min_length",
    "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_mtp_layers", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "pruned_heads", "qk_head_dim", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
    "seq_aux", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})

# Keys that are harmless only while they say nothing.
_NEUTRAL: Mapping[str, Any] = MappingProxyType({
    "is_encoder_decoder": False, "partial_rotary_factor": 1.0, "rope_interleaved": False, "mlp_bias": False,
    "attention_bias": False, "qkv_bias": False,
})


class Reader:
    """A config dict that remembers which of its keys were asked for."""

    def __init__(self, config: Config, where: str = "config.json") -> None:
        self.config = config
        self.where = where
        self.read: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return a key's value, `default` when it is absent or null."""
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a whole number from `least` to `most`; InputError when it is none, or absent without a default."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(
                f"{self.where}: '{key}' must be a whole number of at least {least}, at most {most}, got {value!r:.80}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; InputError when it is none, or absent without a default."""
        value = self.take(key, default)
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass  # a whole number that no float can hold
        raise InputError(f"{self.where}: '{key}' must be a finite number, got {value!r:.80}")

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero."""
        value = self.number(key, default)
        if value <= 0:
            raise InputError(f"{self.where}: '{key}' must be above zero, got {value:g}")
        return value

    def words(self, key: str) -> tuple[Any, ...] | None:
        """Return a list of texts or whole numbers as a tuple, None when it is absent."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
            raise InputError(f"{self.where}: '{key}' must be a list of texts or numbers, got {value!r:.80}")
        return tuple(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: '{key}' must be true or false, got {value!r}")
        return value

    def word(self, key: str, default: str, known: tuple[str, ...]) -> str:
        """Return one of the known words."""
        value = self.take(key, default)
        if value not in known:
            raise InputError(f"{self.where}: '{key}' is {value!r}; known: {', '.join(known)}")
        return str(value)

    def check_all_read(self, neutral: Mapping[str, Any]) -> None:
        """Refuse keys that were neither read nor are harmless; `neutral` are harmless at just that value."""
        quiet = {**_NEUTRAL, **neutral}
        unread = [
            key for key, value in self.config.items()
            if key not in self.read and value is not None and key not in _HARMLESS and not key.startswith("_")
            and not (key in quiet and quiet[key] == value)
        ]
        if unread:
            said = ", ".join(f"{key} = {self.config[key]!r}" for key in sorted(unread))
            raise InputError(
                f"{self.where}: these keys may change the model's numbers and nothing here reads them: {said}; "
                f"remove what you know to be harmless"
            )
