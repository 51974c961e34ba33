"""The schemas of the ops, by name."""

from outrider.plugins.ops import OPS

SCHEMAS = {name: op.schema for name, op in OPS.items()}
