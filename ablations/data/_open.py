"""Data by name, so that an experiment can say what it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from torch import Tensor


class Text(Protocol):
    """What training needs of a data set. A batch is `input_ids` and `labels` (already shifted), int64 [B, S] each."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What the text is: a name, sizes, a sha256 of its content where there is one."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for on average; losses are divided by it, to be nats per byte."""

    def batch(self, seed: int, step: int, batch: int, length: int, micro_step: int = 0) -> dict[str, Tensor]:
        """The training batch of one (seed, step, micro-step), the same at every call."""

    def valid_batches(self, count: int, batch: int, length: int) -> list[dict[str, Tensor]]:
        """`count` fixed batches of text that is not trained on."""


def _stdlib(options: Mapping[str, Any]) -> Text:
    from ablations.data.corpus import stdlib_corpus

    return stdlib_corpus(**options)


def _documents(source: str) -> Callable[[Mapping[str, Any]], Text]:
    def read(options: Mapping[str, Any]) -> Text:
        from ablations.data.tokens import documents

        return documents(source, options)

    return read


def _token_file(options: Mapping[str, Any]) -> Text:
    from ablations.data.tokens import token_file

    try:
        return token_file(**options)
    except TypeError as error:
        raise GradreelError(f"data source bin: {str(error).replace('()', '')}; see `ablations.data.tokens`") from None


#: Sources by name: a function from the options to the text.
SOURCES: dict[str, Callable[[Mapping[str, Any]], Text]] = {
    "stdlib": _stdlib,
    **{source: _documents(source) for source in ("text", "jsonl", "parquet", "huggingface")},
    "bin": _token_file,
}


def open_data(source: str, options: Mapping[str, Any]) -> Text:
    """The text called `source`. Errors: GradreelError for an unknown name and for data that cannot be had."""
    if source not in SOURCES:
        raise unknown("data source", source, SOURCES)
    key = (source, repr(sorted(options.items())))
    if key not in _opened:
        _opened.clear()  # one text at a time stays in memory
        _opened[key] = SOURCES[source](options)
    return _opened[key]


_opened: dict[tuple[str, str], Text] = {}
