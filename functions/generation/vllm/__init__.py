"""The only package that imports vLLM. Its interface is `adapter.VllmEngine`, which does not import vLLM itself."""
