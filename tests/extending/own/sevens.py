"""A reward of one's own: the share of sevens among the characters of the response."""


def share(response: str, most: float) -> float:
    return min(most, response.count("7") / max(1, len(response)))
