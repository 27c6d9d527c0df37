"""Data sets: a registry, file formats, and downloads."""
