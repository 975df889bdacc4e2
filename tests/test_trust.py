"""Foreign data are never run, secrets are never written down, and files are no more open than the user wants."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoints
import jobs
import launch
import numpy as np
import pytest
from results_for_tests import PROVENANCE, answer
from tokenizers_for_tests import make_tokenizer

from bgmpi.config import resolve
from bgmpi.errors import InputError, UsageError, WriteError
from bgmpi.families import read_architecture
from bgmpi.io.attempts import alone, begin_attempt
from bgmpi.io.durable import write_durably
from bgmpi.io.publish import publish
from bgmpi.io.segments import SegmentWriter
from bgmpi.io.tokenizer import open_tokenizer
from bgmpi.trace import TraceWriter

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bgmpi", "kernels", "io", "benchmarks", "examples", "slurm", ".ci")

# --- nothing is unpickled or evaluated --------------------------------------------------------------------------------

#: Modules that turn bytes into objects or code of the sender's choice.
UNSAFE = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "copyreg", "imp", "yaml", "code")
#: mpi4py's calls in lower case pickle what they send; those of our own World that are named alike do not.
PICKLING = ("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan", "send",
            "recv", "isend", "irecv", "ssend", "bsend", "sendrecv", "issend", "ibsend")  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"), str(path))


def unsafe_in(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield what a file does that no file may do."""
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in [alias.name for alias in node.names] + ([node.module or ""] if hasattr(node, "module") else []):
                if one.split(".")[0] in UNSAFE:
                    yield f"{where} imports {one}"
        if not isinstance(node, ast.Call):
            continue
        words = {word.arg: word.value for word in node.keywords}
        called = _dotted(node.func)
        last = called.rpartition(".")[2]
        if called in ("eval", "exec", "compile", "__import__"):
            yield f"{where} calls {called}"
        if called == "torch.load" and not _is(words.get("weights_only"), True):
            yield f"{where} calls torch.load without weights_only=True"
        arrays = last in ("load", "save") and called.startswith(("np.", "numpy."))
        if arrays and not _is(words.get("allow_pickle"), False):
            yield f"{where} calls {called} without allow_pickle=False"
        if "comm" in called.rpartition(".")[0].lower() and last in PICKLING:
            yield f"{where} calls {called}, which pickles"
        if last == "from_pretrained" and not _is(words.get("trust_remote_code"), False):
            yield f"{where} calls from_pretrained without trust_remote_code=False"
        if called in ("os.system", "subprocess.getoutput") or _is(words.get("shell"), True):
            yield f"{where} gives text to a shell"


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` of a chain of names, `.c` behind anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_that_runs_code_of_others_is_called_anywhere() -> None:
    found = [fault for name, tree in sources() for fault in unsafe_in(name, tree)]
    assert not found, "\n".join(found)
    assert len(list(sources())) > 100


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import marshal as m", "eval('1')", "exec(text)", "torch.load(path)",
    "torch.load(path, weights_only=False)", "np.load(path)", "numpy.load(path, allow_pickle=True)", "comm.bcast(1)",
    "self._comm.gather(x, root=0)", "world.comm.send(x)", "AutoTokenizer.from_pretrained(folder)", "os.system('x')",
    "subprocess.run(words, shell=True)", "import yaml",
])  # fmt: skip
def test_the_walk_sees_what_it_is_for(text: str) -> None:
    assert list(unsafe_in("x.py", ast.parse(text)))


@pytest.mark.parametrize("text", ["comm.Bcast(x)", "self._comm.Allgatherv(x, y)", "world.gather(x)", "json.load(file)",
                                  "np.load(path, allow_pickle=False)", "re.compile('x')"])
def test_the_walk_lets_what_is_safe_pass(text: str) -> None:
    assert not list(unsafe_in("x.py", ast.parse(text)))


# --- no code of a model folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--trust-remote-code"], ["--trust-remote-code", "true"],
                                   ["--trust-remote-code=1"]])
def test_trust_remote_code_is_refused_with_what_to_do(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"trust-remote-code.*code from a model folder is never run.*drop the flag"):
        resolve(words, {})
    with pytest.raises(UsageError, match="TRUST_REMOTE_CODE"):
        resolve([], {"BGMPI_TRUST_REMOTE_CODE": "1"})
    resolve(["--trust-remote-code", "false"], {})


def test_python_in_a_model_folder_is_never_imported(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: ...\nclass Tok: ...\n")
    for name in ("tokenization_evil.py", "modeling_evil.py", "__init__.py", "configuration_evil.py"):
        (folder / name).write_text((folder / "evil.py").read_text())
    auto = {"AutoConfig": "evil.Model", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tok", None]}
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"auto_map": auto, "tokenizer_class": "Tok"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_tokenizer(folder).encode("AB").tolist()
    config = {"model_type": "llama"} | checkpoints._BASE | {"auto_map": auto}
    read_architecture(config)
    with pytest.raises(InputError, match="model_type 'evil' is not known"):
        read_architecture(config | {"model_type": "evil"})
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(UsageError, match=r"vocab\.json"):
        open_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


# --- secrets and permissions of a whole job ---------------------------------------------------------------------------

SECRET = "SEKRET"
SECRETS = {
    name: f"{SECRET}-{name}" for name in (
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "PASSWORD")
} | {"http_proxy": f"http://u:{SECRET}-proxy@example.org:3128", "DATABASE_URL": f"postgres://u:{SECRET}-db@h/x"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, launch.Ended]:
    """A job that writes all that a job can write, under a strict umask, with secrets in its environment and lines."""
    folder = tmp_path_factory.mktemp("trust")
    model = checkpoints.make("llama", folder / "model")
    make_tokenizer(model)
    good = {"prompt": "AB CD", "max_tokens": 3, "logprobs": 1}
    bodies = [good, {**good, "api_key": f"{SECRET}-body"}, {**good, "user": f"{SECRET}-user"},
              {**good, "metadata": {"authorization": f"Bearer {SECRET}-meta"}},
              {"prompt": 7, "api_key": f"{SECRET}-row"}]
    out = folder / "out"
    out.mkdir()
    requests = jobs.write_requests(folder / "requests.jsonl", bodies)
    words = ["run", "--model", model, "-i", requests, "-o", out / "r.h5", "--error-file", out / "e.jsonl",
             "--metrics-file", out / "m.jsonl", "--trace", out / "t.jsonl", "--log-level", "debug",
             "--checkpoint-interval", "50ms", "--log-interval", "50ms", "--progress", "lines", "--dtype",
             "float32"]  # fmt: skip
    before = os.umask(0o077)
    try:
        return out, launch.bgmpi(0, *words, expect=3, env=SECRETS, cwd=out)
    finally:
        os.umask(before)


def test_no_secret_of_environment_or_request_is_in_any_output(ended: tuple[Path, launch.Ended]) -> None:
    out, run = ended
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"r.h5", "e.jsonl", "m.jsonl", "t.jsonl"}
    told = [f"{path.name}: {path.read_bytes().count(SECRET.encode())}" for path in files
            if SECRET.encode() in path.read_bytes()]  # fmt: skip
    from bgmpi.io.results_file import open_results

    with open_results(out / "r.h5") as results:
        texts = [results.document(name) for name in ("config", "settings", "model_config")]
        texts += [repr(results.attributes), repr(list(results.rows()))]
    assert not told and SECRET not in run.stdout + run.stderr + "".join(texts)


def test_a_refused_field_is_named_without_its_value(ended: tuple[Path, launch.Ended]) -> None:
    out, _ = ended
    (line,) = [one for one in (out / "e.jsonl").read_text().splitlines() if '"r1"' in one]
    assert "api_key is not a known field" in line


def test_a_job_writes_nothing_that_its_umask_keeps_from_others(ended: tuple[Path, launch.Ended]) -> None:
    out, _ = ended
    for path in out.rglob("*"):
        assert not path.stat().st_mode & 0o077, f"{path} has mode {stat.filemode(path.stat().st_mode)}"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_files_have_the_mode_that_the_umask_leaves_and_nothing_is_open_to_the_world(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o027, 0o640), (0o002, 0o664)):
        out = tmp_path / f"{mask:o}"
        out.mkdir()
        parts = out / "r.h5.parts"
        with umask(mask), alone(parts, []):
            begin_attempt(parts, 1, {}, "ab" * 32, np.arange(1, dtype=np.uint64), retry_failed=False)
            with SegmentWriter(parts, 0) as writer:
                writer.save_progress([answer(1)])
                writer.add(answer(0))
            TraceWriter(out / "trace").close()
            publish(parts, out / "r.h5", PROVENANCE, 1, np.ones(1, np.int32))
        files = [path for path in out.rglob("*") if path.is_file()]
        assert len(files) > 5
        for path in files:
            assert path.stat().st_mode & 0o777 == mode, f"{path.name} under umask {mask:o}"
        assert parts.stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_link_that_waits_in_a_shared_folder_is_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    parts = tmp_path / "r.h5.parts"
    parts.mkdir()
    for name in (".attempt-0001.json.tmp", f".rows-{'ab' * 8}.h5.tmp", "lock", ".r.h5.tmp"):
        (parts / name).symlink_to(victim)
    with pytest.raises(WriteError, match="lock"), alone(parts, []):
        raise AssertionError("the lock is a link")
    (parts / "lock").unlink()
    with alone(parts, []):
        begin_attempt(parts, 1, {}, "ab" * 32, np.arange(1, dtype=np.uint64), retry_failed=False)
    write_durably(parts / "r.h5", b"new")
    assert victim.read_bytes() == b"precious"
    (tmp_path / "r.h5").symlink_to(victim)  # under the very name: it is replaced, not followed
    write_durably(tmp_path / "r.h5", b"new")
    assert victim.read_bytes() == b"precious" and not (tmp_path / "r.h5").is_symlink()
