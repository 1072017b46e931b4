"""The commands as they are typed: options, help and examples. Each is a paragraph that calls what does the work."""
