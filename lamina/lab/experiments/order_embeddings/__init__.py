"""Order embeddings of images and language (section 6.1)."""
