"""Native operations on JPEGs, and the index that cuts them."""
