"""The prompt tokens that samples share, and the saving of computing them once. Pure: arrays in, arrays out."""
