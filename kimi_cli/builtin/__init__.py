"""The checkpoint and golden vectors that ship with the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
TINY = ROOT / "tiny"
"""A random checkpoint of 13 layers in the official format, its trunk beside it."""
