"""Convolutional networks (section 6.7)."""
