"""Every failure a person can meet, and the exit code it ends the process with.

    KimiError                 1  failed while running
    |- UsageError             2  the request itself is wrong
    |- CheckpointError        3  bad checkpoint
    |  |- ConfigError         3  config.json is missing, mistyped or of another model
    |  |- TokenizerError      3  tokenizer files
    |  |- TrunkError          3  the repacked trunk is missing, partial, stale or foreign
    |  `- SessionError        3  a session's files are damaged, foreign or of another version
    |- BudgetError            4  does not fit the memory budget
    |- VerifyError            5  a self-test or verification failed
    |- ReadError              1  a read failed, or bytes do not match their checksum
    `- NumericError           1  a non-finite number where none may be

A message is one sentence with the path, the wanted and the found value and, where known, the
command that fixes it.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the `kimi` command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    CHECKPOINT = 3
    BUDGET = 4
    VERIFY = 5
    INTERRUPTED = 130
    TERMINATED = 143


class KimiError(Exception):
    """Root of the tree; its text is what the person reads."""

    exit_code = Exit.FAILED


class UsageError(KimiError):
    """The request is malformed: nothing was read or written."""

    exit_code = Exit.USAGE


class CheckpointError(KimiError):
    """The checkpoint's files are not what the config says they are."""

    exit_code = Exit.CHECKPOINT


class ConfigError(CheckpointError):
    """config.json is missing, mistyped, unsupported, or describes another model."""


class TokenizerError(CheckpointError):
    """tiktoken.model or tokenizer_config.json cannot be used."""


class TrunkError(CheckpointError):
    """The trunk is missing, incomplete, damaged, or made from another checkpoint."""


class SessionError(CheckpointError):
    """A session's files are damaged, of another version, or made with another model."""


class BudgetError(KimiError):
    """The request does not fit the memory budget; nothing large was read or allocated."""

    exit_code = Exit.BUDGET


class VerifyError(KimiError):
    """A self-test or a verification found something wrong."""

    exit_code = Exit.VERIFY


class ReadError(KimiError):
    """A read failed or came up short, or its bytes differ from their checksum."""


class NumericError(KimiError):
    """The computation met NaN or infinity, or a scale byte that means NaN."""
