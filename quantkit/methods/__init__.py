"""Algorithms: how values are chosen. A solver turns one weight into codes; a transform edits float weights first."""

from importlib import import_module
from typing import Any

from quantkit.registry import Row, Table

METHODS = Table(
    "method",
    [
        Row("gptq", "GPTQ: each rounding error spread over the columns to come", "quantkit.methods.gptq:GPTQ"),
        Row("awq", "AWQ: columns scaled so that rounding hurts the outputs least", "quantkit.methods.awq:AWQ"),
        Row(
            "smoothquant",
            "SmoothQuant: the range of activations moved into the weights",
            "quantkit.methods.smoothquant:SmoothQuant",
        ),
        Row("rtn", "round to nearest: integers, FP8, NF4, FP4, MXFP4, NVFP4", "quantkit.methods.rtn:RTN"),
    ],
)
OPTIONS = {
    "gptq": "quantkit.methods._options:GptqOptions",
    "awq": "quantkit.methods._options:AwqOptions",
    "smoothquant": "quantkit.methods._options:SmoothQuantOptions",
    "rtn": "quantkit.methods._options:RtnOptions",
}


def options_of(method: str) -> Any:
    """Return the class of a method's options; nothing else of the method is imported."""
    module, _, attribute = OPTIONS[method].partition(":")
    return getattr(import_module(module), attribute)
