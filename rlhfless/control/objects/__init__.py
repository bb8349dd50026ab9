"""The objects of the API, as clients see them. Times are unix seconds."""
