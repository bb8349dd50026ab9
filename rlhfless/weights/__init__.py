"""Weight versions: their digest, the stores that pass them on, and the checks that the right version was loaded."""
