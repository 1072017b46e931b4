"""Where sessions run. `base` is the protocol; each engine is a module of its own, imported when it is asked for."""
