"""The fault matrix of the path over GCP: what was expected of each cell, how it is played, what came of it."""
