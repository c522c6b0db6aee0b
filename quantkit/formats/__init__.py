"""Containers: where tensors live. One file per dialect, a reader and, where we write it, a writer."""

from quantkit.registry import Row, Table

FORMATS = Table(
    "format",
    [
        Row("gptq", "GPTQ v1/v2 tensors (vLLM, SGLang, transformers with gptqmodel, exllama)", "quantkit.formats.gptq:FORMAT"),
        Row("awq", "AWQ GEMM tensors, 4 bits (vLLM, SGLang, transformers with gptqmodel)", "quantkit.formats.awq:FORMAT"),
        Row("naive-quantized", "compressed-tensors with 8 bits unpacked, weights alone", "quantkit.formats.compressed_tensors:NAIVE"),
        Row("fp8", "Hugging Face's fine-grained FP8 (transformers, vLLM, SGLang)", "quantkit.formats.fp8:FORMAT"),
        Row("bitsandbytes", "NF4, FP4 and LLM.int8 (transformers, vLLM)", "quantkit.formats.bitsandbytes:FORMAT"),
        Row("hf", "plain safetensors", "quantkit.formats.hf:FORMAT"),
        Row(
            "compressed-tensors",
            "compressed-tensors: integers, FP8, MXFP4, NVFP4 (vLLM, SGLang, transformers)",
            "quantkit.formats.compressed_tensors:FORMAT",
        ),
    ],
)
