"""Shared fixtures; and under EDGEQKV_REQUIRE_ALL=1 (CI) a test file that ran nothing is a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import session_folder

# A package that CI installs; the two others are compiled or heavy, and a person installs them.
_ABSENT = re.compile(r"could not import '(?!llama_cpp|lm_eval)")
_passed: Counter[str] = Counter()
_skipped: dict[str, str] = {}
_elsewhere: set[str] = set()  # files with tests that -m leaves to another run


def pytest_configure():
    session_folder.make()
    # A shell starts what it runs in the background deaf to Ctrl-C, and so would be what tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """The longest file first: the others fill the second core beside it."""
    items.sort(key=lambda item: "test_readme" not in item.nodeid)


def pytest_deselected(items):
    _elsewhere.update(item.nodeid.split("::")[0] for item in items)


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        _passed[report.nodeid.split("::")[0]] += 1
    if report.skipped:
        _skipped[report.nodeid] = str(report.longrepr)


def pytest_collectreport(report):
    if report.skipped:
        _skipped[report.nodeid] = str(report.longrepr)


def pytest_sessionfinish(session, exitstatus):
    of_xdist = hasattr(session.config, "workerinput")  # which sees a part; the controller sees all
    if not os.environ.get("EDGEQKV_REQUIRE_ALL") or exitstatus not in (0, 5) or of_xdist:
        return
    root = Path(str(session.config.rootpath))
    files = {p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py")}
    if idle := sorted(files - set(_passed) - _elsewhere):
        print(f"\nerror: these test files ran nothing, CI expects all of them: {idle}")
        for node, why in sorted(_skipped.items()):
            print(f"  skipped {node}: {why}")
        session.exitstatus = 1
    absent = {n: why for n, why in _skipped.items() if _ABSENT.search(why)}
    for node, why in sorted(absent.items()):
        print(f"\nerror: skipped {node}, CI expects it: {why}")
        session.exitstatus = 1


@pytest.fixture
def cli(tmp_path):
    """Run the real command in a process of its own; returns CompletedProcess with text output."""

    def run(*arguments, check=None, env=None, cwd=tmp_path, timeout=300):
        result = subprocess.run(
            [sys.executable, "-c", "from edgeqkv.cli import main; main()", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout,
            env={**os.environ, **(env or {})},
        )
        assert "Traceback" not in result.stderr, result.stderr
        if check is not None:
            assert result.returncode == check, result.stdout + result.stderr
        return result

    return run
