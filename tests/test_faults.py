"""FAULTS.md, the list of faults that users of other LayerNorm kernels have met, and the tests agree."""

import fnmatch
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LINE = re.compile(r"\| (\d\d) \| ((?:~ )?`[\w.-]+/[\w.-]+#\d+`(?:, `[\w.-]+/[\w.-]+#\d+`)*) \| ([^|]+) \| ([^|]+) \|")


def lines():
    """{number: the tests that it names}"""
    table = [line for line in (TESTS / "FAULTS.md").read_text().splitlines() if line.startswith("| ") and "#" in line]
    matches = [LINE.fullmatch(line) for line in table]
    assert all(matches), [line for line, match in zip(table, matches, strict=True) if not match]
    return {match[1]: re.findall(r"`([^`]+)`", match[4]) for match in matches}


def existing_tests():
    """All of them as file::name."""
    return {
        f"{path.name}::{name}"
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_every_fault_has_a_line_and_every_line_has_tests():
    assert list(lines()) == [f"{number:02}" for number in range(1, 55)]
    assert [number for number, named in lines().items() if not named] == []


def test_every_test_that_the_list_names_exists():
    existing = existing_tests()
    assert [name for named in lines().values() for name in named if not fnmatch.filter(existing, name)] == []


def test_every_test_named_after_a_fault_stands_in_its_line():
    listed = lines()
    found, missing = 0, []
    for test in existing_tests():
        name = test.partition("::")[2]
        for number in re.findall(r"\d\d", (re.match(r"test_cases?_(\d\d(?:_and_\d\d)*)_", name) or [""])[0]):
            found += 1
            if not any(fnmatch.fnmatchcase(test, pattern) for pattern in listed.get(number, ())):
                missing.append((number, test))
    assert found > 100
    assert missing == []
