"""Encodings: what one tensor's bits are, in plain PyTorch. One file per codec."""

from quantkit.registry import Row, Table

CODECS = Table(
    "codec",
    [Row("affine", "groups of 2, 3, 4 or 8 bit integers with a scale and a zero point", "quantkit.codecs.affine:Affine")],
)
