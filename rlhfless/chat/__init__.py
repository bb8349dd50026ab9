"""Chat messages of data sets, and their rendering by a tokenizer's chat template."""
