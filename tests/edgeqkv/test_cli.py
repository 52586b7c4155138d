"""What every command says to --help and to what is wrong: one line on stderr and a fixed status."""

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from device_bench import self_test
from edgeqkv import cli as command_line
from edgeqkv.model_dir import save_model_dir
from edgeqkv.tokenizer import byte_tokenizer
from tests.variants import random_decoder, spec

COMMANDS = sorted(e.name for e in entry_points(group="edgeqkv.commands"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_word_and_an_example(cli, command):
    done = cli(command, "--help", env={"COLUMNS": "100"}, check=0)
    assert "Example" in done.stdout
    # What stands in square brackets within a help text would be taken for markup, and vanish.
    assert not re.search(r"\w \.(\s|$)", done.stdout), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    (usage,) = re.findall("Usage: .*", done.stdout)
    assert not re.search(r"[{}]|\[\[|\.\.\.\]\.\.\.", usage), usage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a bundle without tokenizer, and much that is neither."""
    folder = tmp_path_factory.mktemp("files")
    model = spec(vocab_size=256, num_used_tokens=None, num_key_value_heads=1, qkv_sharing="k=v")
    save_model_dir(
        folder / "model",
        model,
        random_decoder(model).state_dict(),
        {"source": "test"},
        tokenizer_json=byte_tokenizer().to_str(),
    )
    self_test.write_bundle(folder / "bundle", "growing")
    (folder / "empty").mkdir()
    for name, content in {
        "garbage": os.urandom(4000),
        "nothing.txt": b"",
        "short.txt": b"a short text\n",
        "latin.txt": b"\xff\xfe",
        "recipe.toml": b"[[rules]\n",
        "bracket.toml": b"[[rules]]\npattern = '['\nweights = 'int8'\n",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    return folder


@pytest.fixture
def said(folder, monkeypatch, capsys):
    """(exit status, the one line on stderr) of a command line, run in this process."""

    def run(arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["edgeqkv", *shlex.split(arguments)])
        before = sorted(os.listdir())  # noqa: PTH208
        with pytest.raises(SystemExit) as exit_:
            command_line.main()
        out, err = capsys.readouterr()
        assert out == ""
        assert sorted(os.listdir()) == before  # noqa: PTH208
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        assert "unexpected" not in line.replace("unexpected extra argument", "")
        return exit_.value.code, line

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_use_of_every_command_is_one_line_and_2(said, command):
    for wrong, words in {"--nope": "no such option: --nope", "--json=3": "'--json'"}.items():
        status, line = said(f"{command} {wrong}")
        assert status == 2
        assert line.startswith(f"error: edgeqkv {command}: ")
        assert words in line
        assert line.endswith(f"; see edgeqkv {command} --help")
    if command != "devices":  # which needs no argument
        status, line = said(command)
        assert status == 2
        assert re.search("missing (argument [A-Z]|argument build|option -)|give ", line)


# A file that is missing or malformed is 1; a flag whose value is not allowed, be it for this model, 2.
@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, "nope", "no such command 'nope'"),
        (2, "bench bundle -r x", "-r/--repetitions is 'x': it should be a valid integer; see"),
        (2, "bench bundle -r 1 --repetitions 2", "-r/--repetitions is given 2 times; give it once"),
        (2, "estimate --preset 300m-qkv --preset 300m-mqa", "--preset is given 2 times"),
        *(
            (1, f"{command} {path} {more}", f"{path} ")
            for path in ("nowhere", "empty", "garbage", "broken", "fifo")
            for command, more in {
                "inspect": "",
                "import": "-o out",
                "export": "-o out",
                "verify": "",
                "audit": "",
                "eval": "--text short.txt",
                "generate": "--prompt a",
                "bench": "",
                "estimate": "",
            }.items()
        ),
        *(
            (1, f"{command} {path}", f"text {path} ")
            for path in ("nowhere", "empty", "nothing.txt", "latin.txt", "fifo")
            for command in (
                "train -o out --text",
                "eval bundle --text",
                "export model -o out -b onnx --weights int4 --calibrate",
            )
        ),
        (1, "export model -o out -b onnx --weights int4 --calibrate short.txt", "text short.txt"),
        (1, "train -o out --text short.txt", "--text short.txt: the text is too short"),
        (1, "export model -o out -b onnx --recipe nowhere", "recipe nowhere does not exist"),
        (1, "export model -o out -b onnx --recipe recipe.toml", "recipe.toml is not TOML"),
        (1, "export model -o out -b onnx --recipe bracket.toml", "pattern '[' matches no module"),
        (1, "eval bundle --text short.txt", "bundle has no tokenizer.json"),
        (1, "eval model --text short.txt --tokenizer ''", "has no tokenizer"),
        (2, "export model -o model/config.json", "config.json is a file"),
        (2, "export model -o broken", "broken is a link that leads nowhere"),
        (2, "import model -o . --overwrite", "holds where you are"),
        (1, "generate bundle --prompt a", "bundle has no tokenizer.json"),
        (2, "generate bundle --prompt '' --tokenizer byte", "--prompt is ''"),
        (2, "generate bundle --prompt a -n 99999999 --tokenizer byte", "-n is 99999999"),
        (2, "generate bundle --prompt a --temperature nan", "--temperature is nan"),
        (2, "export model -o out -b onnx,foo", "-b is 'foo'; allowed: onnx"),
        (2, "export model -o out --max-context 0", "--max-context"),
        (2, "export model -o out --weights int3", "--weights: weights is 'int3'; allowed"),
        (2, "export model -o out --weights int4 --group-size 7", "--group-size"),
        (2, "export model -o out --cache-dtype int3", "--cache-dtype"),
        (2, "export model -o out --cache-layout both", "--cache-layout"),
        (2, "export model -o out -b onnx --io foo", "--io is 'foo'; allowed: edgeqkv, optimum"),
        (2, "estimate model --groups 7", "--groups is 7; it must divide the model's 4"),
        (2, "estimate model --weights int3", "--weights is 'int3'"),
        (2, "estimate model --cache-dtype fp8", "--cache-dtype"),
        (2, "estimate model --budget big", "--budget"),
        (2, "init -o out --preset nope", "--preset"),
        *(
            (2, f"{command} -o /dev/fd/x", " cannot be made in /dev/fd: ")
            for command in (
                "import model",
                "init --preset 1.2b-qkv",
                "export model",
                "train --text short.txt",
            )
        ),
        (2, "train -o out --text short.txt --lr nan", "--lr is nan"),
        (2, "train -o out --text short.txt --kv-heads 3", "--kv-heads is 3"),
        (2, "device build-runner --abi mips", "--abi is 'mips'; allowed: arm64"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_how_to_mend_it(said, status, arguments, words):
    found, line = said(arguments)
    assert words in line
    assert found == status
    assert re.search("; |allowed: |give ", line)


def test_alone_it_shows_its_help(cli):
    assert "Usage: edgeqkv" in cli(check=0).stdout


def test_a_name_that_nobody_can_print_is_printed_escaped(cli):
    done = cli("inspect", "esc\x1b[31m\udcff", check=1)
    assert "esc\\x1b[31m\\udcff does not exist" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="descriptors as POSIX knows them")
@pytest.mark.parametrize(
    ("shell", "status", "lines"), [(">&- <&-", 0, 0), ("> /dev/full", 1, 1), ("| true", 0, 0)]
)
def test_streams_that_are_closed_or_full(folder, shell, status, lines):
    code = "import sys; from edgeqkv.cli import main; sys.argv[1:] = 'inspect', 'model'; main()"
    line = f"{shlex.join([sys.executable, '-c', code])} {shell}"
    done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (status, lines), done.stderr


def test_the_signals_are_the_callers_again(said):
    before = signal.getsignal(signal.SIGTERM)
    said("inspect nowhere")
    assert signal.getsignal(signal.SIGTERM) == before


_SIGNALLED_IN_AN_IMPORT = """
import os, signal, sys, time
from importlib.machinery import ExtensionFileLoader
from edgeqkv.cli import main
import edgeqkv.commands.inspect
signal.signal(signal.SIGINT, signal.default_int_handler)
usual, number = ExtensionFileLoader.create_module, int(sys.argv[1])
def create_module(self, spec):
    ExtensionFileLoader.create_module = usual
    os.kill(os.getpid(), number)
    module = usual(self, spec)
    print("whole", flush=True)
    return module
def run():
    ExtensionFileLoader.create_module = create_module
    import numpy
    time.sleep(60)
edgeqkv.commands.inspect.run = run
sys.argv[1:] = ["inspect"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_comes_between_a_library_and_its_setup(number):
    """It crashed onnx, a process in twelve that was stopped as it began to lower."""
    code = [sys.executable, "-c", _SIGNALLED_IN_AN_IMPORT, str(int(number))]
    done = subprocess.run(code, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (128 + number, "whole\n"), done.stderr
