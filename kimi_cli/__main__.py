"""`python -m kimi_cli` is `kimi`."""

from kimi_cli.cli import main

if __name__ == "__main__":
    main()
