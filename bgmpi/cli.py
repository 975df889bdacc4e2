"""The program `bgmpi`: turns words into a call, and the way it ended into an exit code and one clear line.

Heavy rooms (torch, MPI, HDF5) are imported inside the command that needs them, so a misspelt flag is refused at once
and before any rank waits for another.  `run --ranks N` replaces this process by mpiexec, so signals and exit codes
pass through with nothing in between; rejected alternative: a parent that starts mpiexec and relays, one more process
that a batch system can kill at the wrong moment.

What ends a job while ranks wait for each other is the engine's matter (it agrees or aborts); here an error is only
told, once: by rank 0 when every rank has it, by the rank itself when it is its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import NoReturn

import bgmpi
from bgmpi import log
from bgmpi.config import Config, Parser, config_file, resolve
from bgmpi.config import parser as run_parser
from bgmpi.errors import BgmpiError, ExitCode, MissingError, UsageError
from bgmpi.launcher import launch_command, launch_rank, threads_for
from bgmpi.stop_request import StopRequest, stop_on_signals
from bgmpi.values import integer

INTERRUPTED = 130
#: Seconds that a rank waits for rank 0 to tell an error that all have.
_GRACE = 1.0
#: The right of everybody to write.
_OTHERS_WRITE = 0o002


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (the process's own when None) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    os.umask(os.umask(_OTHERS_WRITE) | _OTHERS_WRITE)  # whatever the user's: no output that everybody may change
    try:
        if words[:1] == ["run"]:
            return _run(words[1:], os.environ, ends=argv is None)
        if words[:1] == ["plan"]:
            return _plan(words[1:], os.environ)
        return _other(words)
    except BgmpiError as error:
        if _should_tell(error, launch_rank(os.environ)):
            sys.stderr.write(f"bgmpi: error: {error}\n")
        else:
            time.sleep(_GRACE)  # a launcher ends all when one has ended, and rank 0 should have told why before
        return int(error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED


def _should_tell(error: BgmpiError, rank: int | None) -> bool:
    everywhere = isinstance(error, UsageError) or getattr(error, "agreed", False)
    return not (rank and everywhere)


def _other(words: Sequence[str]) -> int:
    chosen = _parser().parse_args(words)
    code: int = chosen.command(chosen)
    return code


def _parser() -> Parser:
    result = Parser(prog="bgmpi", description=(bgmpi.__doc__ or "").splitlines()[0], allow_abbrev=False)
    result.add_argument("--version", action="version", version=f"bgmpi {bgmpi.__version__}")
    commands = result.add_subparsers(metavar="command", required=True)
    commands.add_parser("run", help="run a batch of requests (bgmpi run --help)", add_help=False)

    commands.add_parser("plan", help="say what prompts share, and what that saves, before any work", add_help=False)

    export = commands.add_parser("export", help="write results as OpenAI batch output lines", allow_abbrev=False)
    export.add_argument("results", help="a results file, HDF5")
    export.add_argument("-o", "--output-file", required=True, metavar="PATH", help="lines of the good rows")
    export.add_argument("--error-file", metavar="PATH", help="lines of the failed rows; unset: beside the output")
    export.add_argument("--tokenizer", metavar="DIR", help="spell tokens of log-probabilities as text, not as numbers")
    export.set_defaults(command=_export)

    merge = commands.add_parser("merge", help="join the outputs of all shards of an input", allow_abbrev=False)
    merge.add_argument("shards", nargs="+",
                       help="files of the shards, a pattern of them, or the name that all of them were given")
    merge.add_argument("-o", "--output-file", metavar="PATH", help="results, HDF5; unset: the name that all were given")
    merge.add_argument("--error-file", metavar="PATH", help="also write failed rows here, one JSON object a line")
    merge.add_argument("--overwrite", action="store_true", help="replace an output file that exists")
    merge.set_defaults(command=_merge)

    inspect = commands.add_parser("inspect", help="say what is in a results file or a trace", allow_abbrev=False)
    inspect.add_argument("file", help="a results file, HDF5, or a trace (bgmpi run --trace PATH)")
    inspect.add_argument("--rows", type=_count, default=3, metavar="K", help="rows of results to show, default 3")
    inspect.add_argument("--timeline", metavar="OUT",
                         help="draw what every rank of a trace did and when, as OUT.html, OUT.svg or OUT.png")
    inspect.set_defaults(command=_inspect)

    demo = commands.add_parser("demo-model", help="make the demo model and print its folder", allow_abbrev=False)
    demo.add_argument("--kind", choices=("moe", "dense"), default="moe", help="default moe")
    demo.add_argument("--cache", type=Path, metavar="DIR", help="where it is kept; unset: the user's cache folder")
    demo.set_defaults(command=_demo_model)
    return result


# --- run ----------------------------------------------------------------------------------------------------------


def _run(words: Sequence[str], environ: Mapping[str, str], *, ends: bool) -> int:
    """Run a batch; ends: this process ends with it."""
    if "-h" in words or "--help" in words:
        sys.stdout.write(run_parser().format_help())
        return ExitCode.OK
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals(ends=ends))
        return _run_on(launch_rank(environ), words, environ, stop, stack)


def _run_on(
    rank: int | None, words: Sequence[str], environ: Mapping[str, str], stop: StopRequest, stack: ExitStack
) -> int:
    config = _configure(words, environ) if rank is None else _configure_together(words, environ, stack)
    if rank is None and config.ranks is not None and config.ranks > 1:
        _become_mpiexec(config.ranks, config.threads, words, environ)
    from bgmpi.api import run_batch
    from bgmpi.report import summary_text

    summary = run_batch(config, stop)
    if not rank:
        sys.stdout.write(summary_text(summary, shutil.get_terminal_size((100, 24)).columns) + "\n")
    return ExitCode.ERROR_ROWS if summary.failed else ExitCode.OK


def _configure(words: Sequence[str], environ: Mapping[str, str]) -> Config:
    config = resolve(words, environ, _toml_text(words, environ))
    if config.model is None or config.input_file is None:
        raise UsageError("nothing to run: give --model DIR (or --model demo) and --input-file requests.jsonl")
    return _with_demo(config)


def _configure_together(words: Sequence[str], environ: Mapping[str, str], stack: ExitStack) -> Config:
    """Collective over the world: configure on every rank, or raise the first failing rank's error on every rank.

    A rank that left alone (a config file that only its node lacks) would keep the others waiting in MPI for ever.  From
    here on the start is limited, until the engine watches.
    """
    from bgmpi.world import open_world, starting

    config = failure = None
    try:
        config = _configure(words, environ)
    except BgmpiError as error:
        failure = error
    limit = config.startup_timeout if config is not None and config.heartbeat else 0.0
    stack.enter_context(starting(limit))
    with open_world(allow_mismatch=True) as world:
        world.agree(failure)
    assert config is not None
    return config


def _toml_text(words: Sequence[str], environ: Mapping[str, str]) -> str | None:
    path = config_file(words, environ)
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingError(f"--config {path}: cannot be read: {error}") from None


def _with_demo(config: Config) -> Config:
    if config.model != "demo":
        return config
    from bgmpi.io.demo_model import demo_model

    log.configure(launch_rank(os.environ) or 0, gethostname(), config.log_level)
    return replace(config, model=str(demo_model("moe", Path(config.cache) if config.cache else None)))


def _become_mpiexec(ranks: int, threads: int | None, words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if mpiexec is None:
        raise UsageError(
            f"--ranks {ranks} needs mpiexec, which is neither beside {sys.executable} nor on PATH: install an MPI "
            "(pip install mpich), or start bgmpi run with your site's launcher (srun, mpirun) and no --ranks"
        )
    each = threads_for(ranks, threads, len(os.sched_getaffinity(0)), environ.get("OMP_NUM_THREADS"))
    sys.stdout.flush()
    sys.stderr.flush()
    command = launch_command(mpiexec, sys.executable, ranks, words)
    os.execvpe(mpiexec, command, {**environ, "OMP_NUM_THREADS": str(each)})


# --- plan ---------------------------------------------------------------------------------------------------------


def _plan(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print what a run with these words would share."""
    if "-h" in words or "--help" in words:
        sys.stdout.write("bgmpi plan takes the options of bgmpi run, and does no work.\n\n")
        sys.stdout.write(run_parser().format_help())
        return ExitCode.OK
    config = _configure(words, environ)
    from bgmpi.preview import preview
    from bgmpi.world import open_world

    log.configure(0, gethostname(), config.log_level)
    with open_world(allow_mismatch=config.allow_rank_mismatch) as world:
        sys.stdout.write(preview(config, world) + "\n")
    return ExitCode.OK


# --- the small commands -------------------------------------------------------------------------------------------


def _export(chosen: Namespace) -> int:
    from bgmpi.io.openai_lines import export

    spell = None
    if chosen.tokenizer is not None:
        from bgmpi.io.tokenizer import open_tokenizer

        spell = open_tokenizer(Path(chosen.tokenizer)).token_bytes
    done = export(chosen.results, chosen.output_file, chosen.error_file, token_text=spell)
    sys.stdout.write(f"{done.answers} answers in {done.output}, {done.errors} errors in {done.error_file}\n")
    return ExitCode.OK


def _merge(chosen: Namespace) -> int:
    from bgmpi.io.merge import merge, whole_name
    from bgmpi.io.openai_lines import export_errors

    output = chosen.output_file if chosen.output_file is not None else whole_name(chosen.shards)
    done = merge(chosen.shards, output, overwrite=chosen.overwrite)
    sys.stdout.write(f"{done.rows} rows in {done.path}: {done.done} good, {done.errors} failed\n")
    if chosen.error_file is not None:
        export_errors(done.path, chosen.error_file)
    return ExitCode.ERROR_ROWS if done.errors else ExitCode.OK


def _count(word: str) -> int:
    try:
        number: int = integer(0)(word)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return number


def _inspect(chosen: Namespace) -> int:
    from bgmpi.trace import is_trace

    if chosen.timeline is not None or is_trace(chosen.file):
        return _inspect_trace(chosen)
    from bgmpi.io.results import inspect

    sys.stdout.write(inspect(chosen.file, chosen.rows) + "\n")
    return ExitCode.OK


def _inspect_trace(chosen: Namespace) -> int:
    from bgmpi.picture import check_format, draw
    from bgmpi.timeline import read_timeline, summary
    from bgmpi.trace import is_trace

    if chosen.timeline is not None:
        check_format(chosen.timeline)
        if os.path.exists(chosen.file) and not is_trace(chosen.file):
            raise UsageError(f"--timeline draws a trace, and {chosen.file} is none: bgmpi run --trace PATH writes one")
    timeline = read_timeline(chosen.file)
    if chosen.timeline is not None:
        draw(timeline, chosen.timeline)
    sys.stdout.write(summary(timeline) + "\n")
    return ExitCode.OK


def _demo_model(chosen: Namespace) -> int:
    from bgmpi.io.demo_model import demo_model

    log.configure(0, gethostname())
    sys.stdout.write(f"{demo_model(chosen.kind, chosen.cache)}\n")
    return ExitCode.OK
