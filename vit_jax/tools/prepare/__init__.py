"""Preparation of data sets as sharded ArrayRecord files."""
