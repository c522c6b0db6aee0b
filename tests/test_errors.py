"""Lists of names in messages."""

from __future__ import annotations

from quantkit.errors import name_list, name_ranges


def test_names_that_differ_in_one_number_are_one() -> None:
    names = [f"blk.{i}.ffn_down.weight" for i in (0, 1, 2, 5, 7, 8)] + ["output.weight", "blk.3.attn_v.weight"]
    assert name_ranges(names) == "blk.{0-2,5,7-8}.ffn_down.weight, output.weight, blk.{3}.attn_v.weight"
    assert name_ranges([]) == ""


def test_long_lists_say_how_many_more() -> None:
    assert name_list(range(7), 5) == "0, 1, 2, 3, 4 and 2 more"
