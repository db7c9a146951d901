"""The checkpoints and golden vectors that ship with the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent
TINY = ROOT / "tiny"
"""A random checkpoint of 13 layers in the official format, its trunk beside it."""
PSALM = ROOT / "psalm"
"""A trained one of 13 layers, its trunk beside it: the model where none is named."""
