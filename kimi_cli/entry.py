"""Where the process begins: an interruption has its exit code before anything heavy is imported."""

import sys


def main() -> None:
    """The `kimi` command."""
    try:
        from kimi_cli.cli import cli
        from kimi_cli.console import run

        code = run(lambda: cli.main(standalone_mode=False))
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
