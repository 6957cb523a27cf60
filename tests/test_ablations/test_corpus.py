"""The offline corpus: disjoint parts, equal on every run, at home without a writable disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from ablations.data.corpus import SEPARATOR, stdlib_corpus
from traces import GradreelError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small stand-in for the standard library: 40 files of known content, and tests that must be left out."""
    root = tmp_path / "lib"
    for number in range(40):
        file = root / f"package{number % 4}" / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# file {number:02d}\n" + f"value_{number:02d} = {number}\n" * 400)
    for name in ("test", "tests", "idle_test", "site-packages"):
        (root / name).mkdir()
        (root / name / "module.py").write_text("forbidden = 1\n" * 400)
    return root


def files_in(part: np.ndarray) -> set[bytes]:
    return {text[:9] for text in part.tobytes().split(SEPARATOR) if text}


def test_no_file_is_in_both_parts_and_no_test_in_any(library: Path, tmp_path: Path) -> None:
    corpus = stdlib_corpus(tmp_path / "cache", library)
    train, valid = files_in(corpus.train), files_in(corpus.valid)
    assert train.isdisjoint(valid)
    assert train | valid == {f"# file {n:02d}".encode() for n in range(40)}
    assert len(valid) == 2 == len(corpus.provenance["valid_files"])
    assert b"forbidden" not in corpus.train.tobytes() + corpus.valid.tobytes()


def test_cache_memory_and_rebuild_agree(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    built = stdlib_corpus(cache, library)
    cached = stdlib_corpus(cache, library)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache folder should be")
    in_memory = stdlib_corpus(blocked, library)
    for other in (cached, in_memory):
        np.testing.assert_array_equal(built.train, other.train)
        np.testing.assert_array_equal(built.valid, other.valid)
        assert built.provenance == other.provenance
    assert sorted(p.suffix for p in cache.iterdir()) == [".bin", ".json"]
    assert blocked.is_file()


@pytest.mark.parametrize("damage", ["flip", "cut", "json"])
def test_a_damaged_cache_is_built_anew(library: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    built = stdlib_corpus(cache, library)
    binary, about = next(cache.glob("*.bin")), next(cache.glob("*.json"))
    if damage == "json":
        about.write_text("{")
    else:
        payload = bytearray(binary.read_bytes())
        payload[7] ^= 1
        binary.write_bytes(payload if damage == "flip" else payload[:-5])
    np.testing.assert_array_equal(stdlib_corpus(cache, library).train, built.train)
    assert json.loads(about.read_text())["sha256"] == built.provenance["sha256"]


def test_a_changed_library_is_not_served_from_the_cache(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = stdlib_corpus(cache, library)
    (library / "package0" / "module0.py").write_text("# file 00\nchanged = True\n")
    after = stdlib_corpus(cache, library)
    assert before.provenance["key"] != after.provenance["key"]
    assert before.train.size + before.valid.size > after.train.size + after.valid.size


def test_a_batch_depends_on_seed_step_and_micro_step_alone(library: Path, tmp_path: Path) -> None:
    corpus = stdlib_corpus(tmp_path / "cache", library)
    first = corpus.batch(seed=1, step=5, batch=3, length=16)
    corpus.batch(seed=1, step=6, batch=3, length=16)
    again = corpus.batch(seed=1, step=5, batch=3, length=16)
    assert first["input_ids"].equal(again["input_ids"])
    assert first["input_ids"][:, 1:].equal(first["labels"][:, :-1])
    assert first["input_ids"].shape == first["labels"].shape == (3, 16)
    for other in ({"seed": 2}, {"step": 6}, {"micro_step": 1}):
        assert not corpus.batch(**{"seed": 1, "step": 5, "batch": 3, "length": 16, **other})["labels"].equal(
            first["labels"]
        )


def test_validation_batches_are_fixed(library: Path, tmp_path: Path) -> None:
    corpus = stdlib_corpus(tmp_path / "cache", library)
    first, second = corpus.valid_batches(3, 2, 32), corpus.valid_batches(3, 2, 32)
    assert len(first) == 3
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(first, second, strict=True))


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradreelError, match="holds 0 bytes of sources"):
        stdlib_corpus(tmp_path / "cache", tmp_path)


def test_too_long_a_batch_is_named(library: Path, tmp_path: Path) -> None:
    corpus = stdlib_corpus(tmp_path / "cache", library)
    with pytest.raises(GradreelError, match="allowed: "):
        corpus.batch(seed=0, step=1, batch=1, length=corpus.train.size)
