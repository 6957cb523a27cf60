"""The shared command-line error handling: one line on stderr, the exit codes, `--debug`."""

from pathlib import Path

import pytest

from traces import console
from traces.errors import GradreelError


@pytest.fixture
def app():
    app = console.new_app("Test program.")

    @app.command()
    def work(kind: str, size: int = 1) -> None:
        if kind == "mistake":
            raise GradreelError("lag is 0;\nallowed: 1 or more")
        if kind == "difference":
            raise console.CheckFailed("step 3 differs")
        if kind == "disk":
            Path("/nonexistent/file").read_bytes()
        if kind == "fault":
            raise RuntimeError("oh")
        if kind == "fail":
            console.fail("no such thing")
        print(f"did {kind} {size}")

    @app.command()
    def other(words: list[str]) -> None:
        print("|".join(words))

    return app


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["work", "mistake"], 2, "error: lag is 0; allowed: 1 or more\n"),
        (["work", "difference"], 1, "error: step 3 differs\n"),
        (["work", "fail"], 2, "error: no such thing\n"),
        (["work", "disk"], 2, "error: No such file or directory (/nonexistent/file)\n"),
        (
            ["work", "fault"],
            70,
            "error: internal fault, RuntimeError: oh; run again with --debug for the traceback\n",
        ),
    ],
)
def test_one_line_and_exit_code(app, capsys, words, code, text):
    assert console.run(app, words) == code
    captured = capsys.readouterr()
    assert captured.err == text
    assert captured.out == ""


@pytest.mark.parametrize("words", [["work"], ["work", "x", "--size", "big"], ["work", "x", "--nope"], ["nope"]])
def test_wrong_usage_is_one_line(app, capsys, words):
    assert console.run(app, words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "--help" in error


def test_success_and_help(app, capsys):
    assert console.run(app, ["work", "well"]) == 0
    assert capsys.readouterr().out == "did well 1\n"
    assert console.run(app, ["--help"]) == 0
    assert "Test program." in capsys.readouterr().out


def test_debug_shows_the_traceback_but_is_left_to_the_users_own_program(app, capsys):
    assert console.run(app, ["work", "mistake", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert console.run(app, ["other", "--", "python", "--debug"]) == 0
    assert capsys.readouterr().out == "python|--debug\n"


def test_markup_in_a_message_is_not_interpreted(capsys):
    console.complain("no parameter [bold]layers.0[/bold] in " + "x" * 200)
    error = capsys.readouterr().err
    assert "[bold]layers.0[/bold]" in error
    assert error.count("\n") == 1


def test_progress_bar_is_silent_in_a_pipe_and_shows_rate_and_estimate_when_asked(capsys):
    with console.progress_bar("replay", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
    with console.progress_bar("replay", 3, "rows", wanted=True) as advance:
        for _ in range(3):
            advance(1)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert "rows/s" in shown.err
    assert shown.out == ""


def test_a_reader_who_leaves_early_is_no_failed_check(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

        flush = write_through = isatty = lambda self, *_: False

    monkeypatch.setattr(console.sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):  # which `run` turns into exit code 0
        console.out().print("a table")
