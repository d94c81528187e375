"""Data sets prepared once: from any source to sharded ArrayRecord files."""
