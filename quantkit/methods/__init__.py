"""Algorithms: how values are chosen. A solver turns one weight into codes; a transform edits float weights first."""

from quantkit.registry import Row, Table

METHODS = Table(
    "method",
    [
        Row("gptq", "GPTQ: column by column, each rounding error spread over the columns still to come", "quantkit.methods.gptq:GPTQ"),
        Row("rtn", "round to nearest, with the scale search but without calibration data", "quantkit.methods.rtn:RTN"),
    ],
)
OPTIONS = {
    "gptq": "quantkit.methods._options:GptqOptions",
    "rtn": "quantkit.methods._options:RtnOptions",
}
