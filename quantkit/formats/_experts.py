"""How checkpoints name the experts of a layer: one tensor each, or a stack of all."""

from __future__ import annotations

import re

EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<index>\d+)\.(?P<part>w1|w2|w3|gate_proj|down_proj|up_proj)\.weight")
STACK = re.compile(r".*\.experts\.(?P<part>gate_up_proj|down_proj|gate_proj|up_proj)(\.weight)?")
PARTS = {"w1": "gate", "gate_proj": "gate", "w2": "down", "down_proj": "down", "w3": "up", "up_proj": "up"}
