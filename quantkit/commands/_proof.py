"""The end of every command that writes an artifact: its manifest, and the proof, before it gets its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy
import torch
import transformers

from quantkit import __version__, manifest
from quantkit.findings import Finding, Verdict
from quantkit.formats._safetensors import TensorInfo
from quantkit.report import Eye
from quantkit.source import Source
from quantkit.verify import prove, token_digest


def finish(artifact: Path, planned: dict[str, TensorInfo], body: dict[str, Any], source: Source, eye: Eye,
           tokens: bool = True) -> dict[str, Any]:  # fmt: skip
    """Write the manifest of a finished folder, or of a file alone in its folder, verify it in a fresh process, return what to report.

    tokens: whether the artifact's tokenizer must give the source's ids.
    """
    folder = artifact if artifact.is_dir() else artifact.parent
    marks = {"tokenizer": digest} if tokens and (digest := token_digest(source)) else {}
    source.drop_tokenizer()
    eye.phase("verifying in a fresh process")
    manifest.write(manifest.path_of(artifact), {**body, **marks, **manifest.describe(folder, planned)})
    verdict = prove(artifact, source.trust_remote_code)
    for finding in verdict.of("warning"):
        eye.notice(finding.line())
    eye.totals({"verified": summary(verdict)})
    return {"verified": {**verdict.counts, "findings": [finding_row(finding) for finding in verdict.findings]}}


def versions() -> dict[str, str]:
    """Return the versions that decide an artifact's bytes."""
    libraries = {"torch": torch, "transformers": transformers, "numpy": numpy, "numba": numba}
    return {"quantkit": __version__, **{name: str(library.__version__) for name, library in libraries.items()}}


def origin(source: Source) -> dict[str, Any]:
    """Return what a manifest says of a source."""
    return {"name": source.name, "revision": source.revision, "sha256": source.fingerprint()}


def provenance(command: str, source: Source, asked: Any, **fixed: Any) -> dict[str, Any]:
    """Return what the manifest of a command with one set of options begins with; `fixed` are the options that a run chose itself."""
    return {
        "command": manifest.command_line(source.name, command, asked),
        "run": manifest.request(command, source.asked, asked, **fixed),
        "source": origin(source),
        "versions": versions(),
    }


def summary(verdict: Verdict) -> str:
    """Return what was compared, in words."""
    counts = verdict.counts
    words = [f"{counts[key]} {key}" for key in ("files", "tensors") if key in counts]
    if counts.get("modules"):
        words.append(f"the codes of {counts['modules']} modules")
    return f"{', '.join(words) or 'what can be seen without a manifest'}; {len(verdict.checks)} checks"


def finding_row(finding: Finding) -> dict[str, str]:
    """Return a finding as plain values."""
    return {"code": finding.code, "level": finding.level, "where": finding.where, "text": finding.text, "line": finding.line()}
