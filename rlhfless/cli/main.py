"""The command `rlhfless`.

An error that the user can correct gives one message on stderr and exit code 2, like a mistyped option. Any other error
is a fault of the program: one line and exit code 1, and the traceback with `--debug`. Ctrl-C gives 130, SIGTERM 143, a
closed terminal (SIGHUP) 129, and a closed pipe (`| head`) 141 without a word.
A run has further exit codes (rlhfless.orchestrator.exit_codes; docs/design.md).

Every command imports what it needs when it is called, so that `--help` does not wait for torch or Ray.
"""

from __future__ import annotations

import signal
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlhfless import __version__
from rlhfless.cli import (
    data,
    debug,
    environments,
    init,
    plan,
    prompts,
    rewards,
    run,
    runs,
    selftest,
    service,
    simulate,
    trace,
    validate,
)
from rlhfless.util import signals
from rlhfless.util.errors import UserError
from rlhfless.util.text import legible, tolerant

_PROGRAM_FAULT = 1


class _Group(TyperGroup):
    """Turns exceptions of every command into messages and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept `--debug` at any place: users add it at the end of the command that failed."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            tolerant(stream)
        try:
            return super().invoke(ctx)
        except (typer.Abort, BrokenPipeError):
            raise
        except UserError as error:
            return _fail(ctx, error, str(error), error.status)
        except KeyboardInterrupt:
            signals.ignore()
            raise typer.Exit(signals.exit_code()) from None
        except Exception as error:
            if hasattr(error, "show"):  # a usage error: typer's box would break paths over its lines
                error.show()
                raise typer.Exit(getattr(error, "exit_code", 2)) from None
            if hasattr(error, "exit_code"):  # a command that asks to exit
                raise
            text = f"unexpected {type(error).__name__}: {error}\nRun it again with --debug for the traceback."
            return _fail(ctx, error, text, _PROGRAM_FAULT)


def _fail(ctx: Any, error: Exception, text: str, code: int) -> None:
    if ctx.params.get("debug"):
        text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # the terminal may be closed
        typer.echo(legible(text.rstrip()), err=True)
    raise typer.Exit(code) from error


app = typer.Typer(
    cls=_Group,
    help="Elastic, serverless-style RLHF: every stage holds accelerators only while it works.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhfless {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options of every command. `_Group` reads `debug`."""


for _command in (
    init.init,
    run.run,
    validate.validate,
    validate.schema,
    validate.devices,
    plan.plan,
    selftest.selftest,
    debug.debug,
    simulate.simulate,
    service.up,
    service.down,
    service.migrate,
):
    app.command()(_command)
for _group, _name in (
    (data.data, "data"),
    (data.models, "models"),
    (rewards.rewards, "rewards"),
    (environments.environments, "environments"),
    (prompts.prompts, "prompts"),
    (trace.trace, "trace"),
    (service.keys, "keys"),
    (runs.runs, "runs"),
):
    app.add_typer(_group, name=_name)


def main() -> None:
    """Entry point of the command."""
    signals.terminate_as_ctrl_c()
    try:
        app()
    except SystemExit as error:
        # Both click and rich turn a pipe that nothing reads any more into exit code 1.
        if isinstance(error.__context__, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise
