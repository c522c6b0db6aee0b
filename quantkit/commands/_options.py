"""The options that every quantizing run has, whatever its method. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from quantkit.errors import UsageError
from quantkit.methods._options import option

FORMATS = ("auto", "gptq", "awq", "compressed-tensors", "naive-quantized", "fp8", "bitsandbytes", "hf")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.IGNORECASE)
LOG = "Append one JSON event a line to this file: phases, blocks, modules, notices, totals."
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str, flag: str) -> int:
    """Return bytes from a size such as 5GB, 500MB or 50KB."""
    match = SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"{flag} '{text}' is not a size such as 5GB or 500MB.")
    return int(float(match[1]) * FACTORS[match[2].upper()])


def parse_duration(text: str, flag: str) -> float:
    """Return seconds from a duration such as 90, 30m or 2h."""
    match = DURATION.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"{flag} '{text}' is not a duration such as 30m or 2h.")
    return float(match[1]) * SECONDS[match[2].lower()]


@dataclass(frozen=True)
class SourceOptions:
    """How a model is found and opened."""

    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    offline: bool = option(False, "Never use the network.")
    trust_remote_code: bool = option(False, "Run the model's own code, if it brings any.")


@dataclass(frozen=True)
class OutputOptions:
    """Any folder that is written."""

    max_shard_size: str = option("5GB", "Largest size of one weight file.")
    force: bool = option(False, "Replace an existing output.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")

    def __post_init__(self) -> None:
        parse_size(self.max_shard_size, "--max-shard-size")

    def shard_bytes(self, total: int) -> int:
        """Return the largest bytes of a shard, given the total."""
        return min(parse_size(self.max_shard_size, "--max-shard-size"), max(total, 1))


@dataclass(frozen=True)
class DataOptions(SourceOptions):
    """Source and calibration data."""

    calibration: str = option(
        "bundled", "Text, JSONL or Parquet file; a named data set; hf:owner/name; bundled; or self (the model writes it)."
    )
    column: str = option("", "Column of a JSONL or Parquet file or data set.")
    samples: int = option(64, "Calibration samples.")
    seq_len: int = option(512, "Tokens of a sample.")
    seed: int = option(0, "Seed of everything random.")
    cache: str = option("~/.cache/quantkit", "Where text written by --calibration self is kept.")

    def __post_init__(self) -> None:
        for name in ("samples", "seq_len"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} cannot be: at least 1.")

    @property
    def origin(self) -> str:
        """Where the data came from, without a path of this machine."""
        return Path(self.calibration).name if "/" in self.calibration else self.calibration


@dataclass(frozen=True)
class RunOptions(OutputOptions, DataOptions):
    """Source, data, output and machine of a run."""

    output: str | None = option(None, "Folder to write; default NAME-METHOD-Nbit.", short="-o")
    format: str = option("auto", "Container; auto is the method's own.", choices=FORMATS)
    device: str = option("auto", "cpu, cuda, cuda:N, mps or auto.")
    dtype: str = option(
        "auto",
        "Dtype of the tensors that are not quantized; auto leaves them alone.",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
    max_memory: str | None = option(None, "Memory to stay under, such as 8GB; default: what is free.")
    schedule: str = option("auto", "How blocks are replayed.", choices=("auto", "one-pass", "two-pass"))
    float_stream: bool = option(
        False, "Take all statistics on the unquantized model's activations: several outputs can share them; worse by what layers add up."
    )
    batch: int = option(0, "Samples per batch; 0 chooses.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    resume_states: str = option(
        "store", "On resume, read the hidden states from disk or compute them again.", choices=("store", "recompute")
    )
    restart: bool = option(False, "Discard what an unfinished run left.")
    strict: bool = option(False, "Fail if anything falls back.")
    allow_requantize: bool = option(False, "Accept a source that is already quantized.")
    dry_run: bool = option(False, "Print the plan and stop.")
    eval: str = option("", "Measure perplexity before and after on this text (a file, or bundled).")
    reference: bool = option(False, "Use the plain PyTorch reference instead of faster kernels.")
    backend: str = option(
        "auto", "Whose kernels: auto takes what this machine has, cpu or cuda insists.", choices=("auto", "reference", "cpu", "cuda")
    )
    log_file: str = option("", LOG)
    time_budget: str | None = option(None, "Stop cleanly after this long, such as 90m; the same command goes on from there.")
    quiet: bool = option(False, "Print nothing for people.", short="-q")

    def __post_init__(self) -> None:
        if self.time_budget is not None:
            parse_duration(self.time_budget, "--time-budget")
        OutputOptions.__post_init__(self)
        DataOptions.__post_init__(self)
        if self.max_memory is not None:
            parse_size(self.max_memory, "--max-memory")

    @property
    def plain(self) -> bool:
        """Whether only the PyTorch reference is wanted."""
        return self.reference or self.backend == "reference"

    @property
    def budget_seconds(self) -> float:
        """How long a run may take, 0 for as long as it takes."""
        return parse_duration(self.time_budget, "--time-budget") if self.time_budget else 0.0

    @property
    def max_memory_bytes(self) -> int:
        """The memory budget in bytes, 0 when none was given."""
        return parse_size(self.max_memory, "--max-memory") if self.max_memory else 0


@dataclass(frozen=True)
class ToHfOptions(OutputOptions, SourceOptions):
    """Options of to-hf."""

    dtype: str = option("bfloat16", "Dtype of the floats; auto keeps each tensor's.", choices=("auto", "float32", "bfloat16", "float16"))


@dataclass(frozen=True)
class ConvertOptions(OutputOptions, SourceOptions):
    """Options of convert."""

    to: str = option("compressed-tensors", "Container.", choices=("gptq", "awq", "compressed-tensors", "naive-quantized", "fp8"))


@dataclass(frozen=True)
class ExportOptions(DataOptions):
    """Options of export-gguf."""

    output: str | None = option(None, "File to write; default NAME-TYPE.gguf.", short="-o")
    type: str = option("Q4_K_M", "File type, such as Q4_K_M, Q8_0 or F16, or a recipe of your own (a .toml file).")
    imatrix: str = option("", "Importance matrix: a file, or auto (computed now from the calibration data).")
    tensor_type: tuple[str, ...] = option((), "REGEX=TYPE: another type for some tensors (repeatable, first match wins).")
    output_type: str = option("", "Type of the output matrix.")
    embedding_type: str = option("", "Type of the token embedding.")
    pure: bool = option(False, "Give every matrix the base type, without a mixture.")
    pre_tokenizer: str = option("", "llama.cpp's name of the pre-tokenizer, when it is not recognised.")
    split_max_size: str | None = option(None, "Split the file into pieces of at most this size, such as 4GB.")
    modelfile: bool = option(False, "Write a Modelfile for Ollama beside it.")
    allow_requantize: bool = option(False, "Accept a source that is already quantized.")
    strict: bool = option(False, "Fail if a tensor cannot have its type, or has no place.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    dry_run: bool = option(False, "Print the types and the exact size, and stop.")
    force: bool = option(False, "Replace an existing output.")
    reference: bool = option(False, "Use the plain PyTorch reference instead of faster kernels.")
    log_file: str = option("", LOG)
    quiet: bool = option(False, "Print nothing for people.", short="-q")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_max_size is not None:
            parse_size(self.split_max_size, "--split-max-size")

    @property
    def split_bytes(self) -> int:
        """Largest bytes of one file's tensors, 0 for no limit."""
        return parse_size(self.split_max_size, "--split-max-size") if self.split_max_size else 0


@dataclass(frozen=True)
class ImatrixOptions(DataOptions):
    """Options of imatrix."""

    output: str | None = option(None, "File to write: GGUF, or the older layout if it ends in .dat; default NAME-imatrix.gguf.", short="-o")
    merge: tuple[str, ...] = option((), "Add the sums of this importance matrix (repeatable).")
    device: str = option("auto", "cpu, cuda, cuda:N, mps or auto.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    batch: int = option(0, "Samples per batch; 0 chooses.")
    force: bool = option(False, "Replace an existing output.")
    strict: bool = option(False, "Fail if an expert saw no token.")
    quiet: bool = option(False, "Print nothing for people.", short="-q")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class InspectOptions(SourceOptions):
    """Options of inspect."""

    tensors: bool = option(False, "List every tensor.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class DiffOptions:
    """Options of diff."""

    offline: bool = option(False, "Never use the network.")
    trust_remote_code: bool = option(False, "Run a model's own code, if it brings any.")
    most: int = option(20, "How many tensors to show; 0 shows all.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class GateOptions:
    """Limits on what is measured beside a reference; None where there is none."""

    max_ppl_delta: float | None = option(None, "Gate: exit 3 if perplexity exceeds the reference's by more.")
    max_ppl_ratio: float | None = option(None, "Gate: exit 3 if perplexity is more times the reference's.")
    max_kl: float | None = option(None, "Gate: exit 3 if the mean KL divergence is larger.")
    min_top1: float | None = option(None, "Gate: exit 3 if the share of equal top tokens is smaller (0 to 1).")

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by flag."""
        values = {"--" + field.name.replace("_", "-"): getattr(self, field.name) for field in fields(GateOptions)}
        return {flag: limit for flag, limit in values.items() if limit is not None}


@dataclass(frozen=True)
class EvalOptions(SourceOptions, GateOptions):
    """Options of eval-ppl."""

    data: str = option("bundled", "Text to score: a file, a named data set, or bundled.")
    reference: str | None = option(None, "Another model on the same windows: ratio, KL divergence, same top token.")
    protocol: str = option("windows", "How text is cut and scored.", choices=("windows", "stride", "llama.cpp"))
    window: int = option(0, "Tokens of a window; default 1024, for llama.cpp 512.")
    windows: int = option(40, "How many windows; 0 takes the whole text.")
    stride: int = option(0, "Tokens between the beginnings of windows (protocol stride); default half a window.")
    kv_cache: str = option(
        "none", "Run through this key-value cache, in chunks: what it costs.", choices=("none", "plain", "paged", "int8")
    )
    save_logits: str = option("", "Keep the reference's side in this file, and use it when it is there: it need not be computed again.")
    html: str = option("", "Write a page with the table, and divergence against size.")
    junit: str = option("", "Write a JUnit report, a test case for each gate.")
    log_file: str = option("", LOG)
    device: str = option("auto", "cpu, cuda, cuda:N, mps or auto.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class BesideOptions:
    """How an artifact is measured beside its source."""

    reference: str | None = option(None, "The source to compare with; default: the one named in the manifest, if it is here.")
    data: str = option("bundled", "Text to measure on: a file, a named data set, or bundled.")
    windows: int = option(8, "How many windows of 1024 tokens to measure on.")
    device: str = option("auto", "Where it is measured: cpu, cuda, cuda:N, mps or auto.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    offline: bool = option(False, "Never use the network.")
    trust_remote_code: bool = option(False, "Run a model's own code, if it brings any.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise UsageError(f"--windows {self.windows} cannot be: at least 1.")


@dataclass(frozen=True)
class VerifyOptions(BesideOptions, GateOptions):
    """Options of verify."""

    generate: bool = option(True, "Also let it continue a sentence from its packed weights, and show it.")
    strict: bool = option(False, "Warnings fail too.")
    junit: str = option("", "Write a JUnit report, a test case for each check.")


@dataclass(frozen=True)
class PlanOptions:
    """Options of plan; every other flag is the method's."""

    method: str = option("gptq", "The command to plan; its own flags follow.", choices=("gptq", "awq", "smoothquant", "rtn", "export-gguf"))
    lengths: str = option("4096,32768", "Tokens in the key-value cache.")
    batches: str = option("1,8", "Sequences in it.")
    measure: bool = option(True, "Measure one block on this machine for the time.")


@dataclass(frozen=True)
class ReportOptions(BesideOptions):
    """Options of report."""

    html: bool = option(False, "Write one self-contained page.")
    output: str = option("", "The page; default NAME-report.html.", short="-o")
    log: str = option("", "The run's --log-file: adds its time, its memory, and the seconds of each module.")
    measure: bool = option(True, "Measure perplexity and KL divergence beside the source.")
    force: bool = option(False, "Replace an existing page.")


@dataclass(frozen=True)
class RecipeOptions(SourceOptions):
    """Options of run."""

    share_activations: bool = option(
        False, "Quantize all outputs on one stream of activations, the unquantized model's (--float-stream): faster, somewhat worse."
    )
    one_by_one: bool = option(False, "Quantize outputs one after the other, not two at a time where memory allows; the bytes are the same.")
    output: str = option("", "Folder for the outputs; default: here.", short="-o")
    calibration: str = option("", "Calibration data instead of the recipe's.")
    device: str = option("auto", "cpu, cuda, cuda:N, mps or auto.")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice.")
    allow_requantize: bool = option(False, "Accept a source that is already quantized.")
    restart: bool = option(False, "Discard what an unfinished run left.")
    dry_run: bool = option(False, "Print the plans and stop.")
    force: bool = option(False, "Replace existing outputs.")
    log_file: str = option("", LOG)
    quiet: bool = option(False, "Print nothing for people.", short="-q")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class ListOptions:
    """Options of recipes."""

    json: bool = option(False, "Print one JSON object on the last line of standard output.")


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of reproduce."""

    model: str = option("", "Where the source is; default: where the manifest says, or beside the artifact.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    calibration: str = option("", "Where the calibration text is; default: where the manifest says.")
    output: str = option("", "Keep what is made under this name; default: it is removed.", short="-o")
    scratch: str = option("", "Folder for temporary files.")
    threads: int = option(0, "CPU threads; 0 takes the manifest's.")
    offline: bool = option(False, "Never use the network.")
    json: bool = option(False, "Print one JSON object on the last line of standard output.")
