"""One rank's folder: its header, its chain of seals, its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from traces._files import Stamp, short
from traces._store import StoreError, as_place, names_in, there_is
from traces.chunks import ChunkFile
from traces.errors import GradreelError, TraceError
from traces.rank_headers import RankHeader, read_rank_header
from traces.routing import RoutingFile
from traces.schema import Header, read_header
from traces.seals import (
    NO_HASH,
    RANK_FOLDER,
    SEAL_NAME,
    End,
    FileEntry,
    SchemaTables,
    Seal,
    SealedStep,
    read_end,
    read_seal,
)

_KEPT_SEALS = 8
_KEPT_ROUTING = 2
_KEPT_INDEXES = 64


@dataclass(frozen=True, slots=True)
class SealSummary:
    """What is kept in memory of each seal; step records are read again when they are needed."""

    number: int
    sha256: str
    files: tuple[FileEntry, ...]
    steps: tuple[int, ...]
    recorded: tuple[bool, ...]

    def file(self, kind: str) -> FileEntry | None:
        """The file of this kind, or None."""
        return next((f for f in self.files if f.name.startswith(f"{kind}-")), None)


def find_trace(path: str | Path) -> tuple[Path, Header, str]:
    """Check that `path` is a trace folder and read its header; return the folder, the header and its hash."""
    shown = ascii(str(path))
    try:
        folder = as_place(path)
        if not folder.exists():
            raise TraceError(f"{shown} does not exist; give the path of a trace folder (NAME.trace)")
        if not folder.is_dir():
            raise TraceError(f"{shown} is a file, not a trace; give the path of a trace folder (NAME.trace)")
        if not there_is(folder / "header.json"):
            raise TraceError(
                f"{shown} is no trace: it holds no header.json; give the path of a trace folder (NAME.trace)"
            )
    except (OSError, ValueError) as error:
        if isinstance(error, GradreelError):
            raise
        if isinstance(error, StoreError):
            raise TraceError(f"{str(folder)!r} cannot be reached: {error.strerror}") from None
        raise TraceError(f"{shown} cannot be opened: {error}") from None
    header, digest = read_header(folder / "header.json")
    return folder, header, digest


def rank_folders(folder: Path, ranks: int) -> dict[int, Path]:
    """The folders of the ranks that are there, by rank; a surplus or linked one raises `TraceError`."""
    found: dict[int, Path] = {}
    for name in names_in(folder):
        match = RANK_FOLDER.fullmatch(name)
        if match is None:
            continue
        if int(match[1]) >= ranks:
            raise TraceError(f"{short(folder / name)} is one rank too many; the header says the run had {ranks}")
        if (folder / name).is_symlink() or not (folder / name).is_dir():
            raise TraceError(f"{short(folder / name)} is not a folder of its own; links are refused")
        found[int(match[1])] = folder / name
    return found


def absent_ranks(found: Iterable[int], ranks: int) -> str:
    """The ranks that are not there, as words ("rank 1", "ranks 2 to 5, 7"); empty where all are."""
    known = sorted(found)
    gaps, before = [], -1
    for rank in (*known, ranks):
        if rank > before + 1:
            gaps.append(f"{before + 1}" if rank == before + 2 else f"{before + 1} to {rank - 1}")
        before = rank
    if not gaps:
        return ""
    many = len(gaps) > 1 or " to " in gaps[0]
    return f"rank{'s' * many} {', '.join(gaps[:8])}{', ...' if len(gaps) > 8 else ''}"


def missing_folder(folder: Path, found: Iterable[int], ranks: int) -> TraceError | None:
    """What to say of a trace that lacks the folders of some ranks; None where all are there."""
    known = set(found)
    if len(known) == ranks:
        return None
    first = next(rank for rank in range(ranks) if rank not in known)
    others = f" ({absent_ranks(known, ranks)} in all)" if ranks - len(known) > 1 else ""
    return TraceError(
        f"{short(folder / f'rank-{first:05d}')} is missing{others}; the header says the run had {ranks} ranks, copy it "
        "here" + (", or read what is there with open_trace(path, partial=True)" if known else "")
    )


class RankFolder:
    """The sealed steps of one rank, as they were when it was opened."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        header: Header,
        header_hash: str,
        *,
        check_hash: bool = True,
        tolerant: bool = False,
    ) -> None:
        self.folder, self.rank = folder, rank
        self._check_hash = check_hash
        if not any(there_is(folder / name) for name in ("header.json", "seal-000000.json")):
            raise TraceError(
                f"{short(folder)} holds nothing yet: its writer has just begun, or was killed before its first seal; "
                "wait, or remove the trace"
            )
        self.own: RankHeader = read_rank_header(folder / "header.json", rank, header, header_hash)
        self.header, self.header_hash = self.own.header, self.own.sha256
        self.tables = SchemaTables.of(self.header)
        self.end: End | None = None
        self.seals: list[SealSummary] = []
        #: With `tolerant`, what ended the chain early or is wrong with the end; the sound beginning stays readable.
        self.problems: list[tuple[str, TraceError]] = []
        self._cache: OrderedDict[int, dict[int, SealedStep]] = OrderedDict()
        self._chunks: OrderedDict[str, ChunkFile] = OrderedDict()
        #: What was hashed already: a replay walks a long trace once per group of parameters, and forgets indexes.
        self._checked: dict[str, Stamp] = {}
        self._routing: OrderedDict[str, RoutingFile] = OrderedDict()
        self._rows: OrderedDict[int, dict[tuple[int, int], int]] = OrderedDict()
        self._load(tolerant)
        self._seal_of = {step: seal for seal in self.seals for step in seal.steps}

    @property
    def finished(self) -> bool:
        """Whether the rank was ended (closed, or recovered)."""
        return self.end is not None

    @property
    def last_hash(self) -> str:
        """Hash of the last seal."""
        return self.seals[-1].sha256 if self.seals else NO_HASH

    @property
    def steps(self) -> list[int]:
        """All sealed steps."""
        return list(self._seal_of)

    def recorded(self) -> list[int]:
        """Steps of which more than scalars was recorded."""
        return [step for seal in self.seals for step, kept in zip(seal.steps, seal.recorded, strict=True) if kept]

    def seal_of(self, step: int) -> SealSummary | None:
        """The seal that holds a step, or None."""
        return self._seal_of.get(step)

    def step(self, step: int) -> SealedStep:
        """The record of a sealed step (KeyError otherwise). A few seals are kept parsed."""
        seal = self._seal_of[step]
        if seal.number not in self._cache:
            again = self._read_seal(seal.number)
            if again.sha256 != seal.sha256:
                raise TraceError(f"{short(self._seal_path(seal.number))} changed while the trace was open")
            self._cache[seal.number] = {s.step: s for s in again.steps}
            while len(self._cache) > _KEPT_SEALS:
                self._cache.popitem(last=False)
        return self._cache[seal.number][step]

    def chunk(self, seal: SealSummary, kind: str = "chunk") -> ChunkFile | None:
        """The safetensors file of a seal, or None where it wrote none."""
        entry = seal.file(kind)
        if entry is None:
            return None
        if entry.name not in self._chunks:
            steps = (seal.steps[0], seal.steps[-1])
            self._chunks[entry.name] = ChunkFile(
                self.folder / entry.name, entry, steps, self._check_hash, self._checked
            )
        self._chunks.move_to_end(entry.name)
        if len(self._chunks) > _KEPT_INDEXES:
            self._chunks.popitem(last=False)
        return self._chunks[entry.name]

    def routing(self, seal: SealSummary) -> RoutingFile | None:
        """The routing file of a seal, or None where it wrote none."""
        entry = seal.file("routing")
        if entry is None:
            return None
        if entry.name not in self._routing:
            steps = (seal.steps[0], seal.steps[-1])
            self._routing[entry.name] = RoutingFile(self.folder / entry.name, entry, steps, self.header.layers)
        self._routing.move_to_end(entry.name)
        for old in list(self._routing)[:-_KEPT_ROUTING]:
            self._routing[old].forget()
        return self._routing[entry.name]

    def row_start(self, seal: SealSummary, step: int, layer: int) -> int:
        """First row of (step, layer) in the routing file of a seal; rows are sorted by layer, step, micro-step."""
        if seal.number not in self._rows:
            blocks = sorted((row[0], s, row[2]) for s in seal.steps for row in self.step(s).routing)
            starts: dict[tuple[int, int], int] = {}
            total = 0
            for number, at, count in blocks:
                starts.setdefault((number, at), total)
                total += count
            self._rows[seal.number] = starts
            while len(self._rows) > _KEPT_SEALS:
                self._rows.popitem(last=False)
        return self._rows[seal.number][layer, step]

    def _seal_path(self, number: int) -> Path:
        return self.folder / f"seal-{number:06d}.json"

    def _read_seal(self, number: int) -> Seal:
        return read_seal(self._seal_path(number), number, self.rank, self.header_hash, self.tables)

    def _load(self, tolerant: bool) -> None:
        end_path = self.folder / "end.json"
        try:  # the end is looked for first: a trace that is ended in between shows as unfinished, never as broken
            self.end = read_end(end_path, self.rank) if there_is(end_path) else None
        except TraceError as error:
            self._problem("end.json", error, tolerant)
        present = sorted(int(m[1]) for name in names_in(self.folder) if (m := SEAL_NAME.fullmatch(name)))
        count = self.end.seals if self.end is not None else present[-1] + 1 if present else 0
        number = 0
        try:
            for number in range(count):
                self._take(number)
        except TraceError as error:
            after = self.seals[-1].steps[-1] if self.seals else 0
            problem = TraceError(f"{error}; steps after {after} are not reachable")
            self._problem(self._seal_path(number).name, problem, tolerant)
            return
        if self.end is None:
            return
        surplus = [n for n in present if n >= count]
        if surplus:
            where = self._seal_path(surplus[0])
            problem = TraceError(f"{short(where)} lies beyond the end, which counts {count} seals")
            self._problem(where.name, problem, tolerant)
        if self.end.last_seal != self.last_hash:
            problem = TraceError(f"{short(end_path)} names another last seal than the one that is there")
            self._problem("end.json", problem, tolerant)

    def refresh(self) -> bool:
        """Take the seals, and the end, that were written since; whether there was anything new.

        What was sealed before is not read again. A seal that does not follow raises `TraceError`.
        """
        if self.end is not None:
            return False
        end_path, before = self.folder / "end.json", len(self.seals)
        end = read_end(end_path, self.rank) if there_is(end_path) else None  # the end first, as in `_load`
        while (end is None or len(self.seals) < end.seals) and there_is(self._seal_path(len(self.seals))):
            self._take(len(self.seals))
        self._seal_of.update({step: seal for seal in self.seals[before:] for step in seal.steps})
        if end is not None and (len(self.seals), self.last_hash) != (end.seals, end.last_seal):
            raise TraceError(f"{short(end_path)} names {end.seals} seals, of which {len(self.seals)} are there")
        self.end = end
        return end is not None or len(self.seals) > before

    def _problem(self, file: str, error: TraceError, tolerant: bool) -> None:
        if not tolerant:
            raise error
        self.problems.append((file, error))

    def _take(self, number: int) -> None:
        seal = self._read_seal(number)
        where = short(self._seal_path(number))
        if seal.previous != self.last_hash:
            raise TraceError(
                f"{where} (steps {seal.first_step} to {seal.last_step}) does not follow the seal before it"
            )
        if self.seals and seal.first_step <= self.seals[-1].steps[-1]:
            raise TraceError(f"{where}: step {seal.first_step} comes after step {self.seals[-1].steps[-1]}")
        steps, recorded = tuple(s.step for s in seal.steps), tuple(s.recorded for s in seal.steps)
        self.seals.append(SealSummary(number, seal.sha256, seal.files, steps, recorded))
