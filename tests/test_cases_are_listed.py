"""The table of public cases names every case once, and every test that it names is there."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "notes" / "cases.md").read_text(encoding="utf-8")


def test_every_case_has_one_line() -> None:
    cases = re.findall(r"^\| (C\d\d) \|", TABLE, re.MULTILINE)
    assert cases == [f"C{number:02}" for number in range(1, 83)]


def test_every_test_that_the_table_names_is_there() -> None:
    lost = []
    for file in set(re.findall(r"`(test_\w+\.py)", TABLE)):
        path = TESTS / file
        names = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else []
        wanted = re.findall(rf"`{re.escape(file)}::([\w*]+)`", TABLE)
        lost += [f"{file}::{one}" for one in wanted if not any(fnmatch(name, one) for name in names)]
        lost += [] if names else [file]
    assert not lost, f"named in docs/notes/cases.md and not there: {lost}"
