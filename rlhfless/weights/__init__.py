"""Weight versions: their digest, the stores they travel through, and the checks that the right one loaded."""
