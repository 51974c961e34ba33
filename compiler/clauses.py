"""What Pydantic wants of a value, as the clause that follows the key in a message."""

CLAUSES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_attributes_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be text (quote it if it looks like a number)",
    "too_short": "must have at least {min_length} entry",
    "none_required": "must be absent",
    "tuple_type": "must be a list",
}
"""Pydantic's error types as the clause after the key; the fields are those of the error's context."""
