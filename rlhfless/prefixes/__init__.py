"""Which prompt tokens are shared, and what computing them once saves. Pure: arrays in, arrays out."""
