"""Print which layer, taken out, is missed by which cell: `python tests/rehearsal/mutations.py [WORDS]`."""

import sys

from taking_out import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
