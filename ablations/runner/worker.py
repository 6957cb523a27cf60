"""The process of a worker: jobs come in as lines of JSON, and what becomes of them goes out the same way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

_SECONDS_BETWEEN_WORDS = 0.25


def main() -> None:
    """Make one run per line of standard input, until there are no more."""
    # An interrupt is for the parent, which ends its workers; terminate does so at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    voice = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not stand between the lines
    loaded: set[str] = set()
    for line in sys.stdin:
        job = json.loads(line)
        _say(voice, {"error": make(job, voice, loaded)})


def make(job: dict[str, Any], voice: Any, loaded: set[str]) -> str | None:
    """Make the run of `job`; None, or one line about why it could not be made."""
    from ablations.runner._execute import execute
    from ablations.runner._spec import RunSpec
    from traces.console import one_line
    from traces.errors import GradreelError

    told, last = 0, time.monotonic()

    def progress(step: int) -> None:
        nonlocal told, last
        if time.monotonic() - last >= _SECONDS_BETWEEN_WORDS:
            _say(voice, {"steps": step - told})
            told, last = step, time.monotonic()

    try:
        load_plugins(job["plugins"], loaded)
        execute(RunSpec.from_dict(job["spec"]), job["root"], progress=progress)
    except GradreelError as error:
        return one_line(error)
    except OSError as error:
        return one_line(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:
        return one_line(f"{type(error).__name__}: {error}")
    return None


def load_plugins(files: list[str] | tuple[str, ...], loaded: set[str]) -> None:
    """Load the user's own files, each once a process."""
    import toolkit.recipes
    import toolkit.variants  # noqa: F401  (their registries must exist before a plug-in is read)
    from traces.registry import load_plugin_file

    for file in files:
        if file not in loaded:
            load_plugin_file(file)
            loaded.add(file)


def _say(voice: Any, message: dict[str, Any]) -> None:
    try:
        print(json.dumps(message), file=voice, flush=True)
    except OSError:
        os._exit(1)  # nobody listens any more: the parent is gone
