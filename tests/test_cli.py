"""Laws of the command line: one exit code, one clear line, a launch that changes only the number of ranks."""

from __future__ import annotations

import os
import sys

import pytest
from launch import launch, mpiexec, on_ranks

import bgmpi.api
from bgmpi import cli
from bgmpi.errors import ExitCode, InputError, InternalError, StoppedError, UsageError, WriteError
from bgmpi.primitives import NOBODY, Deed, Reported, Stop
from bgmpi.report import Summary
from bgmpi.trace import TraceWriter

GOOD = Summary(rows=3, done=3, failed=0, prompt_tokens=9, generated_tokens=9, seconds=1.0, ranks=1, steps=3)
RUN = ["run", "--model", "m", "-i", "requests.jsonl"]
LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "SLURM_STEP_ID")


@pytest.fixture(autouse=True)
def _outside_any_launcher(monkeypatch):
    for name in list(os.environ):
        if name in LAUNCHERS or name.startswith("BGMPI_"):
            monkeypatch.delenv(name)


@pytest.fixture
def engine(monkeypatch):
    """Stand in for the engine: note the config, and end as told."""
    seen: dict[str, object] = {"end": GOOD}

    def run_batch(config, stop):
        seen["config"] = config
        end = seen["end"]
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(bgmpi.api, "run_batch", run_batch)
    return seen


def test_a_good_run_prints_its_summary_and_exits_0(engine, capsys):
    assert cli.main(RUN) == 0
    assert "3: 3 good" in capsys.readouterr().out
    assert engine["config"].model == "m"


def test_a_run_with_error_rows_exits_3(engine):
    engine["end"] = Summary(3, 2, 1, 9, 9, 1.0, 1, 3)
    assert cli.main(RUN) == ExitCode.ERROR_ROWS


@pytest.mark.parametrize(("error", "code"), [
    (UsageError, 2), (InputError, 65), (InternalError, 70), (WriteError, 74), (StoppedError, 75)])
def test_a_job_that_ends_early_says_why_in_one_line_and_exits_with_its_code(engine, capsys, error, code):
    engine["end"] = error("the reason")
    assert cli.main(RUN) == code
    assert capsys.readouterr().err == "bgmpi: error: the reason\n"


def test_an_interrupt_exits_130(engine):
    engine["end"] = KeyboardInterrupt()
    assert cli.main(RUN) == 130


@pytest.mark.parametrize("argv", [
    [], ["exprt"], ["run"], ["run", "--model", "m"], ["run", "--bogus"], ["export"], ["export", "r.h5"], ["inspect"],
    ["inspect", "r.h5", "--row", "1"], ["inspect", "t", "--timeline", "o.pdf"], ["demo-model", "--kind", "dens"],
])
def test_words_that_mean_nothing_exit_2_with_one_line(argv, capsys):
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("bgmpi: error: ") and told.count("\n") == 1


def test_a_config_file_is_read_and_one_that_is_missing_exits_66(engine, tmp_path, capsys):
    (tmp_path / "job.toml").write_text("seed = 9\n")
    assert cli.main([*RUN, "--config", str(tmp_path / "job.toml")]) == 0
    assert engine["config"].seed == 9
    assert cli.main([*RUN, "--config", str(tmp_path / "none.toml")]) == 66
    assert "none.toml" in capsys.readouterr().err


def test_the_environment_of_the_process_is_read(engine, monkeypatch):
    monkeypatch.setenv("BGMPI_SEED", "8")
    assert cli.main(RUN) == 0
    assert engine["config"].seed == 8


def test_the_model_named_demo_is_the_demo_model(engine, monkeypatch, tmp_path):
    demo = pytest.importorskip("bgmpi.io.demo_model")
    monkeypatch.setattr(demo, "demo_model", lambda kind, cache: tmp_path / kind)
    assert cli.main(["run", "--model", "demo", "-i", "x"]) == 0
    assert engine["config"].model == str(tmp_path / "moe")


def test_help_comes_without_a_model(capsys):
    assert cli.main(["run", "--help"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        told = [Reported(rank, (), 0, 0, 0, 0, deeds=(Deed("run", 1.0, 2.0 - rank, NOBODY),)) for rank in range(2)]
        writer.round(0, 3.0, told, [[Stop()], [Stop()]])
    return str(tmp_path / "t.jsonl")


def test_a_trace_is_inspected_in_words(trace, capsys):
    assert cli.main(["inspect", trace]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "t.jsonl: 2 ranks, 1.000 s to 3.000 s of the job"
    assert said[-1].split() == ["all", "1", "s", "(25%)", "3", "s", "in", "2"]


@pytest.mark.parametrize(("suffix", "start"), [(".html", b"<!DOCTYPE html>"), (".svg", b"<svg "), (".png", b"\x89PNG")])
def test_a_timeline_is_drawn_in_the_format_of_its_name(trace, tmp_path, capsys, suffix, start):
    out = tmp_path / f"o{suffix}"
    assert cli.main(["inspect", "--timeline", str(out), trace]) == 0
    assert out.read_bytes().startswith(start) and "2 ranks" in capsys.readouterr().out


def test_only_a_trace_has_a_timeline(trace, tmp_path, capsys):
    (tmp_path / "r.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    cases = {"r.h5": (2, "bgmpi run --trace"), "none": (66, "none"), "t.jsonl": (74, "No such file")}
    for name, (code, words) in cases.items():
        out = tmp_path / ("missing" if code == 74 else "") / "o.html"
        assert cli.main(["inspect", str(tmp_path / name), "--timeline", str(out)]) == code
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1 and not out.exists()


def test_a_trace_of_another_version_is_refused_as_a_trace(tmp_path, capsys):
    (tmp_path / "old").write_bytes(b'{"format":"bgmpi-trace","version":1}\n')
    assert cli.main(["inspect", str(tmp_path / "old")]) == ExitCode.INPUT
    assert "version=2" in capsys.readouterr().err


# --- launching ----------------------------------------------------------------------------------------------------


def test_ranks_become_mpiexec_with_the_same_words(engine, monkeypatch, tmp_path):
    executed = {}

    def execvpe(file, args, env):
        executed.update(args=args, env=env)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvpe", execvpe)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "mpiexec").touch(mode=0o755)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(SystemExit):
        cli.main([*RUN, "--ranks", "3", "--threads", "1"])
    assert executed["args"] == [str(tmp_path / "mpiexec"), "-n", "3", str(tmp_path / "python"), "-P", "-m", "bgmpi",
                                *RUN, "--ranks", "3", "--threads", "1"]
    assert executed["env"]["OMP_NUM_THREADS"] == "1" and "config" not in engine


def test_one_rank_needs_no_launcher(engine):
    assert cli.main([*RUN, "--ranks", "1"]) == 0


def test_a_machine_without_mpiexec_gets_advice(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main([*RUN, "--ranks", "2"]) == 2
    assert "pip install mpich" in capsys.readouterr().err


def test_an_error_that_all_ranks_have_is_told_by_rank_0_and_a_rank_s_own_by_itself():
    agreed = InputError("x")
    agreed.agreed = True  # type: ignore[attr-defined]
    errors = (agreed, UsageError("x"), WriteError("x"))
    told = [[cli._should_tell(error, rank) for rank in (None, 0, 1)] for error in errors]
    assert told == [[True, True, False], [True, True, False], [True, True, True]]


# --- the real program ---------------------------------------------------------------------------------------------


def test_the_version_is_told_without_loading_torch_or_mpi():
    code = ("import sys, bgmpi.cli\ntry: bgmpi.cli.main(['--version'])\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'mpi4py', 'h5py', 'numba') if m in sys.modules])")
    done = launch([sys.executable, "-c", code], limit=60)
    assert done.stdout.splitlines() == [f"bgmpi {bgmpi.__version__}", "[]"]


@on_ranks(2, 3)
def test_a_wrong_flag_is_told_once_and_is_the_exit_code_of_the_job(ranks):
    done = mpiexec(ranks, [sys.executable, "-m", "bgmpi", "run", "--bogus"], limit=60, expect=2)
    assert done.stderr.count("unknown flag --bogus") == 1


@pytest.mark.mpi(2)
def test_run_with_ranks_restarts_itself_under_mpiexec(tmp_path):
    """A stand-in for the engine says who it is: sitecustomize puts it into the ranks, not into this process."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    env = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": None}
    words = ["run", "--ranks", "2", "--model", "m", "-i", "x"]
    done = launch([sys.executable, "-m", "bgmpi", *words], limit=60, env=env, expect=3)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    each = max(1, len(os.sched_getaffinity(0)) // 2)
    assert said == [f"rank {rank} of 2, {each} threads, --ranks 2" for rank in range(2)]
    assert done.stdout.count("1 failed") == 1


STAND_IN = """\
import os, sys, types
def run(config, stop):
    from bgmpi.report import Summary
    sys.stdout.write(f"rank {os.environ['PMI_RANK']} of {os.environ['PMI_SIZE']}, {os.environ['OMP_NUM_THREADS']} "
                     f"threads, --ranks {config.ranks}\\n")
    sys.stdout.flush()
    return Summary(rows=1, done=0, failed=1, prompt_tokens=0, generated_tokens=0, seconds=1.0, ranks=2, steps=0)
engine = types.ModuleType("bgmpi.engine")
engine.run = run
sys.modules["bgmpi.engine"] = engine
"""


@pytest.mark.mpi(2)
def test_a_rank_that_alone_cannot_be_configured_ends_all_ranks_with_its_error(tmp_path):
    script = f'[ "$PMI_RANK" = 1 ] && export BGMPI_CONFIG={tmp_path}/none.toml; exec "$0" -m bgmpi run --model m -i x'
    done = mpiexec(2, ["sh", "-c", script, sys.executable], limit=60, expect=66)
    assert done.stderr.count("none.toml: cannot be read") == 1 and "rank 1" in done.stderr
