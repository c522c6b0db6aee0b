"""Run what was written: linears on their packed weights, caches, attention, decoding. To check artifacts, not to serve them."""
