"""The README cannot go stale: its tree is the real tree, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<name>[\w.\-]+/?) +# \S")


def tree_of_readme() -> set[str]:
    block = re.search(r"<!-- tree -->\n```text\n(.*?)```", README, re.DOTALL)
    assert block, "README.md holds no file tree after <!-- tree -->"
    paths, parents = set(), [""]
    for line in block.group(1).splitlines():
        match = TREE_LINE.match(line)
        assert match, f"README tree line without a comment: {line!r}"
        depth = len(match["indent"]) // 2
        parents[depth + 1 :] = [parents[depth] + match["name"]]
        paths.add(parents[depth + 1])
    return paths


def tree_on_disk() -> set[str]:
    """Top-level entries, and the folders one level below the code."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    paths = set()
    for line in listed.splitlines():
        parts = line.split("/")
        if parts[0].startswith("."):
            continue
        paths.add(parts[0] + ("/" if len(parts) > 1 else ""))
        if len(parts) > 2 and parts[0] in ("traces", "toolkit", "ablations", "tests"):
            paths.add(f"{parts[0]}/{parts[1]}/")
        elif len(parts) == 2 and parts[0] == "tests":
            paths.add(line)
    return paths


def test_tree_in_readme_is_the_real_tree() -> None:
    assert tree_of_readme() == tree_on_disk()


def test_every_verb_in_readme_exists() -> None:
    verbs = set(re.findall(r"^(?:\$ )?gradreel ([a-z]+)", README, re.MULTILINE))
    shown = subprocess.run(
        [sys.executable, "-m", "ablations.cli", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert verbs, "README shows no gradreel command"
    assert {verb for verb in verbs if not re.search(rf"\b{verb}\b", shown)} == set()


def test_open_loop_sentence_is_there() -> None:
    from toolkit.frame import OPEN_LOOP_NOTE

    assert OPEN_LOOP_NOTE in README


# What a reader has before the first snippet: a model, its optimizer and a training loop.
READER = """
import torch
from ablations.models import MoEConfig, MoELanguageModel

model = MoELanguageModel(MoEConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, max_positions=16, dense_hidden=16, expert_hidden=8, num_experts=4, top_k=2, moe_layers=(1,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(model, optimizer):
    for _ in range(4):
        tokens = torch.randint(0, 32, (2, 8))
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_python_in_readme_runs_word_for_word(tmp_path: Path) -> None:
    """In one fresh process and in their order: a package's function must be found whatever was imported before."""
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) >= 3
    script = tmp_path / "reader.py"
    script.write_text("\n".join([READER, *snippets, "train(model, optimizer)", "print(result.frame.height)"]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
