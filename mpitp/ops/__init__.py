"""Pure maths on arrays, each forward beside its backward; nothing here knows of ranks."""
