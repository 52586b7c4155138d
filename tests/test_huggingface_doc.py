"""Every command and every Python block of docs/huggingface.md runs, in order."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/huggingface.md").read_text("utf-8")


def test_commands_and_python_blocks(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("optimum.onnxruntime")
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
    }
    printed = {}
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.S):
        if "lm_eval" in block and importlib.util.find_spec("lm_eval") is None:
            continue  # not in the dev extra: it brings datasets and pyarrow
        command = ["sh", "-c", block] if language == "sh" else [sys.executable, "-c", block]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, f"{block}\n{result.stdout}\n{result.stderr}"
        printed[block.splitlines()[0]] = result.stdout
    eager, optimum = (text for first, text in printed.items() if first.startswith("from "))
    assert eager == optimum
    assert eager.startswith("In the beginning")
    if lm_eval := printed.get("import lm_eval"):
        assert "'bits_per_byte,none': 1.98" in lm_eval
