"""A text corpus that every machine with Python already has: the standard library's own sources, as bytes.

Tests are left out, files are shuffled with a fixed seed and split, so that no file is in both parts. The result is
cached as one `.bin` of bytes and one `.json` that says what is in it; without a writable cache it stays in memory.

Legend: B sequences, S positions; a token is a byte, the vocabulary is 256.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 256
SEPARATOR = b"\0"  # after each file; no Python source holds it
_FORMAT = 1
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
_SPLIT_SEED = 1234
_VALID_SHARE = 0.05
_LEAST_BYTES = 200_000


@dataclass(frozen=True)
class Corpus:
    """`train` and `valid` are token ids, unsigned; of bytes uint8, one byte a token. `provenance` says what they are.

    Ids are below `vocab_size`; a token stands for `bytes_per_token` bytes of the validation text on average.
    """

    train: np.ndarray
    valid: np.ndarray
    provenance: dict[str, Any]
    vocab_size: int = VOCAB_SIZE
    bytes_per_token: float = 1.0

    def batch(self, seed: int, step: int, batch: int, length: int, micro_step: int = 0) -> dict[str, Tensor]:
        """The training batch of one (seed, step, micro-step): `input_ids` and `labels`, int64 [B, S] each.

        Windows are drawn at random with a counter-based generator, so the batch of a step depends on nothing before
        it: runs that resume, and arms that are compared, see equal batches.
        """
        if length >= self.train.size:
            raise GradreelError(f"batch length is {length}; allowed: [1, {self.train.size - 1}], the size of the text")
        counter = np.random.Philox(key=[seed, (step << 16) + micro_step])
        starts = np.random.Generator(counter).integers(0, self.train.size - length, size=batch)
        return _windows(self.train, starts, length)

    def valid_batches(self, count: int, batch: int, length: int) -> list[dict[str, Tensor]]:
        """`count` fixed batches of validation text: windows evenly spread, the same in every call."""
        if length >= self.valid.size:
            most = self.valid.size - 1
            raise GradreelError(f"validation length is {length}; allowed: [1, {most}], the size of the text")
        starts = np.linspace(0, self.valid.size - length - 1, count * batch).astype(np.int64)
        return [_windows(self.valid, part, length) for part in np.split(starts, count)]


def stdlib_corpus(cache: Path | None = None, root: Path | None = None) -> Corpus:
    """Load the corpus from `cache` (default: the user's cache folder), or build it from `root` (default: the stdlib).

    Raises GradreelError where the interpreter came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = _sources(root)
    key = _key(root, files)
    folder = cache_dir() if cache is None else cache
    cached = _load(folder, key)
    if cached is not None:
        return cached
    corpus, payload = _build(root, files, key)
    _store(folder, key, corpus.provenance, payload)
    return corpus


def cache_dir() -> Path:
    """Where this project caches: `$GRADREEL_CACHE`, else `gradreel` in the platform's cache folder."""
    given = os.environ.get("GRADREEL_CACHE")
    if given:
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local")
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return base.expanduser() / "gradreel"
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / "gradreel"


def _sources(root: Path) -> list[Path]:
    """Every source below `root` that is no test, sorted by its path in POSIX form."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _key(root: Path, files: list[Path]) -> str:
    """Changes when a file is added, removed or of another size, and with the rules of this module."""
    state = hashlib.sha256(repr((_FORMAT, _SPLIT_SEED, _VALID_SHARE, platform.python_version())).encode())
    for path in files:
        state.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
    return state.hexdigest()[:16]


def _build(root: Path, files: list[Path], key: str) -> tuple[Corpus, bytes]:
    texts = [path.read_bytes() for path in files]
    if sum(map(len, texts)) < _LEAST_BYTES:
        raise GradreelError(
            f"the Python library at {str(root)!r} holds {sum(map(len, texts))} bytes of sources, {_LEAST_BYTES} are "
            "needed; use a Python that was installed with its sources"
        )
    order = list(range(len(files)))
    random.Random(_SPLIT_SEED).shuffle(order)
    held_out = max(1, round(len(order) * _VALID_SHARE))
    valid, train = (b"".join(texts[i] + SEPARATOR for i in part) for part in (order[:held_out], order[held_out:]))
    payload = train + valid
    provenance = {
        "name": "stdlib",
        "format": _FORMAT,
        "key": key,
        "python": platform.python_version(),
        "files": len(files),
        "valid_files": sorted(files[i].relative_to(root).as_posix() for i in order[:held_out]),
        "split_seed": _SPLIT_SEED,
        "train_bytes": len(train),
        "valid_bytes": len(valid),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    return _split(payload, provenance), payload


def _split(payload: bytes, provenance: dict[str, Any]) -> Corpus:
    tokens = np.frombuffer(payload, dtype=np.uint8)
    return Corpus(tokens[: provenance["train_bytes"]], tokens[provenance["train_bytes"] :], provenance)


def _load(folder: Path, key: str) -> Corpus | None:
    """The cached corpus, or None where it is absent, unreadable or damaged."""
    try:
        provenance = json.loads((folder / f"stdlib-{key}.json").read_text())
        payload = (folder / f"stdlib-{key}.bin").read_bytes()
        sound = (
            provenance["sha256"] == hashlib.sha256(payload).hexdigest()
            and provenance["train_bytes"] + provenance["valid_bytes"] == len(payload)
            and provenance["format"] == _FORMAT
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _split(payload, provenance) if sound else None


def _store(folder: Path, key: str, provenance: dict[str, Any], payload: bytes) -> None:
    """Write both files aside and rename them; a cache that cannot be written is no error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (
            (f"stdlib-{key}.bin", payload),
            (f"stdlib-{key}.json", json.dumps(provenance, indent=1).encode()),
        ):
            handle, aside = tempfile.mkstemp(dir=folder, prefix=name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(aside, folder / name)
            except OSError:
                Path(aside).unlink(missing_ok=True)
                raise
    except OSError:
        return


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> dict[str, Tensor]:
    import torch

    cut = torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return {"input_ids": cut[:, :-1].contiguous(), "labels": cut[:, 1:].contiguous()}
