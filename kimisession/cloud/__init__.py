"""One outside service per file."""
