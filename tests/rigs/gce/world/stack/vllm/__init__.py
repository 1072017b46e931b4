"""STAND-IN for vLLM on a pretended machine: its server is the stand-in engine."""
