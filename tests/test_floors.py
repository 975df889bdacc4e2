"""The floors of docs/architecture.md, read from its table and held by walking every import (design section 3)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bgmpi", "kernels", "io")
OUTSIDE = ("torch", "mpi4py", "h5py")
BELOW_THE_SEAM = ("cuda", "cupy", "numba", "nccl")
BANNED = re.compile(r"workers?|managers?|utils?|helpers?|misc")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def floors_in(page: str) -> dict[str, int]:
    """Read the floor table: {"bgmpi/errors": 0, "io/results": 2, ...}.

    A floor begins with `FLOOR <n> <name>`.  Behind a folder (`io/`) stand the names of its files, until the next folder
    or the next floor; remarks are in parentheses or begin with "never" or "numpy only".
    """
    floors: dict[str, int] = {}
    floor, folder = -1, ""
    for line in re.sub(r"\([^)]*\)", "", page).splitlines():
        if begins := re.match(r"FLOOR (\d+) \w+", line):
            floor, folder = int(begins[1]), ""
            line = line[begins.end() :]
        elif not line.startswith(" "):
            floor = -1
        if floor < 0:
            continue
        for word in re.split(r"\bnever\b|\bnumpy only\b", line)[0].split():
            place, slash, name = word.rpartition("/")
            folder = place if slash else folder
            if name:
                floors[f"{folder}/{name}"] = floor
    return floors


FLOORS = floors_in((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
# A package's own file says what stands at its door: the lowest floor it may be imported from.
DOORS = {"bgmpi/__init__": 0, "kernels/__init__": 2, "io/__init__": 2}
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in FILES.items()}


def file_of(module: str) -> str | None:
    """Name the file of a module of ours, whether or not it exists; None for what is not a module of ours."""
    parts = module.split(".")
    if parts[0] != "bgmpi":
        return None
    folder = "bgmpi"
    if len(parts) > 1 and parts[1] in FOLDERS[1:]:
        folder, parts = parts[1], parts[1:]
    return f"{folder}/{'/'.join(parts[1:]) or '__init__'}"


def modules_of(name: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of all that a file imports, wherever in the file; also what `from` takes, when that is a
    module."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}.py:{node.lineno}: imports are absolute here, so that floors can be read"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [member for member in members if file_of(member) in FILES]
            yield from ((node.lineno, module) for module in modules)
            if len(modules) < len(members):
                yield node.lineno, str(node.module)


def ours_in(name: str) -> Iterator[tuple[int, str]]:
    """Yield line and file of all of ours that a file imports."""
    for line, module in modules_of(name):
        target = file_of(module)
        if target is not None:
            yield line, target


def floor_of(name: str) -> int | None:
    return DOORS.get(name, FLOORS.get(name))


def tell(faults: list[str], law: str) -> None:
    assert not faults, law + "\n  " + "\n  ".join(faults)


def test_the_table_is_read_as_it_is_written() -> None:
    page = """
FLOOR 0 words        bgmpi/  errors log
                             trace
FLOOR 1 decisions    bgmpi/  paged_kv        numpy only: no torch, MPI, h5py
FLOOR 2 outside      bgmpi/world (the one door
                     to MPI)
                     io/     requests results never imports kernels
FLOOR 5 program      bgmpi/  __main__

bgmpi/prose is not in the table
"""
    assert floors_in(page) == {
        "bgmpi/errors": 0, "bgmpi/log": 0, "bgmpi/trace": 0, "bgmpi/paged_kv": 1, "bgmpi/world": 2,
        "io/requests": 2, "io/results": 2, "bgmpi/__main__": 5,
    }  # fmt: skip


def test_every_file_has_a_floor_and_every_listed_file_exists() -> None:
    unlisted = [f"{name}.py: list it in the floor table of docs/architecture.md" for name in FILES
                if floor_of(name) is None]  # fmt: skip
    missing = [f"{name}.py: listed in the floor table, but there is no such file" for name in FLOORS
               if name not in FILES]  # fmt: skip
    tell(unlisted + missing, "the floor table and the folders must name the same files")


def test_imports_go_only_down() -> None:
    faults = []
    for name in FILES:
        own = floor_of(name)
        for line, target in ours_in(name):
            other = floor_of(target)
            if own is not None and other is not None and other > own:
                faults.append(f"{name}.py:{line} (floor {own}) imports {target} (floor {other})")
    tell(faults, "imports go only down")


def test_no_two_files_need_each_other() -> None:
    needs = {name: {target for _, target in ours_in(name) if target != name} for name in FILES}
    TopologicalSorter(needs).prepare()


def test_words_and_decisions_know_no_device_no_ranks_and_no_results_file() -> None:
    faults = [
        f"{name}.py:{line} imports {module}"
        for name in FILES
        if floor_of(name) in (0, 1)
        for line, module in modules_of(name)
        if module.split(".")[0] in OUTSIDE
    ]
    tell(faults, f"floors 0 and 1 import none of {', '.join(OUTSIDE)}")


@pytest.mark.parametrize(("folder", "other"), [("kernels", "io"), ("io", "kernels")])
def test_kernels_and_io_do_not_know_each_other(folder: str, other: str) -> None:
    faults = [
        f"{name}.py:{line} imports {target}"
        for name in FILES
        if name.startswith(f"{folder}/")
        for line, target in ours_in(name)
        if target.startswith(f"{other}/")
    ]
    tell(faults, f"{folder}/ never imports {other}/")


def test_world_is_the_only_door_to_mpi() -> None:
    faults = [
        f"{name}.py:{line} imports {module}"
        for name in FILES
        if name != "bgmpi/world"
        for line, module in modules_of(name)
        if module.split(".")[0] == "mpi4py"
    ]
    tell(faults, "only bgmpi/world.py imports mpi4py")


def test_nothing_above_the_seam_names_a_device_or_its_compilers() -> None:
    faults = [
        f"{name}.py:{number}: {line.strip()}"
        for name, path in FILES.items()
        if name.startswith("bgmpi/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(word in line.lower() for word in BELOW_THE_SEAM)
    ]
    tell(faults, f"bgmpi/ does not say {', '.join(BELOW_THE_SEAM)}: that is for kernels/")


def banned_in(identifier: str) -> bool:
    if identifier in ("SequenceManager", "sequence_manager"):
        return False
    return any(BANNED.fullmatch(word.lower()) for word in WORDS.findall(identifier))


def test_names_are_in_the_words_of_the_design() -> None:
    faults = [f"{name}.py" for name in FILES if banned_in(Path(name).name)]
    for name, tree in TREES.items():
        faults.extend(
            f"{name}.py:{node.lineno} {node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and banned_in(node.name)
        )
    tell(faults, "banned in names: worker, manager (but SequenceManager), util, helper, misc")


def test_a_banned_word_is_found_inside_a_name_but_not_inside_a_word() -> None:
    bad = ("Worker", "kv_utils", "PageManager", "HTTPHelper", "misc", "start_workers", "_util")
    good = ("SequenceManager", "sequence_manager", "utility", "miscount", "network", "manage")
    assert [name for name in bad if not banned_in(name)] == []
    assert [name for name in good if banned_in(name)] == []
