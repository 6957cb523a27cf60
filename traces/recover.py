"""End a trace whose writer was killed. Sealed steps become a finished trace; what was not sealed is set aside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from traces._files import is_locked, short, sync_folder, write_file
from traces._json import dump_signed
from traces._rank import RankFolder, find_trace, missing_folder, rank_folders
from traces._ranks import has_begun
from traces._store import StorePath
from traces.errors import TraceError
from traces.seals import DATA_NAME, SEAL_NAME, End, end_to_json
from traces.verify import Finding, verify_trace

ASIDE = "unsealed"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` found and did. `changed` is False for a trace that was finished already."""

    path: Path
    changed: bool
    steps: list[int]
    set_aside: list[str]
    findings: list[Finding]

    def __str__(self) -> str:
        span = f"{len(self.steps)} steps ({self.steps[0]} to {self.steps[-1]})" if self.steps else "no step"
        if not self.changed:
            return f"{self.path.name} is finished already; {span} readable, nothing was changed"
        moved = f"; set aside in {ASIDE}/: {', '.join(self.set_aside)}" if self.set_aside else ""
        return f"{self.path.name} is finished now; {span} readable{moved}"


def recover(path: str | Path) -> Recovery:
    """Write the missing `end.json` over the sealed steps and move what no seal names into `unsealed/`.

    Nothing is deleted and no sealed file is touched. A trace that is being written is refused. Damage inside sealed
    files is reported in `findings`, not repaired.
    """
    folder, header, digest = find_trace(path)
    if isinstance(folder, StorePath):
        raise TraceError(
            f"{str(folder)!r} lies in a store, where nobody can tell whether it is still being written; its sealed "
            "steps are readable as they are, or copy it to this machine and recover the copy"
        )
    folders = rank_folders(folder, header.ranks)
    if header.ranks > 1:  # a rank that died before its first seal has nothing to recover
        folders = {rank: one for rank, one in folders.items() if has_begun(one)}
    if not folders:
        raise missing_folder(folder, folders, header.ranks) or TraceError(f"{short(folder)} holds no rank")
    for rank_folder in folders.values():
        if is_locked(rank_folder / "header.json"):
            raise TraceError(
                f"{short(rank_folder)} is being written by a running process; wait for it, or end it first"
            )
    ranks = [RankFolder(f, number, header, digest, tolerant=True) for number, f in folders.items()]
    changed, moved = False, []
    for rank in ranks:
        if rank.finished and not rank.problems:
            continue
        changed = True
        moved += [f"{rank.folder.name}/{name}" for name in _set_aside(rank)]
        end = End(len(rank.seals), rank.last_hash, 0, recovered=True)
        write_file(rank.folder / "end.json", dump_signed(end_to_json(rank.rank, end))[0])
    whole = len(ranks) == header.ranks  # a step exists when every rank sealed it
    steps = sorted(set.intersection(*(set(rank.recorded()) for rank in ranks))) if whole else []
    return Recovery(folder, changed, steps, moved, verify_trace(folder))


def _set_aside(rank: RankFolder) -> list[str]:
    """Move files that no seal of the sound chain names; return their names."""
    keep = {"header.json", *(f"seal-{s.number:06d}.json" for s in rank.seals)}
    keep |= {entry.name for seal in rank.seals for entry in seal.files}
    moved = []
    for name in sorted(os.listdir(rank.folder)):
        ours = DATA_NAME.fullmatch(name) or SEAL_NAME.fullmatch(name) or name == "end.json"
        if name in keep or not (ours or (name.startswith(".") and name.endswith(".tmp"))):
            continue
        target = rank.folder / ASIDE
        target.mkdir(exist_ok=True)
        number, place = 0, target / name
        while os.path.lexists(place):
            number += 1
            place = target / f"{name}.{number}"
        os.rename(rank.folder / name, place)
        moved.append(name)
    if moved:
        sync_folder(rank.folder)
    return moved
