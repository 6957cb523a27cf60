"""Text of one's own: split by document, deterministic, and one line for what cannot be trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ablations.data import open_data
from traces.errors import GradreelError

DOCUMENTS = [f"document {number}: " + "abc xyz " * (number % 7 + 3) for number in range(200)]


def as_folder(root: Path) -> dict[str, str]:
    folder = root / "texts"
    folder.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number:03}.txt").write_text(document)
    return {"path": str(folder)}


def as_lines(root: Path) -> dict[str, str]:
    file = root / "lines.jsonl"
    file.write_text("\n".join(json.dumps({"body": document, "n": 1}) for document in DOCUMENTS))
    return {"path": str(file), "field": "body"}


def as_parquet(root: Path) -> dict[str, str]:
    file = root / "rows.parquet"
    pq.write_table(pa.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))}), file)
    return {"path": str(file)}


def as_data_set(root: Path) -> dict[str, str]:
    return {"path": as_lines(root)["path"], "column": "body"}


FORMS: dict[str, Callable[[Path], dict[str, str]]] = {
    "text": as_folder,
    "jsonl": as_lines,
    "parquet": as_parquet,
    "huggingface": as_data_set,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.parametrize("source", FORMS)
def test_every_source_gives_the_same_documents_split_by_content(source: str, tmp_path: Path, offline: None) -> None:
    if source == "huggingface":
        pytest.importorskip("datasets", reason="the extra `data` is not installed")
    text = open_data(source, FORMS[source](tmp_path))
    sides = [bytes(side).decode().split("\0")[:-1] for side in (text.train, text.valid)]
    assert sorted(sides[0] + sides[1]) == sorted(DOCUMENTS)
    assert not set(sides[0]) & set(sides[1])
    assert 2 <= len(sides[1]) <= 30  # a twentieth of 200
    assert (text.vocab_size, text.bytes_per_token) == (256, 1.0)
    again = open_data("jsonl", as_lines(tmp_path))
    assert again.provenance["sha256"] == text.provenance["sha256"]
    assert np.array_equal(again.valid, text.valid)
    first, second = text.batch(3, 7, 4, 16), again.batch(3, 7, 4, 16)
    assert first["input_ids"].equal(second["input_ids"])
    assert first["labels"][:, :-1].equal(first["input_ids"][:, 1:])


def test_one_file_is_cut_at_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("\n\n".join(DOCUMENTS))
    text = open_data("text", {"path": str(file)})
    assert text.provenance["train_documents"] + text.provenance["valid_documents"] == len(DOCUMENTS)


def test_reading_stops_at_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    text = open_data("jsonl", {**as_lines(tmp_path), "max_bytes": 4000})
    kept = text.provenance["train_documents"] + text.provenance["valid_documents"]
    assert sum(map(len, DOCUMENTS[:kept])) <= 4000 < sum(map(len, DOCUMENTS[: kept + 1]))


def test_bpe_says_how_many_bytes_a_token_stands_for_and_can_be_kept(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `data` is not installed")
    options = as_lines(tmp_path)
    text = open_data("jsonl", {**options, "tokenizer": "bpe:300"})
    assert 257 <= text.vocab_size <= 300
    assert int(max(text.train.max(), text.valid.max())) < text.vocab_size
    valid_bytes = sum(len(d) for d in bytes(open_data("jsonl", options).valid).split(b"\0"))
    assert text.bytes_per_token == pytest.approx(valid_bytes / text.valid.size)
    assert text.bytes_per_token > 1.5
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(DOCUMENTS, vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    own = open_data("jsonl", {**options, "tokenizer": str(file)})
    assert own.provenance["tokenizer_sha256"] != text.provenance["tokenizer_sha256"]
    end = made.token_to_id("<|endoftext|>")
    assert int((own.train == end).sum()) == own.provenance["train_documents"]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_read_as_they_are(dtype: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 5000, 1000).astype(dtype)
    file = tmp_path / "tokens.bin"
    tokens.tofile(file)
    (tmp_path / "tokens.bin.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 5000, "bytes_per_token": 4.5}))
    text = open_data("bin", {"path": str(file)})
    assert np.array_equal(np.concatenate([text.train, text.valid]), tokens)
    assert (text.vocab_size, text.bytes_per_token, text.valid.size) == (5000, 4.5, 50)
    assert text.batch(0, 1, 2, 8)["input_ids"].shape == (2, 8)


def _lines(root: Path, content: str) -> dict[str, str]:
    (root / "bad.jsonl").write_text(content)
    return {"path": str(root / "bad.jsonl")}


def _tokens(root: Path, content: bytes, **options: object) -> dict[str, object]:
    (root / "bad.bin").write_bytes(content)
    return {"path": str(root / "bad.bin"), "dtype": "uint16", "vocab_size": 100, **options}


BAD: dict[str, tuple[str, Callable[[Path], dict], str]] = {
    "no file": ("text", lambda root: {"path": str(root / "none")}, "cannot be read"),
    "empty folder": ("text", lambda root: {"path": str(root)}, "holds no file"),
    "no folder option": ("text", lambda root: {"way": "x"}, "unexpected keyword"),
    "not JSON": ("jsonl", lambda root: _lines(root, '{"text": "a"}\n{'), "line 2: not JSON"),
    "no field": ("jsonl", lambda root: _lines(root, '{"body": "a"}'), "no field 'text'; there is: body"),
    "not text": ("jsonl", lambda root: _lines(root, '{"text": 3}'), "field 'text' is a int"),
    "a list": ("jsonl", lambda root: _lines(root, "[1]"), "there is: list"),
    "empty": ("jsonl", lambda root: _lines(root, ""), "0 documents for training"),
    "no parquet": ("parquet", lambda root: _lines(root, "x"), "cannot be read as parquet"),
    "no column": ("parquet", lambda root: {**as_parquet(root), "column": "body"}, "no column 'body'; columns: text, n"),
    "share": ("jsonl", lambda root: {**as_lines(root), "valid_share": 0}, "valid_share is 0"),
    "most": ("jsonl", lambda root: {**as_lines(root), "max_bytes": -1}, "max_bytes is -1"),
    "tokenizer": ("jsonl", lambda root: {**as_lines(root), "tokenizer": "words"}, "allowed: bytes, bpe:N"),
    "tokenizer size": ("jsonl", lambda root: {**as_lines(root), "tokenizer": "bpe:many"}, "bpe:N with N in"),
    "half a token": ("bin", lambda root: _tokens(root, b"\1" * 101), "half written"),
    "few tokens": ("bin", lambda root: _tokens(root, b"\1\0" * 3), "holds 3 tokens"),
    "large token": ("bin", lambda root: _tokens(root, b"\1\0" * 50 + b"\xff\0"), "token 50 is 255; allowed: below 100"),
    "no dtype": ("bin", lambda root: _tokens(root, b"\1\0" * 50, dtype="int8"), "dtype is 'int8'"),
    "no vocabulary": ("bin", lambda root: _tokens(root, b"\1\0" * 50, vocab_size=0), "vocab_size is 0"),
    "unknown": ("tape", lambda root: {}, "unknown data source 'tape'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_one_line(case: str, tmp_path: Path) -> None:
    source, options, words = BAD[case]
    with pytest.raises(GradreelError) as caught:
        open_data(source, options(tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_that_cannot_be_reached_is_one_line(offline: None) -> None:
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    with pytest.raises(GradreelError, match="data set 'nobody/nothing'") as caught:
        open_data("huggingface", {"path": "nobody/nothing"})
    assert "\n" not in str(caught.value)


def test_text_shorter_than_a_batch_is_one_line(tmp_path: Path) -> None:
    text = open_data("jsonl", as_lines(tmp_path))
    with pytest.raises(GradreelError, match="the size of the text"):
        text.batch(0, 1, 1, 10**6)
    with pytest.raises(GradreelError, match="validation length"):
        text.valid_batches(1, 1, 10**6)
