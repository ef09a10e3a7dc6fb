"""Draws mutants, runs for each the tests that reach it, and reports how many were found.

The lines that each test reaches are recorded first, which takes as long as the suite. The record is kept in
``--folder`` with the results, so that an interrupted run continues. All of it happens in a copy of the tree.

    python -m tests.mutation --count 300 --seed 1
"""

import argparse
import ast
import difflib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutation import fork
from tests.mutation.draw import Mutant, drawn
from tests.mutation.scope import CODE, OF_TABLES, TESTS_LEFT_OUT
from tests.mutation.tests_of import AT_IMPORT

ROOT = Path(__file__).parents[2]
FIRST = 5.0
"""Seconds of the tests that run first. They find most mutants, and collecting all tests would take as long."""
PATIENCE = 10.0
"""The factor of the recorded time after which a mutant counts as one that hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--since", metavar="COMMIT", help="only of lines that have come or changed since this commit")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of tests for a mutant that survives")
    parser.add_argument("--folder", type=Path, default=ROOT / "mutants", help="of the record, the copy and the results")
    parser.add_argument("--again", action="store_true", help="run those once more that no test has killed")
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()  # runs are elsewhere
    tree = asked.folder / "tree"
    copy(tree)
    fork.warm()
    record = recorded(tree, asked.folder / "record")
    sources = {str(path.relative_to(tree)): None for each in CODE for path in (tree / "mcore_bridge").glob(each)}
    if asked.since:
        sources = {file: lines for file, lines in lines_since(asked.since).items() if file in sources}
    run(tree, drawn(tree, sources, asked.count, asked.seed), record, asked)


def copy(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "__pycache__", "mutants")
    shutil.copytree(ROOT, tree, ignore=ignored)


def recorded(tree: Path, folder: Path) -> dict[str, Any]:
    """The time of each test, and the lines that it reaches. It is recorded again if its file or the code has
    changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = b"".join(path.read_bytes() for path in sorted((tree / "mcore_bridge").rglob("*.py")))
    whole: dict[str, Any] = {"seconds": {}, "reached": {}}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        if any(fnmatch.fnmatch(path.name, each) for each in TESTS_LEFT_OUT):
            continue
        kept = folder / f"{path.stem}-{hashlib.sha256(code + path.read_bytes()).hexdigest()[:16]}.json"
        if not kept.exists():
            begin = time.monotonic()
            notes = folder / "notes"
            shutil.rmtree(notes, ignore_errors=True)
            found = fork.forked(tree, 1800.0, "record", str(path.relative_to(tree)), str(notes))
            kept.write_text(json.dumps(found or {"seconds": {}, "reached": {}}))
            print(f"recorded {path.name} in {time.monotonic() - begin:.0f} s", flush=True)
        found = json.loads(kept.read_text())
        whole["seconds"].update(found["seconds"])
        names = ["", *found["seconds"]]
        for file, pairs in found["reached"].items():
            named = ((set(lines), [names[number] for number in numbers]) for lines, numbers in pairs)
            whole["reached"].setdefault(file, []).extend(named)
    return whole


def lines_since(commit: str) -> dict[str, set[int]]:
    """The lines that a commit does not have, by file; for a moved file, only the changed lines."""
    asked = ("git", "diff", "--unified=0", "--find-renames", commit, "--", "mcore_bridge")
    found: dict[str, set[int]] = {}
    for line in subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if line.startswith("+++ "):
            lines = found.setdefault(line.removeprefix("+++ b/"), set())
        elif place := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(place[1]), int(place[2] or 1)
            lines.update(range(start, start + count))
    return found


def tests_for(mutant: Mutant, tree: Path, record: dict[str, Any]) -> list[str]:
    """The tests that reach a mutant, quickest first; tests that differ more from earlier tests come before others.

    If no test reaches it, the tests of its file.
    """
    lines, is_run_at_import = statement_at(ast.parse((tree / mutant.file).read_text()), mutant.line)
    reached = record["reached"].get(mutant.file, [])
    first, further = {name for each, names in reached if not each.isdisjoint(lines) for name in names}, set[str]()
    if is_run_at_import or "" in first:
        patterns = next((tests for files, tests in OF_TABLES.items() if fnmatch.fnmatch(mutant.file, files)), ())
        first.update(name for each in patterns for name in fnmatch.filter(record["seconds"], f"tests/*/{each}"))
        further = further.union(*(names for _, names in reached)) - first
    if not (first | further) - {""}:  # it may run in processes that a test starts by itself
        first = set(fnmatch.filter(record["seconds"], f"tests/*/test_{Path(mutant.file).stem}.py::*"))
    seconds, seen, found = record["seconds"], Counter[str](), []
    for name in sorted((first | further) - {""}, key=lambda name: (seconds[name], name)):
        function, _, parameters = name.partition("[")
        words = parameters.rstrip("]").split("-") if parameters else ()  # a family may be new
        known = seen[function] + min((seen[word] for word in words), default=0)
        found.append((name in further, (0.05 + seconds[name]) * (1 + known), name))
        seen.update((function, *words))
    return [name for *_, name in sorted(found)]


def statement_at(module: ast.Module, line: int) -> tuple[range, bool]:
    """The lines of the smallest statement at ``line``, without the lines of its body; and whether it runs at import."""
    found, in_function = range(line, line + 1), False
    for node in ast.walk(module):
        if not isinstance(node, ast.stmt):
            continue
        body, decorators = getattr(node, "body", None), getattr(node, "decorator_list", ())
        start = min([node.lineno, *(each.lineno for each in decorators)])
        stop = body[0].lineno if body else node.end_lineno + 1
        if start <= line < stop:
            found = range(start, stop)
        in_function |= isinstance(node, ast.FunctionDef) and stop <= line <= node.end_lineno
    return found, not in_function


def run(tree: Path, mutants: list[Mutant], record: dict[str, Any], asked: argparse.Namespace) -> None:
    """Write a line of JSON for each mutant, and the score at the end."""
    known = asked.folder / "results.jsonl"
    lines = [json.loads(line) for line in known.read_text().splitlines()] if known.exists() else []
    results = {tuple(each["mutant"].values()): each for each in lines}
    equivalent = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["mutant"]
    believed = {AT_IMPORT: True}
    for number, mutant in enumerate(mutants):
        key = tuple(asdict(mutant).values())
        if key in results and not (asked.again and results[key]["outcome"] not in ("killed", "equivalent")):
            continue
        begin = time.monotonic()
        was = (tree / mutant.file).read_text()
        becomes = mutant.code(was)
        old, new = changed(was, becomes)
        result = {"mutant": asdict(mutant), "was": old, "becomes": new}
        if any(each["was"] == old and each["becomes"] == new for each in equivalent):
            result |= {"outcome": "equivalent", "by": ""}
        else:
            write(tree / mutant.file, becomes, number + 1)
            try:
                outcome, by = outcome_of(tree, tests_for(mutant, tree, record), record["seconds"], asked.budget)
            finally:
                write(tree / mutant.file, was, 0)
            if outcome == "killed" and by not in believed:  # a test may fail here whatever is tested
                believed[by] = fork.forked(tree, 300.0, "run", [by]) == []
            if outcome == "killed" and not believed[by]:
                outcome = "not decided"
            result |= {"outcome": outcome, "by": by}
        result["seconds"] = round(time.monotonic() - begin, 1)
        results[key] = result
        with known.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{number + 1} {mutant.file}:{mutant.line} {result['outcome']} by {result['by']}, {result['seconds']} s")
        print(f"    - {old}\n    + {new}", flush=True)
    outcomes = [results[tuple(asdict(mutant).values())]["outcome"] for mutant in mutants]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}, "of", len(mutants), "drawn")


def write(path: Path, code: str, number: int) -> None:
    """Write a file with a new time of change, so that Python does not use the compiled code of an earlier one."""
    path.write_text(code)
    os.utime(path, (1_000_000_000 + number,) * 2)


def changed(was: str, becomes: str) -> tuple[str, str]:
    """The lines that differ."""
    lines = list(difflib.ndiff(was.splitlines(), becomes.splitlines()))
    old, new = (" ".join(line[2:].strip() for line in lines if line.startswith(mark)) for mark in ("- ", "+ "))
    return old, new


def outcome_of(tree: Path, tests: list[str], seconds: dict[str, float], budget: float) -> tuple[str, str]:
    """The outcome of the mutant in the tree, and the test that decided it."""
    if not tests:
        return "survived", "no test"
    first, further, spent = [], [], 0.0
    for name in tests:
        spent += 0.02 + seconds[name]
        if spent > budget and first:
            break
        (first if spent < FIRST or not first else further).append(name)
    for batch in filter(None, (first, further)):
        limit = PATIENCE * (FIRST + sum(seconds[name] for name in batch))
        failed = fork.forked(tree, limit, "run", batch)
        if failed is None:
            return "out of time", ""
        if failed:
            return "killed", failed[0]
    return "survived", f"{len(first) + len(further)} tests"


if __name__ == "__main__":
    main()
