"""Attentive reader on the CNN questions (section 6.2)."""
