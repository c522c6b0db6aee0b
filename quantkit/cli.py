"""The Typer app. It imports neither torch nor transformers until a command runs, so that `--help` is fast.

The flags of a command are made from frozen dataclasses: one field, one flag, one help line. Errors of ours become one
line on standard error and their exit code.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit import __version__, memory
from quantkit.commands._infer_options import BenchOptions, DoctorOptions, GenerateOptions
from quantkit.commands._options import (
    ConvertOptions,
    DiffOptions,
    EvalOptions,
    ExportOptions,
    ImatrixOptions,
    InspectOptions,
    ListOptions,
    PlanOptions,
    RecipeOptions,
    ReportOptions,
    ReproduceOptions,
    RunOptions,
    ToHfOptions,
    VerifyOptions,
)
from quantkit.document import print_failure
from quantkit.errors import Interrupted, QuantkitError, UsageError
from quantkit.methods import METHODS, options_of

app = typer.Typer(
    name="quantkit",
    help="Quantize language models and prove that the result still works.",
    add_completion=False,
    add_help_option=False,  # `main` does it: typer would load pydantic to read the absent flag, half the time of a --help
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Model = Annotated[str, typer.Argument(help="Folder, hub id, .gguf file or built-in name (smollm2-135m).", show_default=False)]
Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="Folders, hub ids, .gguf files or built-in names.", show_default=False)
]
NEGATIVE = {"sym": "--asym"}


def flags(*classes: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag per field of the dataclasses; the command receives one instance of each."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in _slots(classes)]
        parameters = own + [p for cls in classes for p in _parameters(cls)]

        def wrapper(**given: Any) -> None:
            made = {slot: _instance(cls, given) for slot, cls in zip(_slots(classes), classes, strict=True)}
            names = {field.name for cls in classes for field in dataclasses.fields(cls)}
            try:
                command(**{name: value for name, value in given.items() if name not in names}, **made)
            except KeyboardInterrupt:  # here, because typer would turn it into an exit of its own
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing: it is ending
                raise Interrupted("interrupted; the same command resumes where it stopped") from None

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _instance(cls: Any, given: dict[str, Any]) -> Any:
    """Return the options of a class from the values of its flags."""
    values = {field.name: given[field.name] for field in dataclasses.fields(cls)}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _slots(classes: tuple[type, ...]) -> list[str]:
    return ["options", "asked"][-len(classes) :]


def _parameters(cls: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls)
    return [_parameter(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    if annotation is bool and (field.default or field.name in NEGATIVE):
        flag += "/" + NEGATIVE.get(field.name, "--no-" + flag[2:])
    names = [flag, field.metadata["short"]] if field.metadata.get("short") else [flag]
    text, default = field.metadata["help"], field.default
    if choices := field.metadata.get("choices"):
        text = f"{text} [{' | '.join(choices)}]"
    if typing.get_origin(annotation) is tuple:
        annotation, default = list[str], []
    info = typer.Option(*names, help=text, callback=_checker(flag, choices) if choices else None)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info])


def _checker(flag: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in choices:
            raise UsageError(f"{flag} '{value}' cannot be. Known: {', '.join(choices)}.")
        return value

    return check


def _add_method(name: str, summary: str) -> None:
    @flags(options_of(name), RunOptions)
    def command(model: Model, options: Any, asked: RunOptions) -> None:
        from quantkit.commands import quantize

        quantize.run(name, model, options, asked)

    command.__doc__ = summary + "."
    app.command(name, help=summary + ".")(command)


for _row in METHODS:
    _add_method(_row.name, _row.summary[0].upper() + _row.summary[1:])


@app.command(
    "plan",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="MODEL [OPTIONS] [OPTIONS OF THE METHOD]",
)
@flags(PlanOptions)
def plan(context: typer.Context, asked: PlanOptions) -> None:
    """Say what a run will give and take, before any work.

    That is size, memory, disk, time, the runtimes that take the result, and the cache when it is served. The cache of
    keys and values takes 2 x layers x key-value heads x head size x tokens x bytes for each sequence; a layer
    with a sliding window holds at most its window.
    """
    group: Any = typer.main.get_command(app)
    words = group.commands[asked.method].make_context(f"quantkit plan --method {asked.method}", context.args).params
    classes = (ExportOptions,) if asked.method == "export-gguf" else (options_of(asked.method), RunOptions)
    made = [_instance(cls, words) for cls in classes]
    from quantkit.commands import plan as module

    module.plan(asked.method, words["model"], made[0], made[-1], asked)


@app.command("run")
@flags(RecipeOptions)
def run_recipe(
    recipe: Annotated[str, typer.Argument(help="A .toml file, or a recipe that ships (quantkit recipes).", show_default=False)],
    model: Model,
    asked: RecipeOptions,
) -> None:
    """Make every output of a recipe, verified and held to gates."""
    from quantkit.commands import run

    run.run(recipe, model, asked)


@app.command("recipes")
@flags(ListOptions)
def list_recipes(asked: ListOptions) -> None:
    """List the recipes that ship."""
    from quantkit.commands import run

    run.recipes(asked)


@app.command("to-hf")
@flags(ToHfOptions)
def to_hf(model: Model, output: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)], asked: ToHfOptions) -> None:
    """Turn any artifact or GGUF file into a plain checkpoint."""
    from quantkit.commands import convert

    convert.to_hf(model, output, asked)


@app.command("convert")
@flags(ConvertOptions)
def convert_artifact(model: Model, output: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
                     asked: ConvertOptions) -> None:  # fmt: skip
    """Put an artifact's codes into another container, exactly."""
    from quantkit.commands import convert

    convert.convert(model, output, asked)


@app.command("export-gguf")
@flags(ExportOptions)
def export_gguf(model: Model, asked: ExportOptions) -> None:
    """Write a GGUF file for llama.cpp and Ollama, in one pass."""
    from quantkit.commands import export

    export.export_gguf(model, asked)


@app.command("imatrix")
@flags(ImatrixOptions)
def imatrix(model: Model, asked: ImatrixOptions) -> None:
    """Compute an importance matrix for export-gguf.

    It holds the mean square of every weight's input columns.
    """
    from quantkit.commands import export

    export.imatrix(model, asked)


@app.command("eval-ppl")
@flags(EvalOptions)
def eval_ppl(models: Models, asked: EvalOptions) -> None:
    """Measure perplexity, and divergence from a reference; gates.

    It streams block by block, so that a model larger than memory can be measured.
    """
    from quantkit.commands import evaluate

    evaluate.eval_ppl(models, asked)


@app.command("verify")
@flags(VerifyOptions)
def verify(
    artifact: Annotated[str, typer.Argument(help="Folder or .gguf file.", show_default=False)],
    asked: VerifyOptions,
) -> None:
    """Prove an artifact; hold it to quality gates on request.

    Files, tensors, codes, scales, configuration, tokenizer, and a short run.
    """
    from quantkit.commands import verify as module

    module.run(artifact, asked)


@app.command("report")
@flags(ReportOptions)
def report(
    artifact: Annotated[str, typer.Argument(help="Folder or .gguf file.", show_default=False)],
    asked: ReportOptions,
) -> None:
    """Show where errors and bits are; one page on request."""
    from quantkit.commands import report as module

    module.report(artifact, asked)


@app.command("reproduce")
@flags(ReproduceOptions)
def reproduce(
    manifest: Annotated[str, typer.Argument(help="A quantkit.json, or an artifact that has one.", show_default=False)],
    asked: ReproduceOptions,
) -> None:
    """Make an artifact again and compare the bytes."""
    from quantkit.commands import reproduce as module

    module.reproduce(manifest, asked)


@app.command("inspect")
@flags(InspectOptions)
def inspect_source(model: Model, asked: InspectOptions) -> None:
    """Say what a source holds, and what will load it."""
    from quantkit.commands import inspect as module

    module.inspect(model, asked)


@app.command("diff")
@flags(DiffOptions)
def diff(
    a: Annotated[str, typer.Argument(help="A source.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another.", show_default=False)],
    asked: DiffOptions,
) -> None:
    """Compare two sources tensor by tensor."""
    from quantkit.commands import inspect as module

    module.diff(a, b, asked)


@app.command("generate")
@flags(GenerateOptions)
def generate(model: Model, asked: GenerateOptions) -> None:
    """Continue prompts from the packed weights."""
    from quantkit.commands import generate as module

    module.generate(model, asked)


@app.command("bench")
@flags(BenchOptions)
def bench(model: Model, asked: BenchOptions) -> None:
    """Measure prefill and decoding, beside transformers."""
    from quantkit.commands import generate as module

    module.bench(model, asked)


@app.command("doctor")
@flags(DoctorOptions)
def doctor(asked: DoctorOptions) -> None:
    """Say what this machine can compute with, and what is missing."""
    from quantkit.commands import doctor as module

    module.doctor(asked)


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; errors of ours are one line and their exit code, an interrupt is 130."""
    _quiet_libraries()
    for stream in (sys.stdout, sys.stderr):  # a text of a model, or a path, on a console that cannot show it
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    memory.return_large_blocks()
    if sys.argv[1:] == ["--version"]:
        typer.echo(__version__)
        sys.exit(0)
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        group = typer.main.get_command(app)
        typer.echo(group.get_help(typer.Context(group, info_name="quantkit")))
        sys.exit(0 if sys.argv[1:] else 2)
    try:
        app(standalone_mode=False)
    except QuantkitError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.errno in (28, 122):  # no space, quota
            _fail("the disk is full; make room and run the same command again to resume", 1)
        if error.filename is None and error.errno is None:
            raise
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except MemoryError:
        _fail("out of memory; lower --samples, --seq-len or --batch, or set --max-memory", 1)
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        _fail(f"the device is out of memory ({str(error).splitlines()[0]}); lower --batch or --samples, or use --device cpu", 1)
    except (typer.Exit, SystemExit):
        raise
    except Exception as error:
        if not isinstance(error, _click().ClickException):
            raise
        if isinstance(error, _click().exceptions.NoArgsIsHelpError):
            error.show()
            sys.exit(2)
        _fail(error.format_message(), 2)


def _click() -> types.ModuleType:
    from typer import _click as vendored  # typer ships its own click

    return vendored


def _quiet_libraries() -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: lanes and kernels take turns
    os.environ.setdefault("OMP_STACKSIZE", "1M")
    os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")  # no buffers kept per thread: there is a thread per batch


def _fail(message: str, code: int) -> None:
    typer.echo(f"quantkit: {message}", err=True)
    if "--json" in sys.argv:
        print_failure(next((word for word in sys.argv[1:] if not word.startswith("-")), ""), message, code)
    sys.exit(code)
