"""Containers: where tensors live. One file per dialect, a reader and, where we write it, a writer."""

from quantkit.registry import Row, Table

FORMATS = Table(
    "format",
    [
        Row("gptq", "GPTQ v1/v2 tensors (vLLM, SGLang, transformers with gptqmodel, exllama)", "quantkit.formats.gptq:FORMAT"),
        Row(
            "compressed-tensors",
            "pack-quantized compressed-tensors (vLLM, SGLang, transformers)",
            "quantkit.formats.compressed_tensors:FORMAT",
        ),
    ],
)
