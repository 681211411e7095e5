"""Whether JSON values fit their schemas: fits_schema.py SCHEMAS ANSWERS; lines of ANSWERS are "NAME JSON"."""

import json
import pathlib
import sys

from jsonschema import Draft202012Validator

folder = pathlib.Path(sys.argv[1])
for line in pathlib.Path(sys.argv[2]).read_text().splitlines():
    name, text = line.split(" ", 1)
    schema = json.loads((folder / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    value = json.loads(text)
    for error in Draft202012Validator(schema).iter_errors(value):
        sys.exit(f"{name}: {error.json_path}: {error.message}")
    unknown = set(value) - set(schema["properties"])
    if unknown:
        sys.exit(f"{name}: no word in the schema of {sorted(unknown)}")
    print(name)
