"""Data by name, so that an experiment can say what it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from traces.errors import unknown

if TYPE_CHECKING:
    from torch import Tensor


class Text(Protocol):
    """What training needs of a data set. A batch is `input_ids` and `labels` (already shifted), int64 [B, S] each."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What the text is: a name, sizes, a sha256 of its content where there is one."""

    def batch(self, seed: int, step: int, batch: int, length: int, micro_step: int = 0) -> dict[str, Tensor]:
        """The training batch of one (seed, step, micro-step), the same at every call."""

    def valid_batches(self, count: int, batch: int, length: int) -> list[dict[str, Tensor]]:
        """`count` fixed batches of text that is not trained on."""


def _stdlib(options: Mapping[str, Any]) -> Text:
    from ablations.data.corpus import stdlib_corpus

    return stdlib_corpus(**options)


#: Sources by name: a function from the options to the text.
SOURCES: dict[str, Callable[[Mapping[str, Any]], Text]] = {"stdlib": _stdlib}


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
