"""quantkit: quantize a language model checkpoint and prove that the result still works."""

__version__ = "0.1.0"
