"""What every test stands on: an interruption reaches the programs that tests start."""

from __future__ import annotations

import signal

pytest_plugins = ["fault_table", "repacking", "sessions", "streamed", "verifying"]

# A runner started in the background ignores SIGINT, and so would every child of it.
signal.signal(signal.SIGINT, signal.default_int_handler)
