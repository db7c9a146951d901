"""`python -m kimi_cli` is `kimi`."""

from kimi_cli.entry import main

if __name__ == "__main__":
    main()
