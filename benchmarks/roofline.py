"""The least time in which this machine could do the work of a job, step by step, from what the steps really computed.

A step can be no faster than its arithmetic at the GEMM peak, nor than its bytes at the read bandwidth:

  FLOPs    2 for each weight and token it meets: the projections of attention, the router, the chosen experts; 4 * W for
           each query head and token seen (scores and sums); 2 * D * V for each token whose logits are drawn from.
  bytes    each weight once a step, as stored in the checkpoint (bf16): norms, attention and router of every layer, the
           experts that the step's tokens really chose (distinct ones, layer by layer), the head when a token is drawn,
           the looked-up rows of the embedding; and the keys and values of every earlier token of every sequence.
           Writes, activations and logits count nothing.

Steps without a decode token count FLOPs / peak.  Steps that mix prompt chunks and decode tokens are counted twice:
`together`, where the step's weights stream once for all its tokens and hide behind the prompts' arithmetic, max(bytes /
bandwidth, FLOPs / peak); and `separate`, where the prompts' FLOPs / peak and the same maximum of the decode tokens
alone are added.  The sum over the job that is smaller, and so harder to reach, is the one that is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from watch import Step
from work import ModelShape

_BF16 = 2


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds at least: `together` and `separate` as told above; of the latter `prompt` are the prompts'.

    experts: distinct experts a layer and decode step, mean.  decode_steps: steps without a prompt token.  steps:
    `together` of every step, float64 [steps].
    """

    together: float
    separate: float
    prompt: float
    experts: float
    decode_steps: int
    steps: NDArray[np.float64]

    @property
    def held(self) -> float:
        """Seconds of the harder count."""
        return min(self.together, self.separate)


def flops(shape: ModelShape, step: Step, rows: NDArray[np.bool_], drawn: int) -> float:
    """Return the FLOPs of the step's tokens `rows` bool [T] and of `drawn` rows of logits."""
    qkv_and_output = shape.hidden * shape.head * (2 * shape.heads + 2 * shape.kv_heads)
    experts = shape.active * 3 * shape.hidden * shape.inner + shape.experts * shape.hidden
    seen = float((step.plan.positions[rows] + 1).sum())
    attention = 4.0 * shape.heads * shape.head * seen
    layer = 2.0 * int(rows.sum()) * (qkv_and_output + experts) + attention
    return shape.layers * layer + 2.0 * drawn * shape.hidden * shape.vocab


def read_bytes(shape: ModelShape, step: Step, rows: NDArray[np.bool_], drawn: int) -> float:
    """Return the bytes that the step's tokens `rows` bool [T] must read at least, with `drawn` rows of logits."""
    attention = shape.hidden * shape.head * (2 * shape.heads + 2 * shape.kv_heads)
    every_layer = attention + shape.experts * shape.hidden + 2 * shape.hidden
    touched = sum(distinct(step, layer, rows) for layer in range(shape.layers))
    weights = shape.layers * every_layer + touched * 3 * shape.hidden * shape.inner
    weights += int(rows.sum()) * shape.hidden + shape.hidden
    if drawn:
        weights += shape.hidden * shape.vocab
    owners = np.add.reduceat(rows, step.plan.first[:-1]) > 0
    cached = int(step.plan.before[owners].sum())
    return _BF16 * (weights + float(cached) * 2 * shape.kv_heads * shape.head * shape.layers)


def distinct(step: Step, layer: int, rows: NDArray[np.bool_]) -> int:
    """Return how many experts of a layer the tokens `rows` bool [T] chose."""
    return len(np.unique(step.chosen(layer)[rows]))


def least(shape: ModelShape, step: Step, peak: float, bandwidth: float) -> tuple[float, float, float]:
    """Return the least seconds of one step at `peak` FLOP/s and `bandwidth` bytes/s: together, separate, prompt's."""
    prompt = step.is_prompt()
    everything, decode = np.ones_like(prompt), ~prompt
    drawn = int(step.plan.emits.sum())
    # The first token of an answer is drawn from a prompt's last token: its logits belong to the prompt.
    drawn_of_prompt = int(prompt[step.plan.first[1:][step.plan.emits] - 1].sum())
    arithmetic = flops(shape, step, everything, drawn) / peak
    if not decode.any():
        return arithmetic, arithmetic, arithmetic
    alone = drawn - drawn_of_prompt
    of_prompt = flops(shape, step, prompt, drawn_of_prompt) / peak
    of_decode = max(flops(shape, step, decode, alone) / peak, read_bytes(shape, step, decode, alone) / bandwidth)
    together = max(arithmetic, read_bytes(shape, step, everything, drawn) / bandwidth)
    return together, of_prompt + of_decode, of_prompt


def roofline(shape: ModelShape, steps: Sequence[Step], ceilings: NDArray[np.float64]) -> Roofline:
    """Return the least seconds of these steps; ceilings float64 [steps, 2]: FLOP/s and bytes/s of each."""
    pairs = ceilings.tolist()
    each = np.array([least(shape, step, *pair) for step, pair in zip(steps, pairs, strict=True)])
    decode = [step for step in steps if not step.is_prompt().any()]
    touched = [
        float(np.mean([distinct(step, layer, ~step.is_prompt()) for layer in range(shape.layers)])) for step in decode
    ]
    together, separate, prompt = each.sum(0).tolist()
    return Roofline(together, separate, prompt, float(np.mean(touched)) if touched else 0.0, len(decode), each[:, 0])
