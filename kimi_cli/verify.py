"""`kimi verify`: a checkpoint and its trunk, file by file, to a list of what is wrong.

It looks at everything that it can: one fault hides no other. It changes nothing, but for the
checksums of experts that --deep leaves in the trunk's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_cli import console, memory, remedy
from kimi_cli.builtin import PSALM
from kimi_cli.config import Config
from kimi_cli.deep import Deep
from kimi_cli.errors import TrunkError, UsageError, VerifyError
from kimi_cli.expertsums import SUMS, load_expert_sums
from kimi_cli.findings import Finding, checkpoint_findings, read_config, tokenizer_findings
from kimi_cli.manifest import MANIFEST, PARTIAL
from kimi_cli.progress import Progress
from kimi_cli.survey import Survey
from kimi_cli.trunk import DIRECTORY, Trunk
from kimi_cli.trunkcheck import TrunkCheck
from kimi_cli.units import format_duration, format_size


def verify(
    model: Path | None, trunk_dir: Path | None = None, *, deep: bool = False, as_json: bool = False
) -> None:
    """Prints every finding and a closing line, or one JSON object; `model` None is the built-in.

    A trunk that has not been made is a finding only if `trunk_dir` names it or `deep` needs it.
    Raises VerifyError if anything is wrong; ConfigError or CheckpointError where there is no K3
    checkpoint; UsageError if `deep` would write among the program's own files; KimiError if the
    checksums cannot be written.
    """
    memory.one_arena()
    if model is None and deep:
        raise UsageError("--deep writes checksums beside a trunk: name the model with -m DIR")
    if model is None:
        console.note("no model given (-m DIR or KIMI_MODEL): verifying the built-in one")
    told = _Told(as_json)
    job = _Verification(model or PSALM, trunk_dir, deep, told)
    job.run()
    told.close()
    if told.findings:
        count = len(told.findings)
        raise VerifyError(
            f"{job.model_dir}: {count} finding{'s' * (count > 1)}, each with what to do about it"
        )


class _Told:
    """What has been found and looked at, printed as it comes or as JSON at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.findings: list[Finding] = []
        self._notes: list[str] = []
        self._looked_at: dict[str, Any] = {}

    def phase(
        self,
        name: str,
        text: str,
        findings: Sequence[Finding],
        *,
        whole: bool = True,
        **counts: int,
    ) -> None:
        """One part of the work: what it looked at, what it found, and whether it was ended."""
        self._looked_at.update(counts)
        self._line("BAD " if findings else "ok  " if whole else "-   ", f"{name:<11} {text}")
        for finding in findings:
            self._line("BAD ", str(finding))
        self.findings += findings

    def note(self, name: str, text: str) -> None:
        """Something that was not looked at, and why."""
        self._notes.append(f"{name}: {text}")
        self._line("-   ", f"{name:<11} {text}")

    def close(self) -> None:
        """The closing line, or the object."""
        if self._as_json:
            result = {
                "ok": not self.findings,
                "findings": [asdict(finding) for finding in self.findings],
                "notes": self._notes,
                **self._looked_at,
            }
            console.put(json.dumps(result, ensure_ascii=False) + "\n")
            return
        seen = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in self._counted())
        count = len(self.findings)
        verdict = f"{count} finding{'s' * (count != 1)}" if count else "nothing is wrong"
        console.put(f"{verdict}: {seen}\n")

    def _counted(self) -> list[tuple[str, int]]:
        return [(key, n) for key, n in self._looked_at.items() if not key.endswith("bytes")]

    def _line(self, status: str, text: str) -> None:
        if not self._as_json:
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
            console.put(f"{status} {line}\n")


class _Verification:
    """One run of the command: which phases there are depends on what those before have found."""

    def __init__(self, model: Path, trunk_dir: Path | None, deep: bool, told: _Told) -> None:
        self.model_dir, self._deep, self._told = model, deep, told
        self._named = trunk_dir is not None
        self._directory = trunk_dir or model / DIRECTORY

    def run(self) -> None:
        """Looks at everything there is."""
        config = read_config(self.model_dir)
        if isinstance(config, Finding):
            _, findings = checkpoint_findings(self.model_dir, None)
            findings = [config, *findings, *tokenizer_findings(self.model_dir)]
            self._told.phase("checkpoint", "headers, without a config to hold them to", findings)
            self._told.note("trunk", "not looked at: there is no config to hold it to")
            return
        found = self._checkpoint(config)
        trunk = self._trunk(config, found)
        if trunk is not None:
            self._experts(trunk, bool(found.fault))
        elif self._deep:
            self._told.note("experts", "not read: that needs a trunk that fits the checkpoint")

    def _checkpoint(self, config: Config) -> Survey:
        found, findings = checkpoint_findings(self.model_dir, config)
        assert found is not None
        findings += tokenizer_findings(self.model_dir)
        experts = int((found.expert_shard[:, :, 0] >= 0).sum())
        text = (
            f"{len(found.shards)} shards: headers, extents, dtypes and shapes of "
            f"{len(found.tensors):,} tensors and {experts:,} experts"
        )
        self._told.phase(
            "checkpoint",
            text,
            findings,
            shards=len(found.shards),
            tensors=len(found.tensors),
            experts=experts,
        )
        if not (self.model_dir / "tiktoken.model").exists() and not findings:
            fix = remedy.download(
                self.model_dir, ["tiktoken.model", "tokenizer_config.json"], again=False
            )
            self._told.note("tokenizer", f"there is none; text needs one: {fix}")
        return found

    def _trunk(self, config: Config, found: Survey) -> Trunk | None:
        there = any((self._directory / name).exists() for name in (MANIFEST, PARTIAL))
        if not there and not self._named:
            fix = remedy.repack(self.model_dir, self._directory)
            if self._deep:
                what = "not repacked yet, and --deep keeps its checksums there"
                self._told.phase("trunk", "0 files", [Finding(str(self._directory), what, fix)])
            else:
                self._told.note("trunk", f"not repacked yet: {fix}")
            return None
        check = TrunkCheck(self._directory, self.model_dir, config, [])
        with Progress("trunk", "B") as report:
            check.run(found, {finding.file for finding in self._told.findings}, report)
        text = f"{check.files} files: {check.blocks:,} blocks, {format_size(check.bytes)} read"
        text += f"; {check.rows:,} rows of the embedding in its shard"
        self._told.phase(
            "trunk",
            text,
            check.findings,
            trunk_files=check.files,
            trunk_blocks=check.blocks,
            trunk_bytes=check.bytes,
            embedding_rows=check.rows,
        )
        return check.trunk

    def _experts(self, trunk: Trunk, faulty: bool) -> None:
        try:
            sums = load_expert_sums(trunk)
        except TrunkError as error:
            path = trunk.directory / SUMS
            what, _, _ = str(error).removeprefix(f"{path} ").partition(": delete it")
            fix = f"delete it, then {remedy.deep(self.model_dir, trunk.directory)}"
            self._told.phase("experts", "not read", [Finding(str(path), what, fix)])
            return
        if not self._deep:
            state = "have no checksums yet" if sums is None else "have checksums"
            how = remedy.deep(self.model_dir, trunk.directory)
            self._told.note("experts", f"not read; they {state}: to read them all, {how}")
            return
        if faulty:
            self._told.note("experts", "not read: mend what is wrong with the checkpoint first")
            return
        deep = Deep(trunk, sums, [])
        try:
            with Progress("experts", "B") as report:
                deep.run(report)
        except KeyboardInterrupt:
            known = deep.kept + deep.good
            console.note(
                f"interrupted: {known:,} of {deep.total:,} experts are known; run it again to go on"
            )
            raise
        finally:
            if deep.total:
                self._deep_told(deep)

    def _deep_told(self, deep: Deep) -> None:
        rate = format_size(round(deep.bytes / max(deep.seconds, 1e-9)))
        words = [
            f"{deep.read:,} of {deep.total:,} read: {format_size(deep.bytes)} in "
            f"{format_duration(deep.seconds)}, {rate}/s"
        ]
        if deep.kept:
            words.append(f"{deep.kept:,} known from before")
        if deep.done:
            words.append("checksums equal" if deep.reference is not None else "checksums written")
        self._told.phase(
            "experts",
            ", ".join(words),
            deep.findings,
            whole=deep.done,
            experts_read=deep.read,
            expert_bytes=deep.bytes,
        )
