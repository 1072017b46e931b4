"""The command line: parse, build, call, render."""
