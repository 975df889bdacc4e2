"""Knows the flags that users of vLLM, SGLang and of later versions of this program type by habit.

The rule: a foreign flag is accepted only where what it asks for is what happens anyway; everything else is refused
with what to type instead.  Nothing is ever ignored in silence (conventions, "CLI names").  Rejected alternative:
accepting them all with a warning, after which a job runs for hours in a layout that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

_RANKS = "the layout follows the number of ranks: start N of them with --ranks N, mpiexec -n N or srun -n N"


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag of another program.

    `harmless` are the values that ask for what happens anyway, empty when there are none; the empty string in it
    stands for the bare flag.  `advice` says why any other value is refused and what to do.
    """

    flags: tuple[str, ...]
    harmless: tuple[str, ...]
    advice: str


FOREIGN = (
    Foreign(("--tensor-parallel-size", "-tp", "--tp-size"), ("1",), _RANKS),
    Foreign(("--pipeline-parallel-size", "-pp", "--pp-size"), ("1",), f"there is no pipeline; {_RANKS}"),
    Foreign(("--data-parallel-size", "-dp", "--dp-size"), ("1",), f"attention is data-parallel by sequence; {_RANKS}"),
    Foreign(("--enable-expert-parallel",), ("", "true"), "experts are always spread over all ranks"),
    Foreign(("--ep-size",), (), f"experts are always spread over all ranks; {_RANKS}"),
    Foreign(("--enforce-eager",), ("", "true"), "there are no graphs to capture: execution is always eager"),
    Foreign(("--enable-chunked-prefill",), ("", "true"), "prefill is always chunked: see --max-num-batched-tokens"),
    Foreign(("--quantization", "-q"), ("none",), "weights run as stored (fp8 block scales are undone while loading): "
            "drop the flag, choose the precision with --dtype"),
    Foreign(("--kv-cache-dtype",), ("auto",), "keys and values are kept in --dtype: drop the flag"),
    Foreign(("--trust-remote-code",), ("false",), "code from a model folder is never run: drop the flag; families are "
            "built in"),
    Foreign(("--enable-prefix-caching",), ("", "true"), "prefixes are shared unless --prefix-sharing off says so"),
    Foreign(("--disable-radix-cache",), (), "use --prefix-sharing off"),
    Foreign(("--scheduling-policy",), ("priority",), "rows are read by `priority` and `deadline_s`: drop the flag, or "
            "read them as they stand with --ageing 0"),
    Foreign(("--revision",), (), "nothing is downloaded: give the folder of the revision you want as --model"),
    Foreign(("--enable-metrics",), (), "use --metrics-file PATH"),
    Foreign(("--max-log-len",), (), "prompts are never logged: drop the flag"),
    Foreign(("--model-path",), (), "use --model"),
    Foreign(("--tokenizer-path",), (), "use --tokenizer"),
    Foreign(("--mem-fraction-static",), (), "use --gpu-memory-utilization"),
    Foreign(("--context-length",), (), "use --max-model-len"),
    Foreign(("--chunked-prefill-size",), (), "use --max-num-batched-tokens"),
    Foreign(("--max-running-requests",), (), "use --max-num-seqs"),
    Foreign(("--json-model-override-args", "--hf-overrides"), (), "edit a copy of config.json in the model's folder"),
    Foreign(("--override-generation-config",), (), "use --temperature, --top-p, --top-k, --min-p, "
            "--repetition-penalty and --max-tokens"),
    Foreign(("--plan",), (), "not in this version"),
)


def foreign(flag: str) -> Foreign | None:
    """Return what is known of `flag` (`--no-` is looked through), None when it is nobody's."""
    plain = "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag
    return next((entry for entry in FOREIGN if plain in entry.flags), None)


def unknown(name: str, known: Iterable[str], kind: str) -> str:
    """Say that `name` is not a `kind`, with the advice for a foreign flag or else the nearest of `known`.

    `name` may be spelt as a flag, an environment variable or a TOML key.
    """
    flag = name if name.startswith("-") else "--" + name.removeprefix("BGMPI_").lower().replace("_", "-")
    entry = foreign(flag)
    if entry is not None:
        return f"unknown {kind} {name}: {entry.advice}"
    near = get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"unknown {kind} {name}" + (f"; did you mean {' or '.join(near)}?" if near else "; see bgmpi run --help")
