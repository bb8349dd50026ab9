"""Keys of callers, checks of requests, and checks of the files and code that they name."""
