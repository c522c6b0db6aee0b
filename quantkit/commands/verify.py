"""`quantkit verify`: prove an artifact again, wherever it came from, and hold it to quality gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit import junit, manifest
from quantkit.commands._gates import Yardstick, judge
from quantkit.commands._options import VerifyOptions
from quantkit.commands._proof import finding_row, summary
from quantkit.document import print_json
from quantkit.errors import GateMissed, PlanError, SourceError, UsageError, VerifyError
from quantkit.findings import Finding, Verdict
from quantkit.infer.decode import Engine, Request
from quantkit.infer.model import Runner
from quantkit.infer.sampling import Sampling
from quantkit.loader import Loader, pick_device
from quantkit.report import Eye
from quantkit.source import BUILT_IN, HUB_ID, resolve
from quantkit.verify import verify

BEGINNING = "The sun rises in the east and"
WORDS = 12
ROOM = 0.4  # of what is free: how large an artifact may be to run from memory


def run(artifact: str, asked: VerifyOptions) -> None:
    """Verify, print what was found, and exit 1 for errors, 3 for a missed gate."""
    path = Path(artifact).expanduser()
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    with Eye() as eye:
        verdict = verify(path, asked.trust_remote_code)
        sound = not verdict.of("error")
        said = _say(path, asked) if sound and asked.generate else ""
        measured = _measure(path, asked, eye, verdict) if asked.limits and sound else None
        for finding in verdict.findings:
            eye.finding(finding.level, finding.line())
        if said:
            eye.totals({"it says": said})
        eye.totals({"compared": summary(verdict)})
        if not verdict.of("error") and not verdict.of("gate"):
            eye.totals({"passed": f"{len(verdict.checks)} checks, {len(verdict.findings)} findings, none of them an error"})
    failing = [f for f in verdict.findings if f.level == "error" or (asked.strict and f.level == "warning")]
    if asked.junit:
        _write_junit(Path(asked.junit), path.name, verdict, failing)
    if asked.json:
        rows = [finding_row(finding) for finding in verdict.findings]
        document = {"command": "verify", "artifact": artifact, "passed": not failing and not verdict.of("gate"), "findings": rows}
        print_json({**document, "checks": list(verdict.checks), **verdict.counts, "says": said, "measured": measured})
    if failing:
        raise VerifyError(f"{artifact}: {len(failing)} of {len(verdict.findings)} findings fail it, the first: {failing[0].line()}")
    if missed := verdict.of("gate"):
        raise GateMissed("; ".join(finding.text for finding in missed))


def _say(path: Path, asked: VerifyOptions) -> str:
    """Return how the artifact continues a sentence, run from its packed weights; empty where it cannot run here."""
    import psutil

    try:
        source = resolve(str(path), trust_remote_code=asked.trust_remote_code)
        if sum(file.stat().st_size for file in source.store.files()) > ROOM * psutil.virtual_memory().available:
            return ""
        runner = Runner(Loader(source, torch.device("cpu")), torch.get_num_threads())
        tokenizer = source.tokenizer()
    except (PlanError, SourceError):
        return ""
    ids = tokenizer(BEGINNING)["input_ids"]
    if not ids or max(ids) >= runner.config.vocab_size:
        return ""
    request = Request(list(ids), WORDS, Sampling(), (), 0)
    Engine(runner, runner.cache("plain"), tokenizer, 1).run([request])
    return BEGINNING + str(tokenizer.decode(request.output, skip_special_tokens=True))


def find_source(made: dict[str, Any], beside: Path) -> str:
    """Return the model that a manifest names: as it was given, or a folder of that name beside the artifact; a UsageError if neither is."""
    given, name = str(made["run"].get("model", "")), str(made.get("source", {}).get("name", ""))
    if Path(given).expanduser().exists() or given in BUILT_IN or (HUB_ID.fullmatch(given) and not given.startswith(".")):
        return given
    near = beside.resolve().parent / name
    if name and near.exists():
        return str(near)
    raise UsageError(f"The manifest names '{given}', which is not here. Say where the source is (--model or --reference).")


def _measure(path: Path, asked: VerifyOptions, eye: Eye, verdict: Verdict) -> dict[str, Any]:
    """Measure the artifact beside its reference and add a finding for each missed gate."""
    reference = asked.reference
    if reference is None:
        where = manifest.path_of(path)
        if not where.exists():
            raise UsageError("There is no manifest that names the source: give --reference MODEL for the gates.")
        reference = find_source(manifest.read(where), path)
    device = pick_device(asked.device)
    first, second = (Loader(resolve(str(m), None, asked.offline, asked.trust_remote_code), device) for m in (reference, path))
    eye.phase(f"measuring {reference}, then {path.name}")
    yardstick = Yardstick(first, asked.data, asked.windows, asked.offline)
    document = yardstick.measure(second, str(path))
    before, after = yardstick.plain.perplexity, document["perplexity"]
    eye.totals({"perplexity": f"{before:.4f} -> {after:.4f}", "KL divergence": f"mean {document['kl_mean']:.5f}"})
    verdict.checks["gates"] = [Finding("QK601", path.name, line) for line in judge(document, asked)]
    return document


def _write_junit(path: Path, name: str, verdict: Verdict, failing: list[Finding]) -> None:
    cases = []
    for check, found in verdict.checks.items():
        bad = [f.line() for f in found if f in failing or f.level == "gate"]
        cases.append(junit.Case(check, "\n".join(bad), "\n".join(f.line() for f in found if f.line() not in bad)))
    junit.write(path, f"quantkit verify {name}", cases)
