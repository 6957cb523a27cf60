"""From documents to tokens, and files of tokens that exist already.

`text`, `jsonl`, `parquet` and `huggingface` take the options of their reader in `documents.py`, and beside them
`tokenizer` ("bytes", "bpe:N" to train one of N tokens on the training documents, or the path of a tokenizer.json),
`max_bytes` of text, and `valid_share`. `bin` is described at `token_file`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ablations.data.corpus import SEPARATOR, VOCAB_SIZE, Corpus
from ablations.data.documents import READERS, bounded
from traces.errors import GradreelError

MAX_BYTES = 256 << 20
VALID_SHARE = 0.05
_TRAINING_BYTES = 16 << 20  # of text that a tokenizer is trained on
_END = ("<|endoftext|>", "</s>", "<eos>")
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Tokenizer:
    """`encode` turns a document (UTF-8) into ids, its end included; `sha256` names the tokenizer."""

    name: str
    vocab_size: int
    encode: Callable[[bytes], Any]
    sha256: str


def documents(source: str, options: Mapping[str, Any]) -> Corpus:
    """The documents of `source` as tokens, split by document. Errors: GradreelError, one line."""
    given = dict(options)
    tokenizer = str(given.pop("tokenizer", "bytes"))
    most = given.pop("max_bytes", MAX_BYTES)
    share = given.pop("valid_share", VALID_SHARE)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise GradreelError(f"data max_bytes is {most!r}; allowed: whole numbers of at least 1")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise GradreelError(f"data valid_share is {share!r}; allowed: (0, 1)")
    try:
        found = READERS[source](**given)
    except TypeError as error:
        raise GradreelError(f"data source {source}: {str(error).replace('()', '')}; see `ablations.data`") from None
    train: list[bytes] = []
    valid: list[bytes] = []
    content = hashlib.sha256()
    for document in bounded(found, most):
        digest = hashlib.sha256(document).digest()
        content.update(digest)
        on_valid_side = int.from_bytes(digest[:8], "big") < share * 2**64
        (valid if on_valid_side else train).append(document)
    if not train or not valid:
        raise GradreelError(
            f"data source {source} gave {len(train)} documents for training and {len(valid)} for validation (by their "
            f"hash, share {share:g}); both need one: give more documents, or another valid_share"
        )
    by = _tokenizer(tokenizer, train)
    tokens_train, tokens_valid = _encoded(by, train), _encoded(by, valid)
    valid_bytes = sum(len(document) for document in valid)
    return Corpus(
        tokens_train,
        tokens_valid,
        {
            "source": source,
            **{key: value for key, value in given.items() if isinstance(value, (str, int, float))},
            "sha256": content.hexdigest(),
            "tokenizer": by.name,
            "tokenizer_sha256": by.sha256,
            "train_documents": len(train),
            "valid_documents": len(valid),
            "train_tokens": int(tokens_train.size),
            "valid_tokens": int(tokens_valid.size),
        },
        vocab_size=by.vocab_size,
        bytes_per_token=1.0 if by.name == "bytes" else valid_bytes / tokens_valid.size,
    )


def token_file(
    path: str, dtype: str | None = None, vocab_size: int | None = None, bytes_per_token: float | None = None
) -> Corpus:
    """A file of nothing but token ids, uint16 or uint32, little-endian; its last twentieth is for validation.

    What is not given comes from `PATH.json` beside it, with the same names. Losses are per byte where
    `bytes_per_token` is known, else per token.
    """
    place = Path(path)
    said = {"dtype": dtype, "vocab_size": vocab_size, "bytes_per_token": bytes_per_token}
    beside = place.with_name(place.name + ".json")
    if beside.is_file() and beside.stat().st_size < 1 << 20:
        try:
            known = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GradreelError(f"{beside} cannot be read: {error}") from None
        if isinstance(known, dict):
            said = {key: known.get(key) if value is None else value for key, value in said.items()}
    if said["dtype"] not in ("uint16", "uint32"):
        raise GradreelError(
            f"token file {path!r}: dtype is {said['dtype']!r}; allowed: uint16, uint32, here or in {beside}"
        )
    vocabulary = said["vocab_size"]
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < 1:
        raise GradreelError(f"token file {path!r}: vocab_size is {vocabulary!r}; give it, here or in {beside}")
    kind = np.dtype(f"<u{2 if said['dtype'] == 'uint16' else 4}")
    try:
        size = place.stat().st_size
        if size % kind.itemsize:
            raise GradreelError(
                f"token file {path!r} has {size} bytes, no whole number of {said['dtype']}: half written?"
            )
        if size < 40 * kind.itemsize:
            raise GradreelError(f"token file {path!r} holds {size // kind.itemsize} tokens; give at least 40")
        tokens = np.memmap(place, dtype=kind, mode="r")
    except OSError as error:
        raise GradreelError(f"data {path!r} cannot be read: {error.strerror or error}") from None
    content = hashlib.sha256()
    for start in range(0, tokens.size, _BLOCK):
        block = np.asarray(tokens[start : start + _BLOCK])
        content.update(block.tobytes())
        if int(block.max()) >= vocabulary:
            at = start + int((block >= vocabulary).argmax())
            raise GradreelError(f"token file {path!r}: token {at} is {int(tokens[at])}; allowed: below {vocabulary}")
    cut = tokens.size - max(1, tokens.size // 20)
    facts = {"source": "bin", "path": path, "sha256": content.hexdigest(), "tokens": int(tokens.size)}
    ratio = said["bytes_per_token"]
    if ratio is not None and not (isinstance(ratio, (int, float)) and ratio > 0):
        raise GradreelError(f"token file {path!r}: bytes_per_token is {ratio!r}; allowed: (0, inf)")
    return Corpus(tokens[:cut], tokens[cut:], facts, vocab_size=vocabulary, bytes_per_token=float(ratio or 1.0))


def _tokenizer(name: str, train: list[bytes]) -> Tokenizer:
    if name == "bytes":
        return Tokenizer("bytes", VOCAB_SIZE, lambda document: np.frombuffer(document + SEPARATOR, np.uint8), "")
    try:
        import tokenizers
    except ImportError:
        raise GradreelError("tokenizers other than bytes need a library: pip install 'gradreel[data]'") from None
    if name.startswith("bpe:"):
        try:
            size = int(name.removeprefix("bpe:"))
        except ValueError:
            size = 0
        if not 257 <= size <= 1 << 20:
            raise GradreelError(f"tokenizer {name!r}: allowed: bpe:N with N in [257, {1 << 20}]")
        made = tokenizers.ByteLevelBPETokenizer()
        made.train_from_iterator(_some(train), vocab_size=size, special_tokens=[_END[0]], show_progress=False)
        core = made._tokenizer
    else:
        if not Path(name).is_file():
            raise GradreelError(f"tokenizer {name!r}: allowed: bytes, bpe:N, or the path of a tokenizer.json")
        try:
            core = tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # the library raises nothing narrower
            raise GradreelError(f"tokenizer file {name!r} cannot be read: {str(error).splitlines()[0]}") from None
    end = next((core.token_to_id(mark) for mark in _END if core.token_to_id(mark) is not None), None)

    def encode(document: bytes) -> list[int]:
        ids = core.encode(document.decode("utf-8", errors="surrogatepass"), add_special_tokens=False).ids
        return ids if end is None else [*ids, end]

    sha256 = hashlib.sha256(core.to_str().encode()).hexdigest()
    return Tokenizer(name, core.get_vocab_size(with_added_tokens=True), encode, sha256)


def _some(train: list[bytes]) -> Iterable[str]:
    total = 0
    for document in train:
        total += len(document)
        yield document.decode("utf-8", errors="replace")
        if total > _TRAINING_BYTES:
            return


def _encoded(by: Tokenizer, texts: list[bytes]) -> np.ndarray:
    kind = np.uint8 if by.vocab_size <= 1 << 8 else np.uint16 if by.vocab_size <= 1 << 16 else np.uint32
    parts = [np.asarray(by.encode(text), dtype=kind) for text in texts]
    return np.concatenate(parts)
