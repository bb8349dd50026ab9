"""What holds for all tests."""

from hypothesis import settings

# Timings never decide a test; and what is compiled is compiled in the first example that calls it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
