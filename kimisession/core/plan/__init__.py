"""Know before you pay: what fits, with which flags, how long it takes and what it costs. Pure: no I/O."""
