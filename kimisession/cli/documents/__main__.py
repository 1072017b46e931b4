"""`python -m kimisession.cli.documents FOLDER` writes the schemas there."""

import json
import sys
from pathlib import Path

from kimisession.cli.documents import schemas

if __name__ == "__main__":
    for stem, schema in schemas().items():
        text = json.dumps(schema, indent=2) + "\n"
        (Path(sys.argv[1]) / f"{stem}.json").write_text(text, encoding="utf-8")
