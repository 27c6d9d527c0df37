"""Skip-thought vectors (section 6.3)."""
