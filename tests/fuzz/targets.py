"""Every target by name."""

from __future__ import annotations

from pathlib import Path

from . import checkpoint_files, prompt_files, session_files, trunk_files

TARGETS = {
    **checkpoint_files.TARGETS,
    **trunk_files.TARGETS,
    **session_files.TARGETS,
    **prompt_files.TARGETS,
}
CORPUS = Path(__file__).parent / "corpus"


def saved(name: str) -> list[Path]:
    """The saved inputs of target `name`: what once was a finding, and what reaches far."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
