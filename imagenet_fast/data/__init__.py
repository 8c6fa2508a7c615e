"""Data: preparing shards, reading them, and the images in them."""
