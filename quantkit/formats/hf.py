"""Plain checkpoints: what a method leaves that edits float weights and rounds none."""

from __future__ import annotations

from typing import Any

from quantkit.tensors import PlanRow


class HfFormat:
    """The writer of plain weights: nothing is packed."""

    name = "hf"
    conv1d = True
    scattered = False
    uniform = False
    codecs: tuple[str, ...] = ()
    scale_dtypes = ("float16", "bfloat16", "float32")
    side_config = ""

    def refuse(self, shape: tuple[int, int], codec: Any) -> str:
        """Everything fits."""
        return ""

    def config(self, rows: list[PlanRow], options: dict[str, Any], zeros_from_one: bool) -> dict[str, Any] | None:
        """A plain checkpoint has no quantization_config."""
        return None


FORMAT = HfFormat()
