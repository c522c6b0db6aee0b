"""`quantkit run` and `quantkit recipes`: every output of a recipe from one source, verified, then held to its gates."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from quantkit import memory, recipe
from quantkit.commands import export, quantize
from quantkit.commands._gates import Yardstick, judge
from quantkit.commands._options import ExportOptions, GateOptions, RecipeOptions, RunOptions
from quantkit.commands._together import Ask, Made, finished, make_together, more_of, options_of_output
from quantkit.document import print_json
from quantkit.errors import GateMissed, OutputError, PlanError
from quantkit.loader import Loader, pick_device
from quantkit.recipe import Output, Recipe
from quantkit.report import Eye
from quantkit.source import Source, resolve

WINDOWS = 8
KINDS = (("run", "Runs, quantkit run NAME MODEL"), ("mixture", "Mixtures of GGUF types, quantkit export-gguf MODEL --type NAME"))


def run(name: str, model: str, asked: RecipeOptions) -> None:
    """Make every output of a recipe, in its order, and measure them against the source where it has gates."""
    began = time.perf_counter()
    found = recipe.load(recipe.find(name))
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    source = resolve(model, asked.revision, asked.offline, asked.trust_remote_code)
    _require_model(found, source)
    folder = Path(asked.output or ".")
    if not folder.is_dir():
        folder.mkdir(parents=True)
    ask = Ask(source, model, folder, asked)
    done = {number: before for number, one in enumerate(found.outputs) if not asked.dry_run and (before := finished(one, ask))}
    for before in done.values():
        with Eye(asked.quiet, asked.log_file) as eye:
            eye.notice(f"{before.path} is there already, as this recipe makes it")
    if not asked.dry_run:
        _check(found, done, ask)
    done |= make_together([None if number in done else one for number, one in enumerate(found.outputs)], ask)
    made = [
        done.get(number) or _make(one, source, model, folder, asked, f"{number + 1} of {len(found.outputs)}")
        for number, one in enumerate(found.outputs)
    ]
    document: dict[str, Any] = {"command": "run", "recipe": found.path.name, "model": model, "outputs": [one.document for one in made]}
    missed: list[str] = []
    if found.gates and not asked.dry_run:
        with Eye(asked.quiet, asked.log_file) as eye:
            document["measured"], missed = _measure(found, source, made, asked, eye)
    document |= {"gates_missed": missed, "seconds": round(time.perf_counter() - began, 2), "peak_memory": memory.peak()}
    if asked.json:
        print_json(document)
    if missed:
        raise GateMissed("; ".join(missed))


def _require_model(found: Recipe, source: Source) -> None:
    """Refuse a model that the recipe is not for."""
    kind, types = str(source.config().model_type), found.model.get("types")
    if types and kind not in types:
        raise PlanError(f"{found.path.name} is for {', '.join(types)}; {source.name} is {kind}. Change [model] if it fits all the same.")
    most = found.model.get("max_parameters")
    count = sum(math.prod(source.store.info(tensor).shape) for tensor in source.store.names())
    if most and count > most:
        raise PlanError(f"{found.path.name} is for at most {most:.3g} parameters; {source.name} has {count:.3g}.")


def _check(found: Recipe, done: dict[int, Made], ask: Ask) -> None:
    """Plan every output that is still to be made, so that what is refused is refused before the first one is made."""
    for number, one in enumerate(found.outputs):
        if number in done:
            continue
        path, more = more_of(one, ask.source, ask.folder, ask.asked)
        if not more["force"] and path.exists():
            raise OutputError(f"{path} exists already, and is not what this recipe makes. Remove it, or replace it with --force.")
        more |= {"dry_run": True, "quiet": True, "log_file": ""}
        if one.command == "export-gguf":
            more |= {"imatrix": ""} if one.given.get("imatrix") == "auto" else {}
            export.export_gguf(ask.model, recipe.build(ExportOptions, one.given, **more), ask.source)
        else:
            quantize.run(one.command, ask.model, options_of_output(one), recipe.build(RunOptions, one.given, **more), ask.source)


def _make(one: Output, source: Source, model: str, folder: Path, asked: RecipeOptions, number: str) -> Made:
    path, more = more_of(one, source, folder, asked)
    with Eye(asked.quiet, asked.log_file) as eye:
        eye.phase(f"output {number}: {one.command} -> {path}")
    if one.command == "export-gguf":
        document = export.export_gguf(model, recipe.build(ExportOptions, one.given, **more), source)
    else:
        document = quantize.run(one.command, model, options_of_output(one), recipe.build(RunOptions, one.given, **more), source)
    memory.trim()
    return Made(one, path, document)


def _measure(found: Recipe, source: Source, made: list[Made], asked: RecipeOptions, eye: Eye) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each output measures beside the source, and the lines of the gates that are missed."""
    limits = GateOptions(**{key: value for key, value in found.gates.items() if key not in ("data", "windows")})
    data, windows = str(found.gates.get("data", "bundled")), int(found.gates.get("windows", WINDOWS))
    device = pick_device(asked.device)
    eye.phase(f"measuring {source.name} on {data}")
    yardstick = Yardstick(Loader(source, device), data, windows, asked.offline)
    results, missed = [], []
    for one in made:
        eye.phase(f"measuring {one.path.name}")
        row = yardstick.measure(Loader(resolve(str(one.path), None, asked.offline, asked.trust_remote_code), device), one.path.name)
        missed += judge(row, limits)
        results.append(row)
        before, after = yardstick.plain.perplexity, row["perplexity"]
        eye.totals({one.path.name: f"perplexity {before:.4f} -> {after:.4f}, mean KL {row['kl_mean']:.5f}"})
    return results, missed


def recipes(asked: Any) -> None:
    """List the recipes that ship."""
    rows = [{"name": path.stem, "summary": summary, "kind": KINDS[mixture][0]} for path, summary, mixture in recipe.listed()]
    if asked.json:
        print_json({"command": "recipes", "recipes": rows})
        return
    for kind, use in KINDS:
        print(f"{use}:")
        for row in rows:
            if row["kind"] == kind:
                print(f"  {row['name']:<20} {row['summary']}")
