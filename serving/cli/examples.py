"""Help texts whose examples are printed line by line, as they stand in the docstring."""

from __future__ import annotations

import inspect

import click

_HEADING = "\nExamples:\n"


class WithExamples(click.Command):
    """A command whose docstring may end in a block `Examples:`; click would wrap its lines into a paragraph."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What stands before the examples."""
        text, self.help = self.help, self._parts()[0]
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = text

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, after the options."""
        if examples := self._parts()[1]:
            formatter.write(f"{_HEADING}{examples}\n")
        super().format_epilog(ctx, formatter)

    def _parts(self) -> tuple[str, str]:
        text, _, examples = inspect.cleandoc(self.help or "").partition(_HEADING)
        return text, examples
