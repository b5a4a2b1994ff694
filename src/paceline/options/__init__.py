"""Options as dataclass fields, and values as people write and read them. Imports no torch."""
