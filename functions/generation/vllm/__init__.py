"""The only package that imports vLLM; `adapter.Engine` is its door, and needs no vLLM itself."""
