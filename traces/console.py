"""What every command line of the house shares: consoles, the one-line error, exit codes, help examples.

Exit codes: 0 good, 1 a check found a difference, 2 wrong usage or unusable input, 70 a fault of the program itself,
130 interrupted. A user's mistake is one line on stderr; `--debug` (before a `--`) shows the traceback as well.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from traces.errors import GradreelError

if TYPE_CHECKING:
    import typer
    from rich.console import Console

GOOD, DIFFERENCE, USAGE, FAULT, INTERRUPTED = 0, 1, 2, 70, 130


class CheckFailed(Exception):
    """A check ran and found a difference. `str(error)` is the whole message; the command line exits with 1."""


def out() -> Console:
    """The console for results. Built anew, so that a redirected `sys.stdout` is honoured; 80 columns in a pipe."""
    return console_class()(file=sys.stdout, highlight=False)


def console_class() -> type[Console]:
    """The console of results, whose reader may leave early."""
    from rich.console import Console

    class Quiet(Console):
        """A reader who has seen enough (`| head`) is no failed check, which rich's exit code 1 would say."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Quiet


def err() -> Console:
    """The console for progress, notes and errors, on stderr."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def one_line(message: object) -> str:
    """`message` with its line breaks replaced, so that an error stays one line whatever a name in it contains."""
    return " ".join(part.strip() for part in str(message).splitlines() if part.strip())


def say(message: object) -> None:
    """Print one note to stderr, unwrapped."""
    err().print(one_line(message), markup=False, soft_wrap=True)


def complain(message: object) -> None:
    """Print one error line to stderr, unwrapped, so that a log can be searched for it."""
    from rich.text import Text

    err().print(Text.assemble(("error: ", "bold red"), one_line(message)), soft_wrap=True)


def fail(message: object, code: int = USAGE) -> NoReturn:
    """Print one error line and leave the command with `code`."""
    import typer

    complain(message)
    raise typer.Exit(code)


@contextmanager
def progress_bar(
    label: str,
    total: int | None,
    unit: str = "steps",
    *,
    wanted: bool | Callable[[int, int | None], None] | None = None,
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with a rate and an estimate; yields `advance(count)`.

    `wanted` None shows it only on a terminal, so that logs stay clean; False never does, True always. A function is
    called with each count and the total instead.
    """
    if callable(wanted):
        tell = wanted
        yield lambda count: tell(count, total)
        return
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.1f} {unit}/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=sys.stderr.isatty()) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


def example(command: str) -> str:
    """The epilog that shows one example, for `@app.command(epilog=example("gradreel info run.trace"))`."""
    return f"Example: {command}"


def new_app(help: str | None = None) -> typer.Typer:
    """A Typer application with the house's settings: no completion installer, no boxed tracebacks, plain help text."""
    import typer

    return typer.Typer(
        help=help,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Split `--debug` off the arguments before a `--`; what follows belongs to the user's own program."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word != "--debug"]
    return kept + words[end:], len(kept) < end


def run(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str = "gradreel") -> int:
    """Run `app` on `arguments` (default: the process's) and return the exit code; nothing escapes as a traceback.

    Commands return None for success or raise: GradreelError (2), CheckFailed (1), OSError (2), `typer.Exit(code)`.
    """
    import typer

    words, debug = take_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        result = typer.main.get_command(app).main(args=words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else GOOD
    except BrokenPipeError:
        _close_broken_stdout()
        return GOOD
    except BaseException as error:
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else USAGE
        if debug:
            traceback.print_exc()
        return _explain(error, debug)


def _explain(error: BaseException, debug: bool) -> int:
    """Print the one line for `error` and return its exit code."""
    import typer

    if isinstance(error, CheckFailed):
        complain(error)
        return DIFFERENCE
    if isinstance(error, GradreelError):
        complain(error)
        return USAGE
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        complain("interrupted")
        return INTERRUPTED
    described = _usage_message(error)
    if described is not None:
        if described:
            complain(described)
        return USAGE
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        complain(f"{error.strerror or error}{where}")
        return USAGE
    hint = "" if debug else "; run again with --debug for the traceback"
    complain(f"internal fault, {type(error).__name__}: {error}{hint}")
    return FAULT


def _usage_message(error: BaseException) -> str | None:
    """The text of Typer's own usage errors, which are no public class in every version; None for anything else."""
    format_message: Any = getattr(error, "format_message", None)
    if format_message is None or not hasattr(error, "exit_code"):
        return None
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help() if context is not None else format_message(), file=sys.stderr)
        return ""
    command = f"; see {context.command_path} --help" if context is not None else ""
    return f"{format_message().rstrip('.')}{command}"


def _close_broken_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
