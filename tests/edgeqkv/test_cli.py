"""What every command's --help says, read as a person would see it."""

import re
from importlib.metadata import entry_points

import pytest

COMMANDS = sorted(e.name for e in entry_points(group="edgeqkv.commands"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_word_and_an_example(cli, command):
    done = cli(command, "--help", env={"COLUMNS": "100"}, check=0)
    assert "Example" in done.stdout
    # What stands in square brackets within a help text would be taken for markup, and vanish.
    assert not re.search(r"\w \.(\s|$)", done.stdout), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
