"""Runs chosen tests in this process in a given order; reports the first failure and the lines that tests reach."""

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
AT_IMPORT = "what is at import"
"""The result if an error comes from outside of tests."""
Reached = dict[str, dict[int, list[str]]]
"""For each file and line, the tests that run it. The number 0 and the name "" mean the import, before all tests."""


class Chosen:
    """A plugin of pytest: only the requested tests, in the requested order. If none are requested, all tests."""

    def __init__(self, asked: list[str]) -> None:
        self.order = {name: place for place, name in enumerate(asked)}
        self.seconds: dict[str, float] = {}
        self.passed: list[str] = []
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order:
            asked = {item: self.order.get(item.nodeid, self.order.get(item.location[0])) for item in items}
            items[:] = sorted((item for item in items if asked[item] is not None), key=asked.__getitem__)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run(asked: list[str]) -> list[str]:
    """The first failing test of these tests or files; None if all pass."""
    chosen = Chosen(asked)
    files = sorted({name.partition("::")[0] for name in asked})
    status = pytest.main([*files, "-x", *PLAIN], [chosen])
    return [] if status == pytest.ExitCode.OK else chosen.failed or [AT_IMPORT]


class Tracing:
    """A plugin of pytest that records the lines that each test reaches, in this process and in workers of the pool."""

    def __init__(self, tree: Path, notes: Path) -> None:
        self.coverage, self.notes = started(tree, ""), notes

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        from tests.support import pool

        self.coverage.switch_context(item.nodeid)
        real = pool._run
        pool._run = lambda world_size, function, arguments, timeout: real(
            world_size, traced, (str(self.notes), item.nodeid, function, *arguments), 3 * timeout
        )
        yield
        pool._run = real
        self.coverage.switch_context("")
        for name, module in list(sys.modules.items()):  # whoever uses a cached result reaches its code, too
            if name.startswith("mcore_bridge"):
                for each in list(vars(module).values()):
                    getattr(each, "cache_clear", int)()


def started(tree: Path, context: str) -> Any:
    from coverage import Coverage

    coverage = Coverage(data_file=None, config_file=False, source=[str(tree / "mcore_bridge")], context=context)
    coverage.start()
    return coverage


def traced(notes: str, name: str, function: Any, *arguments: Any) -> Any:
    """Run ``function`` in a worker, and record the lines that it reaches."""
    coverage, begin = started(Path.cwd(), name), time.monotonic()
    try:
        return function(*arguments)
    finally:
        coverage.stop()
        note = {"name": name, "seconds": time.monotonic() - begin, "reached": _reached(coverage)}
        (Path(notes) / uuid.uuid4().hex).write_text(json.dumps(note))


def _reached(coverage: Any) -> Reached:
    data = coverage.get_data()
    return {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}


def record(file: str, notes: str) -> dict[str, Any]:
    """The seconds of each test of a file that passes, with its workers, and the lines that tests reach.

    For each file of the code, these are pairs: lines, and the numbers of the tests that run the lines.
    """
    folder = Path(notes)
    folder.mkdir(parents=True, exist_ok=True)
    chosen, tracing = Chosen([]), Tracing(Path.cwd(), folder)
    pytest.main([file, *PLAIN], [chosen, tracing])
    tracing.coverage.stop()
    found: dict[str, dict[int, set[str]]] = {}
    of_workers = [json.loads(note.read_text()) for note in folder.iterdir()]
    for each in of_workers:
        chosen.seconds[each["name"]] += each["seconds"]
    for each in (_reached(tracing.coverage), *(note["reached"] for note in of_workers)):
        for path, lines in each.items():
            for line, names in lines.items():
                found.setdefault(path, {}).setdefault(int(line), set()).update(names)
    passed = sorted(set(chosen.passed) - set(chosen.failed))
    numbers = {name: number for number, name in enumerate(["", *passed])}
    return {
        "seconds": {name: round(chosen.seconds[name], 3) for name in passed},
        "reached": {path: _pairs(lines, numbers) for path, lines in found.items()},
    }


def _pairs(lines: dict[int, set[str]], numbers: dict[str, int]) -> list[tuple[list[int], list[int]]]:
    """Pairs of lines and tests. There are few, since all lines of a function are mostly run by equal sets of tests."""
    pairs: dict[frozenset[str], list[int]] = {}
    for line, names in lines.items():
        pairs.setdefault(frozenset(names & numbers.keys()), []).append(line)
    return [(of_one, sorted(numbers[name] for name in names)) for names, of_one in pairs.items() if names]
