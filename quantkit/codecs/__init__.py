"""Encodings: what one tensor's bits are, in plain PyTorch. One file per codec, or per family of ggml types."""

from quantkit.registry import Row, Table

CODECS = Table(
    "codec",
    [
        Row("affine", "groups of 2, 3, 4 or 8 bit integers with a scale and a zero point", "quantkit.codecs.affine:Affine"),
        Row("fp8", "E4M3 floats, a scale per tensor, channel or block of 128 x 128", "quantkit.codecs.float8:Float8"),
        Row("nf4", "bitsandbytes' 16 normal levels, blocks of 64", "quantkit.codecs.bnb:Bnb4"),
        Row("fp4", "bitsandbytes' 4-bit floats, blocks of 64", "quantkit.codecs.bnb:Bnb4"),
        Row("llm-int8", "bitsandbytes' rows of 8 bits", "quantkit.codecs.bnb:RowInt8"),
        Row("mxfp4", "E2M1 floats, groups of 32 with a power of two (safetensors layouts)", "quantkit.codecs.fp4:Fp4"),
        Row("nvfp4", "E2M1 floats, groups of 16 with an E4M3 scale", "quantkit.codecs.fp4:Fp4"),
        Row("F32", "float32", "quantkit.codecs.plain:F32"),
        Row("F16", "float16", "quantkit.codecs.plain:F16"),
        Row("BF16", "bfloat16", "quantkit.codecs.plain:BF16"),
        Row("Q8_0", "8 bits, blocks of 32, a scale: 8.5 bits per weight", "quantkit.codecs.rounded:Q8_0"),
        Row("Q4_0", "4 bits, blocks of 32, a scale: 4.5", "quantkit.codecs.rounded:Q4_0"),
        Row("Q4_1", "4 bits, blocks of 32, a scale and a minimum: 5", "quantkit.codecs.rounded:Q4_1"),
        Row("Q5_0", "5 bits, blocks of 32, a scale: 5.5", "quantkit.codecs.rounded:Q5_0"),
        Row("Q5_1", "5 bits, blocks of 32, a scale and a minimum: 6", "quantkit.codecs.rounded:Q5_1"),
        Row("Q2_K", "2 bits, super-blocks of 256: 2.625", "quantkit.codecs.k_quants:Q2_K"),
        Row("Q3_K", "3 bits, super-blocks of 256: 3.4375", "quantkit.codecs.k_quants:Q3_K"),
        Row("Q4_K", "4 bits, super-blocks of 256: 4.5", "quantkit.codecs.k_quants:Q4_K"),
        Row("Q5_K", "5 bits, super-blocks of 256: 5.5", "quantkit.codecs.k_quants:Q5_K"),
        Row("Q6_K", "6 bits, super-blocks of 256: 6.5625", "quantkit.codecs.k_quants:Q6_K"),
        Row("IQ4_NL", "16 uneven levels, blocks of 32: 4.5", "quantkit.codecs.nonlinear:IQ4_NL"),
        Row("IQ4_XS", "16 uneven levels, super-blocks of 256: 4.25", "quantkit.codecs.nonlinear:IQ4_XS"),
        Row("MXFP4", "E2M1 floats, blocks of 32 with a power of two: 4.25", "quantkit.codecs.nonlinear:MXFP4"),
    ],
)
WEIGHT_CODECS = ("affine", "fp8", "nf4", "fp4", "llm-int8", "mxfp4", "nvfp4")
GGML_TYPES = tuple(name for name in CODECS.names() if name not in WEIGHT_CODECS)
