"""The only package that imports vLLM; `adapter.Engine` is its interface, and does not import vLLM itself."""
