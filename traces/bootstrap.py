"""Run a user's own training script and record it, without a change to the script.

    python -m traces.bootstrap OUT [--at JSON] -- train.py --its --arguments
    python -m traces.bootstrap OUT -- -m package.train --its --arguments
    torchrun --nproc-per-node 2 -m traces.bootstrap OUT -- train.py --its --arguments

The first training forward of a model with MoE layers starts the recording; the process-wide step hook finds its
optimizer. The exit code is the script's own, or 2 where nothing could be recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from traces._store import StorePath, as_place
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import nn

    from traces.record_at import RecordAt
    from traces.recorder import Recorder

USAGE = 2
_WITH_VALUE = ("-W", "-X")
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def record_script(out: str | Path, argv: Sequence[str], at: RecordAt | None = None) -> int:
    """Run the command `argv` (`python train.py ...`, `train.py ...`) in a process of its own, recorded into `out`.

    Returns its exit code, 2 where nothing could be recorded. Raises `GradreelError` where `argv` starts no Python
    script or module.
    """
    interpreter, flags, target = split_command(argv)
    options = [] if at is None else ["--at", json.dumps(at.to_json())]
    command = [interpreter, *flags, "-m", "traces.bootstrap", str(out), *options, "--", *target]
    environment = dict(os.environ)
    if interpreter != sys.executable:  # another environment finds this package only if it is shown to it
        root = str(Path(__file__).resolve().parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    with subprocess.Popen(command, env=environment) as process, _passing_on(process):
        while True:
            try:
                return _exit_code(process.wait(), out)
            except KeyboardInterrupt:
                continue  # the script received it too, and closes its trace


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Who ends this process means the script: it gets the signal, closes its trace, and both are gone."""
    try:
        before = [(s, signal.signal(s, lambda number, frame: process.send_signal(number))) for s in _ENDING]
    except ValueError:  # signals belong to the main thread
        yield
        return
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


def _exit_code(code: int, out: str | Path) -> int:
    """A script's exit code as a shell gives it: 128 + n where signal n killed it, which is said."""
    if code >= 0:
        return code
    place = as_place(out)
    advice = f"readable at {place}" if isinstance(place, StorePath) else f"kept, run: gradreel recover {place}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    print(f"gradreel: the script was ended by {name}; what was sealed is {advice}", file=sys.stderr)
    return 128 - code


def split_command(argv: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Split a command into interpreter, interpreter options, and `script args` or `-m module args`."""
    words = list(argv)
    if not words:
        raise GradreelError("no script to record; write for example: gradreel record OUT -- python train.py")
    interpreter = sys.executable
    if Path(words[0]).name.startswith("python"):
        if os.sep in words[0]:
            interpreter = words[0]
        words = words[1:]
    elif not words[0].endswith(".py"):
        raise GradreelError(
            f"{words[0]!r} is no Python script; write `python train.py ...` or `python -m package.module ...`"
        )
    flags: list[str] = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        count = 2 if words[0] in _WITH_VALUE else 1
        flags, words = flags + words[:count], words[count:]
    if not words or words[0] in ("-c", "-") or (words[0] == "-m" and len(words) < 2):
        raise GradreelError("only a script or a module can be recorded; write `python train.py` or `python -m package`")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise GradreelError(f"script {words[0]!r} does not exist; give the path of a Python file")
    return interpreter, flags, words


class _Starter:
    """A process-wide forward hook that starts a `Recorder` at the first training forward of a model with experts."""

    def __init__(self, out: str, at: RecordAt | None) -> None:
        self.out, self.at = out, at
        self.recorder: Recorder | None = None
        self._without: set[int] = set()
        self._seen: list[nn.Module] = []  # keeps the ids above from being used again
        self._handle: Any = None

    def install(self) -> None:
        """Add the hook."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._handle = register_module_forward_pre_hook(self._on_forward)

    def finish(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the recording; `GradreelError` where there was none."""
        self._handle.remove()
        if self.recorder is not None:
            self.recorder.__exit__(kind, error, at)
        elif kind is None and _in_several():  # a stage of a pipeline may have no experts
            print("gradreel: this process saw no training forward of a model with MoE layers", file=sys.stderr)
        elif kind is None:
            raise GradreelError(
                "no training forward of a model with MoE layers was seen, nothing was recorded; a model that is not "
                "recognised is declared with Recorder(..., layout=...) inside the script"
            )

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        import torch

        from traces.layouts import find_moe_layers

        if not module.training or not torch.is_grad_enabled() or id(module) in self._without:
            return
        try:  # the outermost module comes first, so what is found first is the whole model
            find_moe_layers(module)
        except GradreelError:
            self._without.add(id(module))
            self._seen.append(module)
            return
        self._handle.remove()
        self._without, self._seen = set(), []
        from traces.recorder import Recorder

        recorder = Recorder(self.out, module, at=self.at)
        self.recorder = recorder.__enter__()
        # This very call collected its hooks before ours were added. A process-wide hook is not given the keyword
        # arguments, so they are read from the caller; without them only this first mask would be missing.
        kwargs = sys._getframe(1).f_locals.get("kwargs")
        recorder.begin_forward(module, args, kwargs if isinstance(kwargs, dict) else {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m traces.bootstrap`; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        out, at, target = _parse(words)
        starter = _Starter(out, at)
        starter.install()
        return _run(starter, target)
    except GradreelError as error:
        print(f"gradreel: {error}", file=sys.stderr)
        return USAGE


def _parse(words: list[str]) -> tuple[str, RecordAt | None, list[str]]:
    from traces.record_at import RecordAt

    usage = "usage: python -m traces.bootstrap OUT [--at JSON] -- script.py [arguments]"
    if "--" not in words:
        raise GradreelError(usage)
    own, target = words[: words.index("--")], words[words.index("--") + 1 :]
    at = None
    if len(own) == 3 and own[1] == "--at":
        try:
            at = RecordAt.from_json(json.loads(own[2]))
        except (ValueError, TypeError) as error:
            raise GradreelError(f"--at {own[2]!r} is no record policy: {error}") from None
        own = own[:1]
    if len(own) != 1 or not target:
        raise GradreelError(usage)
    out = as_place(own[0])
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if taken and not _in_several():  # told before the script has worked for hours; other ranks may have begun
        raise GradreelError(f"{str(out)!r} already holds a trace or other files; choose another path or remove it")
    return own[0], at, split_command(["python", *target])[2]


def _in_several() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1").isdigit() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _on_ending(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once
    raise SystemExit(128 + number)


def _run(starter: _Starter, target: list[str]) -> int:
    """Run the script as `__main__`; what it prints, raises and returns stays its own."""
    code: Any = 0
    for each in _ENDING:  # sent by job schedulers and closing terminals: the trace is closed first
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, _on_ending)
    try:
        if target[0] == "-m":
            sys.argv = target[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = target
            sys.path[0] = str(Path(target[0]).resolve().parent)
            runpy.run_path(target[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        starter.finish(*sys.exc_info())
        raise
    code = int(code or 0)
    if code:
        starter.finish(SystemExit, SystemExit(code), None)  # the script failed in its own way and said so
    else:
        starter.finish(None, None, None)
    return code


if __name__ == "__main__":
    sys.exit(main())
