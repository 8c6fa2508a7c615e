"""Writing data: from images of any source to shards."""
